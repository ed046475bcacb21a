"""Determinism in child processes: it reaches each of them, or its import of torch is refused."""

import gc
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.training.determinism import child_processes
from tests.conftest import printed
from tests.training.conftest import CARTPOLE, ROOT, make_spec, start_variables
from tests.training.determinism.conftest import run, spec_with

ACTIVATION = Path(child_processes.__file__).with_name("capsule-determinism.pth")


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """Make an interpreter whose site-packages hold what an image's hold."""
    folder = tmp_path_factory.mktemp("image")
    venv.create(folder, symlinks=True)
    site = folder / f"lib/python{sysconfig.get_python_version()}/site-packages"
    (site / "a.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    (site / ACTIVATION.name).write_bytes(ACTIVATION.read_bytes())
    return folder / "bin/python"


PROBE = """
import json, multiprocessing, os, subprocess, sys

def report():
    import torch
    return {
        "hash": hash("capsule"),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "onednn": torch.backends.mkldnn.enabled,
        "mode": torch.get_deterministic_debug_mode(),
        "fills": bool(torch.empty(4096).isnan().all()),
        "threads": torch.get_num_threads(),
    }

class Reports:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return json.dumps(report())

def in_pool(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply(report)

def in_subprocess(**arguments):
    code = "import probe; print(probe.json.dumps(probe.report()))"
    return json.loads(
        subprocess.check_output([sys.executable, "-c", code], cwd=sys.path[0], **arguments)
    )

def in_loader(method):
    from torch.utils.data import DataLoader
    loader = DataLoader(Reports(), batch_size=None, num_workers=1, multiprocessing_context=method)
    return json.loads(next(iter(loader)))

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["torch"])
    children = {
        "spawn": lambda: in_pool("spawn"),
        "forkserver": lambda: in_pool("forkserver"),
        "subprocess": in_subprocess,
        "cleaned": lambda: in_subprocess(env={}),
        "loader": lambda: in_loader("forkserver"),
        "here": report,
        "fork": lambda: in_pool("fork"),
    }
    print(json.dumps({name: children[name]() for name in sys.argv[1:]}))
"""


def probe(interpreter, folder, determinism, *children):
    (folder / "probe.py").write_text(PROBE)
    accelerator = {"kind": "cpu", "numerics": "portable-v3-strict"}  # it wants more than variables
    spec = make_spec(CARTPOLE, accelerator=accelerator, determinism=determinism)
    command = [interpreter, folder / "probe.py", *children]
    return json.loads(printed(command, start_variables(spec)))


@pytest.mark.slow
def test_the_flags_reach_every_child(interpreter, tmp_path):
    children = ("spawn", "forkserver", "cleaned", "loader", "here", "fork")
    found = probe(interpreter, tmp_path, {"hash_seed": 7, "threads": 3}, *children)
    wanted = {"isa": "AVX2", "onednn": False, "mode": 2, "fills": True, "threads": 3}
    assert found["here"].items() >= wanted.items()
    assert found.pop("loader") == {**found["here"], "threads": 1}  # torch's own rule for workers
    assert all(child == found["here"] for child in found.values()), found


@pytest.mark.slow
def test_without_propagation_they_do_not(interpreter, tmp_path):
    settings = {"hash_seed": 7, "propagation": False}
    found = probe(interpreter, tmp_path, settings, "subprocess", "cleaned")
    assert found["subprocess"]["mode"] == found["cleaned"]["mode"] == 0
    assert not found["subprocess"]["fills"]
    assert found["subprocess"]["onednn"]
    assert found["subprocess"]["isa"] == "AVX2"  # variables are inherited all the same ...
    assert found["subprocess"]["hash"] != found["cleaned"]["hash"]  # ... unless they are cleaned


START = """
import json, os, sys
print(json.dumps({
    "executable": sys.executable,
    "arguments": sys.argv[1:],
    "options": [sys.flags.safe_path, sys.flags.optimize],
    "input": sys.stdin.read(),
    "environment": dict(os.environ),
}))
"""


def test_a_cleaned_child_starts_again_as_it_was_and_with_what_it_lacks(interpreter):
    variables = start_variables(spec_with()) | {
        "LD_PRELOAD": "libm.so.6",
        "CUDA_VISIBLE_DEVICES": "GPU-2c1d3a5e",  # of the process engine, with a driver's folder
        "LD_LIBRARY_PATH": "/opt/driver",
    }
    code = (
        "import subprocess, sys\n"
        "mine = {'TZ': 'Europe/Berlin', 'MINE': 'kept'}\n"
        "command = [sys.executable, '-P', '-O', '-c', sys.argv[1], 'an argument', '']\n"
        "print(subprocess.run(command, env=mine, input='given', text=True,\n"
        "    stdout=subprocess.PIPE).stdout)\n"
    )
    child = run(interpreter, code, variables, arguments=[START])
    environment = child.pop("environment")
    assert child == {
        "executable": str(interpreter),
        "arguments": ["an argument", ""],
        "options": [True, 1],
        "input": "given",
    }
    # LC_CTYPE is what Python itself gives a process that has no locale (PEP 538).
    mine = {"TZ": "Europe/Berlin", "MINE": "kept", "LC_CTYPE": "C.UTF-8"}
    assert environment == {**variables, **mine}


def test_settings_are_found_behind_other_programs(interpreter):
    variables = start_variables(spec_with())
    code = (
        "import subprocess, sys\n"
        "shell = ['env', '-i', 'sh', '-c', '\"$0\" -c \"$1\"; true', sys.executable, sys.argv[1]]\n"
        "print(subprocess.run(shell, stdin=subprocess.DEVNULL, text=True,\n"
        "    stdout=subprocess.PIPE).stdout)\n"
    )
    child = run(interpreter, code, variables, arguments=[START])
    assert child["environment"].items() >= variables.items()


@pytest.mark.parametrize(
    ("options", "change", "said"),
    [
        ([], {"MKL_CBWR": "AUTO"}, "CAP-T101 environment variable MKL_CBWR is 'AUTO'"),
        ([], {"OMP_NUM_THREADS": None}, "CAP-T101 environment variable OMP_NUM_THREADS is None"),
        (["-I"], {}, "CAP-T102 the interpreter ignores PYTHONHASHSEED=0"),
        (["-E"], {}, "CAP-T102"),
        (["-R"], {}, "CAP-T102"),
    ],
)
def test_a_child_that_was_started_otherwise_cannot_use_torch(interpreter, options, change, said):
    variables = start_variables(spec_with()) | change
    done = subprocess.run(
        [interpreter, *options, "-c", "print('started', flush=True)\nimport torch\nprint('used')"],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout == "started\n"
    assert said in done.stderr


@pytest.mark.parametrize("left_to", [2, 1])
def test_an_ancestor_that_ends_during_the_search_does_not_end_it(monkeypatch, left_to):
    parents = {4: 3, 3: 2, 2: 1, 1: 0}

    def environment_of(process):
        if process == 3:
            parents[4] = left_to
            raise FileNotFoundError
        return {child_processes.VARIABLE: "settings"} if process == left_to else {}

    monkeypatch.setattr(os, "getppid", lambda: 4)
    monkeypatch.setattr(child_processes, "_parent", parents.__getitem__)
    monkeypatch.setattr(child_processes, "environment_of", environment_of)
    found = child_processes._environment_of_ancestors()
    assert found == {child_processes.VARIABLE: "settings"}


def test_the_search_ends_at_a_process_of_another_user(monkeypatch):
    def environment_of(process):
        raise PermissionError

    monkeypatch.setattr(child_processes, "environment_of", environment_of)
    assert child_processes._environment_of_ancestors() is None


def test_asking_for_torch_is_not_importing_it(interpreter):
    variables = start_variables(spec_with()) | {"MKL_CBWR": "AUTO"}
    code = (
        "import importlib.util, json, sys\n"
        "found = importlib.util.find_spec('torch').name\n"
        "print(json.dumps([found, 'torch' in sys.modules]))"
    )
    assert run(interpreter, code, variables) == ["torch", False]


@pytest.mark.parametrize("enabled", [True, False])
def test_torch_is_imported_without_the_garbage_collector(monkeypatch, enabled):
    for name in ("check_start", "_set_flags"):
        monkeypatch.setattr(child_processes, name, lambda *_: None)
    finder, during = child_processes._TorchFinder('{"environment": {}}', {}), []

    def execute():
        during.append(gc.isenabled())
        raise ImportError

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ImportError):
            finder.around(execute)
        assert (during, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if before else gc.disable)()


def test_a_start_imports_next_to_nothing(interpreter):
    code = "import sys; names = sorted(sys.modules); import json; print(json.dumps(names))"
    inside = set(run(interpreter, code, start_variables(spec_with())))
    outside = set(run(interpreter, code, {}))
    assert inside == outside
    own = {name for name in inside if name.startswith("capsule")}
    module = "capsule.training.determinism.child_processes"
    assert own == {module, *(module.rsplit(".", parts)[0] for parts in (1, 2, 3))}
    assert not inside & {"json", "pathlib", "typing", "dataclasses", "pydantic", "torch"}


def test_an_interpreter_outside_a_run_is_left_alone(interpreter):
    code = "import json, sys; print(json.dumps([type(f).__name__ for f in sys.meta_path]))"
    finders = run(interpreter, code, start_variables(spec_with()))
    assert finders.count("_TorchFinder") == 1
    assert "_TorchFinder" not in run(interpreter, code, {})


# --- numpy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "profile", "seen"),
    [
        ("1.26.4", "portable-v3", {"AVX512F", "AVX512_SKX", "AVX512_CNL", "AVX512_ICL"}),
        ("2.3.0rc1", "portable-v2", {"AVX", "AVX2", "FMA3", "F16C", "AVX512F", "AVX512_SPR"}),
        ("2.4.0", "portable-v3", {"X86_V4", "AVX512_ICL", "AVX512_SPR"}),
        (None, "portable-v3", {"X86_V4", "AVX512_ICL", "AVX512_SPR"}),
    ],
)
def test_an_import_of_numpy_finds_the_names_that_it_knows(
    interpreter, tmp_path, version, profile, seen
):
    (tmp_path / "numpy").mkdir()
    # As numpy 1.26 does on a processor without AVX-512, in a program that tolerates no warning.
    module = (
        "import os, warnings\n"
        "seen = os.environ['NPY_DISABLE_CPU_FEATURES'].split()\n"
        "text = \"During parsing environment variable: 'NPY_DISABLE_CPU_FEATURES':\\nYou cannot\"\n"
        "'X86_V4' in seen or warnings.warn(text, RuntimeWarning)\n"
    )
    (tmp_path / "numpy/__init__.py").write_text(module)
    if version is not None:
        (tmp_path / f"numpy-{version}.dist-info").mkdir()
    variables = start_variables(make_spec(CARTPOLE, accelerator={"numerics": profile}))
    code = (
        "import json, os, sys, warnings; warnings.simplefilter('error')\n"
        "sys.path.insert(0, sys.argv[1]); import numpy\n"
        "print(json.dumps([numpy.seen, os.environ['NPY_DISABLE_CPU_FEATURES']]))"
    )
    found, afterwards = run(interpreter, code, variables, arguments=[str(tmp_path)])
    assert seen <= set(found)
    assert ("X86_V4" in found) == ("X86_V4" in seen)
    assert afterwards == variables["NPY_DISABLE_CPU_FEATURES"]


# --- how an interpreter was started ---------------------------------------------------------------

# The seed of these tests' own interpreter, as far as it can be told: 0, or any other.
OWN_SEED, OTHER_SEED = ("42", "0") if sys.flags.hash_randomization else ("0", "42")
EXPECTED = {"PYTHONHASHSEED": OWN_SEED, "OMP_NUM_THREADS": "1"}


def test_a_start_with_the_expected_variables_and_further_ones_is_accepted():
    child_processes.check_start({**EXPECTED, "TZ": "UTC"}, EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("value", [None, "", "9"])
def test_a_start_without_an_expected_variable_is_refused(name, value):
    environment = {**EXPECTED, name: value}
    if value is None:
        del environment[name]
    with pytest.raises(CapsuleError) as refused:
        child_processes.check_start(environment, EXPECTED)
    assert refused.value.code == "CAP-T101"
    assert f"variable {name} is {value!r}; the spec needs {EXPECTED[name]!r}" in (
        refused.value.message
    )
    assert "capsule run" in refused.value.fix


def test_a_hash_seed_that_is_set_and_not_in_effect_is_refused():
    expected = {"PYTHONHASHSEED": OTHER_SEED}
    with pytest.raises(CapsuleError, match=f"CAP-T102 .*PYTHONHASHSEED={OTHER_SEED}") as refused:
        child_processes.check_start(expected, expected)
    assert "-E, -I or -R" in refused.value.fix


def test_a_hash_seed_is_not_in_effect_under_the_option_that_randomizes(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-R", "-m", "program"])
    with pytest.raises(CapsuleError, match=f"CAP-T102 .*PYTHONHASHSEED={OWN_SEED}"):
        child_processes.check_start(EXPECTED, EXPECTED)


def test_the_environment_of_a_process_is_what_it_was_started_with():
    given = {"PLAIN": "1", "EMPTY": "", "SIGNS": "a=b=c", "BYTES": os.fsdecode(b"\xff\xfe")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["/bin/cat"], env=given, bufsize=0, **pipes) as process:
        # Popen returns as soon as the kernel has begun to load the program. Its environment is
        # there once it answers.
        process.stdin.write(b"?")
        assert process.stdout.read(1) == b"?"
        found = child_processes.environment_of(process.pid)
    assert found == given
    with pytest.raises(OSError):
        child_processes.environment_of(process.pid)


def test_the_own_environment_is_that_of_the_start(monkeypatch):
    monkeypatch.setenv("CAPSULE_TESTS_ADDED_LATER", "1")
    found = child_processes.environment_of("self")
    assert found == child_processes.environment_of(os.getpid())
    assert "CAPSULE_TESTS_ADDED_LATER" not in found


# --- what a process notes -------------------------------------------------------------------------

NOTE = """
import sys
sys.path.insert(0, sys.argv[1])
from capsule.training.determinism.child_processes import note_start
note_start()
"""


@pytest.mark.parametrize(
    ("options", "variables", "seed"),
    [
        ([], {"PYTHONHASHSEED": "7"}, "7"),
        ([], {"PYTHONHASHSEED": "0"}, "0"),
        ([], {"PYTHONHASHSEED": "random"}, "random"),
        ([], {}, "random"),
        (["-E"], {"PYTHONHASHSEED": "7"}, "random"),
        (["-I"], {"PYTHONHASHSEED": "0"}, "random"),
        (["-R"], {"PYTHONHASHSEED": "7"}, "random"),
        (["-R"], {"PYTHONHASHSEED": "0"}, "random"),
        (["-BR"], {"PYTHONHASHSEED": "7"}, "random"),
        (["-W", "error", "-Xdev", "-R"], {"PYTHONHASHSEED": "7"}, "random"),
        (["--check-hash-based-pycs", "never", "-R"], {"PYTHONHASHSEED": "7"}, "random"),
        (["-X", "R", "-Wignore::RuntimeWarning"], {"PYTHONHASHSEED": "7"}, "7"),
    ],
)
def test_a_process_notes_the_hash_seed_that_is_in_effect(tmp_path, options, variables, seed):
    subprocess.run(
        [sys.executable, *options, "-c", NOTE, ROOT],
        env={contract.RUN_VARIABLE: str(tmp_path), **variables},
        check=True,
        timeout=600,
    )
    noted = json.loads((tmp_path / contract.INTERPRETERS).read_text())
    assert noted == {"hash_seed": seed, "watched": False}


@pytest.mark.parametrize(
    "arguments", [[], ["-"], ["program.py", "-R"], ["-m", "R", "-R"], ["-BcR"], ["--", "-R"]]
)
def test_what_follows_the_options_of_an_interpreter_is_not_its_own(arguments):
    assert not child_processes._randomizes(["python", *arguments])


def test_a_process_of_a_run_notes_that_it_is_watched(interpreter, tmp_path):
    variables = start_variables(spec_with(hash_seed=7)) | {contract.RUN_VARIABLE: str(tmp_path)}
    assert run(interpreter, "print(1)", variables) == 1
    (line,) = (tmp_path / contract.INTERPRETERS).read_text().splitlines()
    assert json.loads(line) == {"hash_seed": "7", "watched": True}


def test_flags_are_noted_behind_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv(contract.RUN_VARIABLE, str(tmp_path))
    for flags in ({"torch.num_threads": "1"}, {"torch.flush_denormal": "False"}):
        child_processes.note_torch(flags)
    lines = (tmp_path / contract.INTERPRETERS).read_text().splitlines()
    assert list(map(json.loads, lines)) == [
        {"torch": {"torch.num_threads": "1"}},
        {"torch": {"torch.flush_denormal": "False"}},
    ]


def test_outside_a_run_nothing_is_noted(tmp_path, monkeypatch):
    monkeypatch.delenv(contract.RUN_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    child_processes.note_start()
    child_processes.note_torch({"torch.num_threads": "1"})
    assert not list(tmp_path.iterdir())


def test_a_link_in_place_of_the_account_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setenv(contract.RUN_VARIABLE, str(tmp_path))
    (tmp_path / "elsewhere").write_bytes(b"kept")
    (tmp_path / contract.INTERPRETERS).symlink_to("elsewhere")
    child_processes.note_start()
    assert (tmp_path / "elsewhere").read_bytes() == b"kept"


def test_a_pipe_in_place_of_the_account_does_not_block(tmp_path, monkeypatch):
    monkeypatch.setenv(contract.RUN_VARIABLE, str(tmp_path))
    os.mkfifo(tmp_path / contract.INTERPRETERS)
    child_processes.note_start()  # opening it to write would wait for a reader
    assert (tmp_path / contract.INTERPRETERS).is_fifo()


def test_a_process_that_cannot_note_its_start_starts_nonetheless(tmp_path, monkeypatch):
    monkeypatch.setenv(contract.RUN_VARIABLE, str(tmp_path / "missing"))
    child_processes.note_start()
    assert not list(tmp_path.iterdir())
