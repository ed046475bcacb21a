"""Verification by a sample: who is chosen, what it shows, and what differs."""

from unittest.mock import Mock

import pytest
import scipy.stats

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import CudaAccelerator
from capsule.study import sampling
from capsule.study.sampling import _compared, chance_to_notice, chosen_members, rerun
from tests.study.studies import ZERO, make_claims, make_results
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


def test_equal_claims_are_reproduced():
    claims = make_claims(ZERO, (1, 2, 3))
    assert _compared("a.1", claims, claims).agreement == "reproduced-bitwise"


def test_a_difference_is_named_with_its_claims():
    claims = make_claims(ZERO, (1, 2, 3))
    found = _compared("a.1", claims, claims.model_copy(update={"parameters": "1" * 64}))
    assert found.agreement == "not-reproduced"
    assert "parameters" in found.reason


def test_a_container_with_a_known_way_out_is_named_before_a_member_runs_on_a_gpu(monkeypatch):
    results = make_results()
    lock = results.lock.lock_of(results.lock.members[0])
    cuda = CudaAccelerator(kind="cuda", cuda="13.0", cudnn=">=9", driver=">=580")
    lock = lock.model_copy(update={"spec": lock.spec.model_copy(update={"accelerator": cuda})})
    engine = Reported(runc="1.1.5")
    monkeypatch.setattr(engine, "describe", lambda: {"name": "docker"}, raising=False)
    monkeypatch.setattr(sampling, "open_engine", lambda *_, **__: engine)
    monkeypatch.setattr(sampling, "check_requirements", lambda *_: ())
    monkeypatch.setattr(sampling, "check_code", lambda *_: True)
    monkeypatch.setattr(sampling.execution, "prepare", Mock(side_effect=InterruptedError))
    reporter = Mock()
    with pytest.raises(InterruptedError):
        rerun(results.members[0], lock, "process", None, reporter)
    *warnings, last = (call.args[0] for call in reporter.note.call_args_list)
    assert any("runc 1.1.5" in warning for warning in warnings)
    assert last == "running member deterministic.1 again"
