"""Verification by a sample: who is chosen, what it shows, and what differs."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import scipy.stats

from capsule.bundle.claims import NO_NAMESPACES, TraceClaim
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import CudaAccelerator
from capsule.image.cache import Cache
from capsule.study import sampling
from capsule.study.results import files_needed
from capsule.study.sampling import (
    _compared,
    chance_to_notice,
    chosen_members,
    rerun,
)
from tests.machine.test_compare import CUDA, H200, NATIVE, PORTABLE, machine
from tests.study.studies import TREE, ZERO, make_claims, make_results
from tests.verification.execution.test_admission import Reported


@pytest.mark.parametrize("members", [1, 8, 30])
def test_the_chance_to_notice_is_hypergeometric(members):
    for forged in range(1, members + 1):
        for sampled in range(1, members + 1):
            missed = scipy.stats.hypergeom.pmf(0, members, forged, sampled)
            assert chance_to_notice(members, forged, sampled) == pytest.approx(1 - missed)


def test_members_are_drawn_without_replacement_and_not_always_the_same():
    results = make_results()
    names = [member.identity.name for member in results.members]
    drawn = [
        tuple(member.identity.name for member in chosen_members(results, 4)) for _ in range(40)
    ]
    assert all(len({*chosen}) == 4 and [*chosen] == [n for n in names if n in chosen]
               for chosen in drawn)  # fmt: skip
    assert len({*drawn}) > 1  # 126 samples: all equal has a probability of 1e-82
    assert chosen_members(results, len(names)) == list(results.members)


@pytest.mark.parametrize("number", [0, -1, 10])
def test_another_number_than_the_study_has_is_refused(number):
    with pytest.raises(CapsuleError) as refused:
        chosen_members(make_results(), number)
    assert refused.value.code == "CAP-Y019"
    assert "9 members" in refused.value.message


CLAIMS = make_claims(ZERO, (1, 2, 3))
OTHER_TRACE = {"trace": TraceClaim(records=1, head="1" * 64)}


def compared(spec=PORTABLE, here=None, imported=None, **changes):
    result = make_results().members[0]
    found = CLAIMS.model_copy(update=changes)
    return _compared(result, CLAIMS, found, spec, here or machine(), imported)


@pytest.mark.parametrize("spec", [PORTABLE, NATIVE])
def test_equal_claims_are_reproduced(spec):
    assert compared(spec).agreement == "reproduced-bitwise"


@pytest.mark.parametrize("spec", [PORTABLE, NATIVE])
def test_a_machine_without_namespaces_reproduces_a_member_of_one_that_has_them(spec):
    relaxations = (*CLAIMS.relaxations, NO_NAMESPACES)
    assert compared(spec, relaxations=relaxations).agreement == "reproduced-bitwise"


def test_equal_results_of_other_code_are_reproduced():
    found = compared(NATIVE, flags={**CLAIMS.flags, "onednn.isa": "another"})
    assert found.agreement == "reproduced-bitwise"
    assert "although the libraries chose other code" in found.reason


def test_a_difference_is_named_with_its_claims():
    found = compared(**OTHER_TRACE, parameters="1" * 64)
    assert found.agreement == "not-reproduced"
    assert "trace, parameters" in found.reason


@pytest.mark.parametrize(
    ("spec", "here", "imported"),
    [
        (NATIVE, None, None),
        (CUDA, machine(gpus=(H200,)), None),
        (PORTABLE, machine(engine="process"), None),
        (PORTABLE, None, "numba"),
    ],
)
def test_other_bits_of_a_machine_that_may_be_unlike_the_members_decide_nothing(
    spec, here, imported
):
    found = compared(spec, here, imported, **OTHER_TRACE)
    assert found.agreement == "inconclusive"
    assert "these claims differ: trace;" in found.reason
    assert "only to be expected on a machine like the member's" in found.reason
    bundle = make_results().members[0].identity.bundle
    assert f"with SHA-256 {bundle}, or use 'capsule verify' on it" in found.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parameters": "1" * 64}, "only where the traces differ"),
        ({**OTHER_TRACE, "libraries": {"torch": "9"}}, "which other arithmetic does not explain"),
    ],
)
def test_a_difference_that_no_machine_explains_is_one_everywhere(changes, reason):
    found = compared(NATIVE, **changes)
    assert (found.agreement, reason in found.reason) == ("not-reproduced", True)


@pytest.mark.parametrize("needed", ["schedule", "entropy_profile"])
def test_a_member_that_needs_its_own_bundle_is_not_run(needed, monkeypatch):
    monkeypatch.setattr(sampling, "check_code", lambda *_: True)
    results = make_results()
    claims = CLAIMS.model_copy(update={needed: ZERO})
    member = replace(results.members[0], claims=claims)
    lock = results.lock.lock_of(results.lock.members[0])
    found = rerun(member, lock, "process", None, None)
    assert found.agreement == "inconclusive"
    assert "which its own bundle has: pass --members with a folder that has" in found.reason


def test_a_member_whose_source_tree_is_not_in_the_cache_is_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(sampling, "check_code", lambda *_: True)
    results, cache = make_results(), Cache(tmp_path)
    lock = results.lock.lock_of(results.lock.members[0]).model_copy(update={"project": TREE})
    found = rerun(results.members[0], lock, "process", cache, None)
    assert found.agreement == "inconclusive"
    assert found.reason.startswith("it needs its source tree, which its own bundle has: pass")
    with monkeypatch.context() as patched:
        patched.setattr(type(cache.trees), "has", lambda _, sha256: sha256 == TREE.sha256)
        assert files_needed(CLAIMS, lock, cache) == ""


def test_what_is_known_of_the_machine_is_named_before_a_member_runs_on_a_gpu(monkeypatch):
    results = make_results()
    lock = results.lock.lock_of(results.lock.members[0])
    cuda = CudaAccelerator(kind="cuda", cuda="13.0", cudnn=">=9", driver=">=580")
    lock = lock.model_copy(update={"spec": lock.spec.model_copy(update={"accelerator": cuda})})
    engine = Reported(runc="1.1.5")
    monkeypatch.setattr(engine, "describe", lambda: {"name": "docker"}, raising=False)
    monkeypatch.setattr(type(engine), "name", "docker")
    monkeypatch.setattr(engine, "check", lambda _lock: None, raising=False)
    monkeypatch.setattr(sampling, "gpu_warning", lambda *_: "GPU 0 may give wrong results")
    monkeypatch.setattr(sampling, "open_engine", lambda *_, **__: engine)
    monkeypatch.setattr(sampling, "check_requirements", lambda *_: ())
    monkeypatch.setattr(sampling, "check_code", lambda *_: True)
    monkeypatch.setattr(sampling.execution, "build_image", Mock(side_effect=InterruptedError))
    reporter = Mock()
    with pytest.raises(InterruptedError):
        rerun(results.members[0], lock, "process", None, reporter)
    faults, begin, *warnings = (call.args[0] for call in reporter.note.call_args_list)
    assert faults == "GPU 0 may give wrong results"
    assert begin == "running member deterministic.1 again"
    assert any("runc 1.1.5" in warning for warning in warnings)
