"""What a run says that it used: counted from what its Python processes wrote, read from /proc."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import capsule
from capsule.experiment.contract import INTERPRETERS, RUN_FOLDER
from capsule.training.accounts import accounted, interfaces, interpreters, surroundings
from capsule.training.determinism.child_processes import COMPILERS

PACKAGE = Path(capsule.__file__).parent
DETERMINISM = '{"determinism":{},"environment":{"PYTHONHASHSEED":"0"},"numerics":null}'


@pytest.fixture
def python(tmp_path):
    """Return a function that starts Python as in a run, and gives the account afterwards."""
    site = tmp_path / "site"
    site.mkdir()
    hooks = sorted((PACKAGE / "training").rglob("*.pth"))
    (site / "sitecustomize.py").write_text("".join(path.read_text() for path in hooks))

    def start(*arguments, **variables):
        environment = {
            "PATH": os.defpath,
            "PYTHONPATH": f"{site}:{PACKAGE.parent}",
            "CAPSULE_RUN": str(tmp_path),
            "CAPSULE_DETERMINISM": DETERMINISM,
            **variables,
        }
        kept = {name: value for name, value in environment.items() if value is not None}
        subprocess.run([sys.executable, *(arguments or ("-c", "pass"))], env=kept, check=True)
        return interpreters(tmp_path)

    return start


@pytest.mark.slow
def test_every_process_tells_its_hash_seed(python):
    assert python(PYTHONHASHSEED="0").hash_seeds == {"0": 1}
    assert python(PYTHONHASHSEED="42").hash_seeds == {"0": 1, "42": 1}
    assert python(PYTHONHASHSEED="random").hash_seeds["random"] == 1
    assert python().hash_seeds["random"] == 2
    assert python(PYTHONHASHSEED="").hash_seeds["random"] == 3
    assert python().started == 6


def test_children_tell_theirs_and_forks_are_not_counted(python):
    code = (
        "import os, subprocess, sys; child = os.fork()\n"
        "subprocess.run([sys.executable, '-c', ''])\n"
        "child and os.waitpid(child, 0)"
    )
    assert python("-c", code, PYTHONHASHSEED="0").hash_seeds == {"0": 3}


def test_imported_compilers_are_named_once_each_wherever_they_were_imported(python, tmp_path):
    for name in ("numba", "jaxlib", "cv2", "faiss", "onnxruntime", "tensorflow"):
        (tmp_path / "site" / f"{name}.py").write_text("")
    assert python().compilers is None
    code = (
        "import numba, os, subprocess, sys; child = os.fork()\n"
        "child and os.waitpid(child, 0)\n"
        "child or __import__('jaxlib')\n"
        "child and subprocess.run([sys.executable, '-c', 'import numba'])"
    )
    assert python("-c", code).compilers == "jaxlib, numba"
    code = "import tensorflow, faiss, cv2, onnxruntime"  # the account is of both programs
    assert python("-c", code).compilers == "cv2, faiss, jaxlib, numba, onnxruntime, tensorflow"


@pytest.mark.parametrize("earlier", [True, False])
def test_a_trainers_process_tells_of_a_compiler_too(tmp_path, monkeypatch, earlier):
    for name in COMPILERS:  # another test may have imported one of them
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "numba.py").write_text("")
    if earlier:
        importlib.import_module("numba")
    with accounted(tmp_path, {}):
        importlib.import_module("numba")
    assert interpreters(tmp_path).compilers == "numba"


def test_processes_that_nobody_watches_are_counted(python):
    assert python(PYTHONHASHSEED="0").unwatched == 0
    assert python(CAPSULE_DETERMINISM=None).unwatched == 1


def test_a_process_with_a_cleaned_environment_restarts_and_is_counted_once(python):
    code = (
        "import os, subprocess, sys\n"
        "kept = {'PYTHONPATH': os.environ['PYTHONPATH']}\n"
        "subprocess.run([sys.executable, '-c', ''], env=kept)"
    )
    found = python("-c", code, PYTHONHASHSEED="0")
    assert (found.hash_seeds, found.restarted) == ({"0": 2}, 1)


def test_a_process_outside_any_run_writes_nothing(python, tmp_path):
    assert python(CAPSULE_RUN=None).started == 0
    assert not (tmp_path / INTERPRETERS).exists()


def test_a_process_that_cannot_write_goes_on_and_is_missing(python, tmp_path):
    assert python(CAPSULE_RUN=str(tmp_path / "nowhere")).started == 0


@pytest.mark.parametrize("spoilt", [b"{", b'{"hash_seed":7}\n', b'{"other":"0"}\n', b"[]\n"])
def test_an_account_that_the_program_changed_is_none(tmp_path, spoilt):
    (tmp_path / INTERPRETERS).write_bytes(b'{"hash_seed":"0"}\n' + spoilt)
    assert interpreters(tmp_path) is None


def test_an_account_that_is_no_file_is_none(tmp_path):
    (tmp_path / INTERPRETERS).symlink_to("/dev/zero")
    assert interpreters(tmp_path) is None


def test_a_trainers_process_tells_of_itself_and_leaves_the_environment_as_it_was(tmp_path):
    flags = {"torch.num_threads": "1", "environment.TZ": "UTC"}
    before = dict(os.environ)
    with accounted(tmp_path, flags):
        assert os.environ["CAPSULE_RUN"] == str(tmp_path)
    assert dict(os.environ) == before
    found = interpreters(tmp_path)
    assert found.started == 1
    assert [group.flags for group in found.torch] == [{"torch.num_threads": "1"}]


def test_a_default_route_leads_everywhere():
    assert interfaces([]) == interfaces([("lo", 0)]) == {}
    assert interfaces([("eth0", 24)]) == {"eth0": "neighbours"}
    assert interfaces([("eth0", 24), ("eth0", 0), ("eth0", 64), ("eth1", 16)]) == {
        "eth0": "everywhere",
        "eth1": "neighbours",
    }


def test_surroundings_are_read_from_this_machine(tmp_path):
    found = surroundings(tmp_path)
    assert not found.fixed_paths
    assert surroundings(Path(RUN_FOLDER)).fixed_paths
    assert found.c_library.startswith("glibc 2.")
    assert all(Path("/sys/class/net", name).exists() for name in found.interfaces)


def test_a_run_without_a_network_sees_no_interface(tmp_path):
    code = (
        "from pathlib import Path; from capsule.training.accounts import surroundings;"
        "print(surroundings(Path('/')).interfaces)"
    )
    own = ["--net"] if os.geteuid() == 0 else ["--net", "--user", "--map-root-user"]
    command = ["unshare", *own, sys.executable, "-c", code]
    environment = {"PATH": os.defpath, "PYTHONPATH": str(PACKAGE.parent)}
    assert subprocess.check_output(command, env=environment, text=True) == "{}\n"
