"""The determinism layers: each holds, and each that is switched off is noticed.

Noticed means three things: it is among the relaxations, it reads back as off, and two processes or
settings that were equal differ. ``test_inference.py`` has the layers that concern many actors.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from capsule.experiment.variables import environment_variables
from capsule.training.determinism import child_processes, torch_flags
from tests.training.conftest import CARTPOLE, ROOT, make_spec, start_variables
from tests.training.determinism.test_flags import CUDA

CPU = {"kind": "cpu"}
ACTIVATION = Path(torch_flags.__file__).with_name("capsule-determinism.pth")


def spec_with(**determinism):
    return make_spec(CARTPOLE, determinism=determinism)


def run(interpreter, code, variables, *options, arguments=()):
    """Run code in an interpreter of its own; return what it printed, as JSON."""
    done = subprocess.run(
        [interpreter, *options, "-c", code, *arguments],
        env={"PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- the switches ---------------------------------------------------------------------------------


# --- hash seed ------------------------------------------------------------------------------------

ORDER = "import json; print(json.dumps([hash('capsule'), list({str(n) for n in range(50)})]))"


@pytest.mark.parametrize("seed", [0, 42])
def test_a_hash_seed_fixes_the_order_of_sets(seed):
    variables = environment_variables(spec_with(hash_seed=seed))
    assert run(sys.executable, ORDER, variables) == run(sys.executable, ORDER, variables)


def test_without_a_hash_seed_it_differs():
    variables = environment_variables(spec_with(hash_seed=None))
    one, other = (run(sys.executable, ORDER, variables) for _ in range(2))
    assert one[0] != other[0]
    assert one[1] != other[1]


# --- propagation ----------------------------------------------------------------------------------


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
    done = subprocess.run(
        [interpreter, folder / "probe.py", *children],
        env=start_variables(spec),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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


# --- torch's own flags ----------------------------------------------------------------------------

FLAGS = """
import json, sys, warnings
import torch
from capsule.training.determinism import child_processes, torch_flags

def put():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
        except RuntimeError as error:
            return "error"
    return "warn" if warned else "off"

results = []
for determinism in json.loads(sys.argv[1]):
    flags = torch_flags.apply(torch_flags.TorchFlags.of(determinism))
    torch.zeros(4096)
    results.append([flags, put(), bool(torch.empty(4096).isnan().all())])
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def flags():
    """Apply settings one after the other: what reads back, what put_ does, whether memory fills."""
    names = {
        "strict": {},
        "warn": {"algorithms": "warn"},
        "off": {"algorithms": "off"},
        "unfilled": {"fill_uninitialized_memory": False},
        "benchmark": {"cudnn_benchmark": True},
        "tf32": {"tf32": True},
    }
    tried = [spec_with(**changes).determinism.model_dump() for changes in names.values()]
    variables = start_variables(spec_with(propagation=False))
    results = run(sys.executable, FLAGS, variables, arguments=[json.dumps(tried)])
    return dict(zip(names, results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode", "put", "fills"),
    [
        ("strict", "2", "error", True),
        ("warn", "1", "warn", True),
        ("off", "0", "off", False),
        ("unfilled", "2", "error", False),
    ],
)
def test_a_nondeterministic_operator_fails_warns_or_runs(flags, name, mode, put, fills):
    read, did, filled = flags[name]
    assert read["torch.deterministic_debug_mode"] == mode
    assert read["torch.fill_uninitialized_memory"] == str(fills)
    assert (did, filled) == (put, fills)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("off", {"torch.cudnn.deterministic": "False"}),
        ("benchmark", {"torch.cudnn.benchmark": "True"}),
        (
            "tf32",
            {
                "torch.cuda.matmul.allow_tf32": "True",
                "torch.cuda.matmul.fp32_precision": "tf32",
                "torch.cudnn.allow_tf32": "True",
                "torch.cudnn.conv.fp32_precision": "tf32",
            },
        ),
    ],
)
@pytest.mark.slow
def test_flags_of_the_gpu_read_back_as_set(flags, name, changed):
    strict, weaker = flags["strict"][0], flags[name][0]
    assert strict.keys() == weaker.keys()
    assert {key: value for key, value in weaker.items() if value != strict[key]}.items() >= (
        changed.items()
    )


SUM = """
import json, os, sys
cores = sorted(os.sched_getaffinity(0))[: int(sys.argv[1])]
os.sched_setaffinity(0, cores)
import torch
values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
print(json.dumps([torch.get_num_threads(), values.sum().item().hex()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_number_of_cores_changes_bits_unless_threads_are_fixed():
    def total(cores, **determinism):
        variables = start_variables(spec_with(**determinism))
        return run(sys.executable, SUM, variables, arguments=[cores])

    one, two = total("1", threads=None), total("2", threads=None)
    assert (one[0], two[0]) == (1, 2)
    assert one[1] != two[1]
    assert total("1", threads=2) == two


GPU = """
import json, sys, warnings
import torch
from capsule.training.determinism import child_processes, torch_flags

def overwrite():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            x = torch.ones(4, device="cuda")
            x.put_(torch.zeros(2, dtype=torch.long, device="cuda"), torch.ones(2, device="cuda"))
        except RuntimeError:
            return "error"
    return "warn" if warned else "off"

factors = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).cuda()
results = []
for determinism in json.loads(sys.argv[1]):
    torch_flags.apply(torch_flags.TorchFlags.of(determinism))
    results.append([overwrite(), (factors @ factors).cpu().double().sum().item().hex()])
print(json.dumps(results))
"""


@pytest.mark.gpu
def test_on_a_gpu_the_flags_take_effect():
    settings = [{}, {"algorithms": "warn"}, {"algorithms": "off"}, {"tf32": True}]
    tried = [spec_with(**changes).determinism.model_dump() for changes in settings]
    spec = make_spec(CARTPOLE, accelerator=CUDA, determinism={"propagation": False})
    variables = start_variables(spec)
    del variables["NVIDIA_TF32_OVERRIDE"]  # it would overrule the flag that is tried here
    strict, warn, off, tf32 = run(sys.executable, GPU, variables, arguments=[json.dumps(tried)])
    assert [strict[0], warn[0], off[0]] == ["error", "warn", "off"]
    assert strict[1] == warn[1] == off[1] != tf32[1]
