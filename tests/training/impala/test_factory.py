"""IMPALA as a spec says: its schedule, transport, learners and settings."""

from array import array

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import parse_schedule
from tests.training.impala.conftest import COUNTING, LIVE, edited, log_of, refusal_of, train

pytestmark = pytest.mark.usefixtures("deterministic", "importable", "warm_workers")


def test_logs_that_do_not_fit_are_refused(make):
    learner = train(make(COUNTING, trainer=LIVE))
    data = log_of(learner)
    cut = refusal_of(make, data[:-1])
    changed = refusal_of(make, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    assert {cut.code, changed.code} == {"CAP-T341"}
    for changes in (
        {"seeds": {"root": 1}},
        {"trainer": {"learning_rate": 0.5}},
        {"trainer": {"schedule": {"policy_lag": 4}}},
        {"trainer": {"actors": 7}},
    ):
        assert refusal_of(make, data, **changes).code == "CAP-T344"
    assert refusal_of(make, b"").code == "CAP-T341"


def test_a_log_of_this_spec_that_no_run_of_it_can_have_made_is_refused(make):
    log = parse_schedule(log_of(train(make(COUNTING, trainer=LIVE))))
    late = log.lags[:]
    late[-1] = 4
    for changes in ({"actors": 7}, {"batch": 2}, {"batch": 1}, {"lags": late}):
        assert refusal_of(make, edited(log, **changes)).code == "CAP-T344"
    fewer = array("H", [actor % 5 for actor in log.played])
    with pytest.raises(CapsuleError):
        train(make(COUNTING, trainer=LIVE, replay=edited(log, actors=5, played=fewer)))
