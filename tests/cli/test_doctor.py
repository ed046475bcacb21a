"""``capsule doctor``: what is shown and mended, and the exit status. Only keys are checked here."""

import json
import sys

import pytest

from capsule import checkup
from capsule.bundle.keys import generate
from capsule.checkup import Check, check_key, private_keys
from capsule.cli.doctor import PROFILES
from capsule.machine.self_test import GpuSelfTest, SelfTest
from tests.cli.conftest import capsule

PYTHON = Check("Python", "ok", "3.11")
GPU = GpuSelfTest(gpu="NVIDIA H200", compute_capability="9.0", libraries={}, found="it repeats")


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Return a function that has the checks of this machine give some results."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CAPSULE_CONFIG", str(tmp_path / "configuration"))
    monkeypatch.delenv("CAPSULE_KEY", raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("TMPDIR", raising=False)
    (tmp_path / "cache").mkdir()

    def have(*checks):
        monkeypatch.setattr(
            checkup, "check_machine", lambda keys: (*checks, *map(check_key, private_keys(keys)))
        )

    have(PYTHON)
    return have


@pytest.fixture
def numerics(monkeypatch):
    """Return a function that has the profiles' self-tests end with some statuses."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)

    def have(**statuses):
        monkeypatch.setattr(
            "capsule.machine.self_test.self_test",
            lambda name: SelfTest(
                profile=name, status=statuses.get(name.replace("-", "_"), "as expected"), answers=3
            ),
        )

    have()
    return have


def doctor(*options):
    return capsule("doctor", "--profile", "none", *options)


def checks_of(done):
    return {each["name"]: each["status"] for each in json.loads(done.stdout)["checks"]}


def test_the_own_key_of_the_user_is_checked(tmp_path):
    assert "key " not in doctor().stdout
    own = tmp_path / "configuration" / "key"
    generate(own)
    own.chmod(0o640)
    assert checks_of(doctor("--json"))[f"key {own}"] == "problem"
    done = doctor("--fix")
    assert done.exit_code == 0
    assert str(own) in done.stderr
    assert own.stat().st_mode & 0o777 == 0o600


def test_named_keys_are_checked_too(tmp_path):
    (tmp_path / "lab").mkdir()
    generate(tmp_path / "lab" / "bob")
    words = ["--key", "lab/bob", "--key", "lab/missing", "--json"]
    assert checks_of(doctor(*words)) == {
        "Python": "ok",
        "key lab/bob": "ok",
        "key lab/missing": "problem",
    }


@pytest.mark.parametrize(("status", "code"), [("as expected", 0), ("differs", 1), ("unchecked", 4)])
def test_the_exit_status_says_whether_numerics_differ(numerics, status, code):
    numerics(portable_v3=status, portable_v3_strict=status, portable_v2=status)
    done = capsule("doctor")
    assert done.exit_code == code
    assert done.stdout.count("portable-v3") == 2


def test_one_profile_that_differs_weighs_more_than_others_that_were_not_tested(numerics, machine):
    numerics(portable_v3="unchecked", portable_v2="differs")
    machine(PYTHON, Check("disk", "problem", "full", "Delete something."))
    assert capsule("doctor").exit_code == 1
    numerics(portable_v2="impossible")
    assert capsule("doctor").exit_code == 4


def test_the_profiles_are_shown_in_their_order_whichever_is_tested_first(numerics):
    document = json.loads(capsule("doctor", "--json").stdout)
    assert [test["profile"] for test in document["profiles"]] == list(PROFILES)
    assert len(document["checks"]) == 1 + len(PROFILES)
    one = json.loads(capsule("doctor", "--profile", "portable-v2", "--json").stdout)
    assert [test["profile"] for test in one["profiles"]] == ["portable-v2"]


def test_without_torch_everything_else_is_checked(monkeypatch):
    found = sys.modules["importlib.util"].find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "torch" else found(name)
    )
    done = capsule("doctor")
    assert done.exit_code == 0
    assert done.stdout.startswith("ok         Python: 3.11\n")
    assert "unchecked  numerics: this Python has no torch" in done.stdout
    named = capsule("doctor", "--profile", "portable-v3")
    assert named.exit_code == 4
    assert "CAP-M007" in named.output


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("problem", 4)])
def test_only_a_problem_prevents_a_run(machine, status, code):
    machine(PYTHON, Check("disk", status, "it is so", None if status == "ok" else "Change it."))
    done = doctor("--json")
    assert done.exit_code == code
    assert checks_of(done) == {"Python": "ok", "disk": status}


def test_a_remedy_is_below_its_check_and_no_line_is_longer_than_a_terminal(machine, monkeypatch):
    machine(Check("disk", "problem", " ".join(["word"] * 40), " ".join(["fix-it"] * 40)))
    lines = doctor().stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("problem    disk: word word")
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, doctor().stdout.splitlines())) <= 40
    remedy = next(number for number, line in enumerate(lines) if "fix: " in line)
    assert lines[remedy].startswith("           fix: fix-it")
    assert all(line.startswith(" " * 11) for line in lines[1:])
    words = " ".join(lines).split()
    assert (words.count("word"), words.count("fix-it")) == (40, 40)


def test_what_is_found_does_not_control_the_terminal(machine):
    machine(Check("GPU", "warning", "a\x1b[2Jb", "c\x07d"))
    shown = doctor().stdout
    assert ("a\ufffd[2Jb" in shown, "c\ufffdd" in shown) == (True, True)


def test_nothing_is_mended_without_the_option(tmp_path):
    generate(tmp_path / "alice")
    (tmp_path / "alice").chmod(0o644)
    (tmp_path / "cache").rmdir()
    done = doctor("--json")
    assert (done.exit_code, json.loads(done.stdout)["fixed"]) == (4, [])
    assert (tmp_path / "alice").stat().st_mode & 0o777 == 0o644
    assert not (tmp_path / "cache").exists()
    fixed = doctor("--fix", "--json")
    assert (fixed.exit_code, len(json.loads(fixed.stdout)["fixed"])) == (0, 2)
    assert fixed.stderr.count("--fix ") == 2


@pytest.mark.parametrize(("found", "code"), [(GPU, 0), ("a sum differs from that of the CPU", 4)])
def test_a_gpu_that_computes_something_else_is_a_problem(monkeypatch, found, code):
    monkeypatch.setattr("capsule.machine.self_test.gpu_self_test", lambda: found)
    done = doctor("--gpu")
    assert done.exit_code == code
    assert (found if code else found.found) in " ".join(done.stdout.split())


def test_an_unknown_profile_is_refused_and_the_known_ones_are_named():
    done = capsule("doctor", "--profile", "portable-v9")
    assert done.exit_code == 2
    assert all(f"'{name}'" in done.stderr for name in ("all", "none", *PROFILES))
