"""The start-up self-test, its golden answers, and ``capsule doctor``'s view of them."""

import json
import struct
from hashlib import sha256

import numpy as np
import pytest
import torch

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import ImageSpec
from capsule.image.distribution import DISTRIBUTIONS
from capsule.machine import self_test as machine
from capsule.training.determinism import operator_sweep, self_test
from capsule.training.determinism.self_test import differences, digest, expected, start_up_test
from tests.training.determinism.test_cpu import PORTABLE, python

NUMPY = "2.4.6"
GOLDEN = {profile: self_test._golden_sets(profile) for profile in PORTABLE}


def test_a_digest_covers_type_shape_and_bytes():
    one = torch.tensor([1.0, 2.0])
    wanted = sha256(b"<f4(2,)" + struct.pack("<2f", 1.0, 2.0)).hexdigest()[:16]
    assert digest(one) == digest(one.numpy()) == digest([one]) == wanted
    others = [one.double(), one[None], -one, [one, one], one.half(), one.bfloat16()]
    assert len({wanted, *map(digest, others)}) == len(others) + 1
    assert digest(np.float64(0.5)) == digest(torch.tensor(0.5, dtype=torch.float64))


@pytest.mark.slow
def test_answers_depend_on_nothing_but_the_machine():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = self_test.answers()
    assert torch.equal(before, torch.get_rng_state())
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    try:
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(threads + 1)
        assert self_test.answers() == first
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)


@pytest.mark.parametrize("profile", PORTABLE)
def test_golden_answers_cover_the_whole_sweep(profile):
    names = set(operator_sweep.operators(optimizers=True))
    names |= {"training.convolutional", "training.recurrent", "training.residual"}
    assert GOLDEN[profile]
    for known in GOLDEN[profile]:
        assert set(known["libraries"]) == {"glibc", "numpy", "torch"}
        assert set(known["answers"]) == names
        assert len(set(known["answers"].values())) > 0.9 * len(names)


def test_profiles_are_not_the_same_numbers():
    same = {"libm.sqrt", "torch.add"}
    wide, strict, narrow = (GOLDEN[profile][0]["answers"] for profile in PORTABLE)
    convolutions = {name for name in wide if name.startswith("layer.conv2d")} - same
    assert any(wide[name] != strict[name] for name in convolutions)
    assert wide["torch.mm"] != narrow["torch.mm"]


START = """
from capsule.experiment.errors import CapsuleError
from capsule.training.determinism import self_test
for name in sys.argv[1].split(","):
    cpu.settle(name)
    try:
        print(json.dumps(self_test.start_up_test(name)))
    except CapsuleError as error:
        print(json.dumps([error.code, int(error.exit_code), error.message]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("profile", PORTABLE)
def test_this_machine_keeps_the_promise(profile):
    optimizers = len(operator_sweep._optimizers())
    count = len(GOLDEN[profile][0]["answers"]) - optimizers
    assert python(START, profile) == f"{count} answers as expected"


@pytest.mark.slow
def test_the_promise_does_not_depend_on_the_number_of_maths_threads():
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "2")
    assert python(START, "portable-v3", **threads).endswith("answers as expected")


@pytest.mark.slow
def test_a_machine_that_computes_otherwise_is_stopped_and_the_operator_named():
    code, status, message = python(START, "portable-v3", ONEDNN_MAX_CPU_ISA="SSE41")
    assert (code, status) == ("CAP-T109", 4)
    assert "torch.gelu is the first of" in message


@pytest.mark.slow
def test_without_the_shim_the_self_test_notices():
    code, _, message = python(START, "portable-v3", preload=False)
    assert code == "CAP-T109"
    assert "torch.atan is the first of" in message


def test_the_native_profile_promises_nothing():
    assert start_up_test("native") == "no expectation"


def test_unknown_libraries_are_said_to_be_unchecked(monkeypatch):
    versions = {"glibc": "9.9", "numpy": "9.9", "torch": "9.9"}
    monkeypatch.setattr(self_test, "libraries", lambda: versions)
    said = start_up_test("portable-v3")
    assert said == "unchecked: no answers are known for glibc 9.9, numpy 9.9, torch 9.9"


def test_golden_answers_belong_to_exact_versions():
    known = GOLDEN["portable-v3"][0]
    assert expected("portable-v3", known["libraries"]) == known["answers"]
    for name in known["libraries"]:
        assert expected("portable-v3", {**known["libraries"], name: "0"}) is None


@pytest.mark.parametrize("profile", PORTABLE)
@pytest.mark.parametrize("base", DISTRIBUTIONS.values(), ids=lambda each: each.name)
@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.13.0+cu130", "2.14.1+cu130", "2.15.0+cu132"])
def test_every_version_of_torch_has_golden_answers_on_every_base(profile, base, torch):
    glibc = ".".join(map(str, base.glibc))
    assert expected(profile, {"glibc": glibc, "numpy": NUMPY, "torch": torch})


def test_the_default_packages_are_among_them():
    assert {"torch==2.13.0", f"numpy=={NUMPY}"} <= {*ImageSpec().packages}


def test_differences_are_named_in_golden_order():
    golden = {"b": "1", "a": "2", "c": "3"}
    assert differences(golden, dict(golden)) == []
    assert differences(golden, {"a": "0", "b": "1", "d": "4"}) == ["a", "c", "d"]


def test_recording_keeps_the_answers_of_other_libraries(monkeypatch, tmp_path):
    monkeypatch.setattr(self_test, "GOLDEN", tmp_path)
    monkeypatch.setattr(self_test, "answers", lambda: {"x": "1"})
    for version in ("2", "1", "2"):
        versions = {"glibc": "2.36", "numpy": "2", "torch": version}
        monkeypatch.setattr(self_test, "libraries", lambda versions=versions: versions)
        path = self_test.record("portable-v3")
    document = json.loads(path.read_text())
    assert [known["libraries"]["torch"] for known in document["sets"]] == ["1", "2"]


def test_the_programme_reports_a_coded_error(capsys):
    assert self_test.main(["portable-v3"]) == 6  # this interpreter has no preload
    assert "CAP-T108" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        self_test.main(["no-such-profile"])


def test_doctor_judges_the_comparison():
    document = {"different": [], "known": True, "answers": {"a": "1"}, "libraries": {"torch": "2"}}
    assert machine._judged("portable-v3", document).status == "as expected"
    assert machine._judged("portable-v3", {**document, "different": ["a"]}).status == "differs"
    assert machine._judged("portable-v3", {**document, "known": False}).status == "unchecked"


def test_doctor_needs_torch(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(CapsuleError, match="has no torch") as caught:
        machine.self_test("portable-v3")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-M007", 4)


def test_doctor_says_why_a_test_did_not_run(monkeypatch, tmp_path):
    shim = machine.native_part("libcapsule-math.so")
    for script, reason in (
        ("echo noise >&2; echo CAP-T103 no >&2; exit 4", "CAP-T103 no"),
        ("kill -ILL $$", "it was killed by SIGILL"),
        ("exit 3", "it ended with status 3"),
    ):
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(machine.sys, "executable", str(program))
        monkeypatch.setattr(machine, "native_part", lambda _name: shim)
        found = machine.self_test("portable-v2")
        assert (found.status, found.reason) == ("impossible", reason)
