"""What the verifications with variations show together, and a real one of a trainer."""

from dataclasses import replace

import pytest

from capsule.bundle.trust import load_policy
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.image.cache import Cache
from capsule.report.progress import SilentReporter
from capsule.verification import vary as varying
from capsule.verification.execution import admission
from capsule.verification.request import Mode, VerifyRequest
from capsule.verification.variation import NAMES, Wanted
from capsule.verification.vary import VariedResult, conclude, judge_variation, vary
from capsule.verification.verdict import Report, RunSurroundings
from tests.verification.runs import IMPALA, Machine, bundled, make_lock, merged, train

pytestmark = pytest.mark.xdist_group("verification")  # they share runs

LOCKSTEP = merged(IMPALA, {"trainer": {"schedule": {"mode": "lockstep"}}})
USUAL = RunSurroundings(
    locale="C",
    timezone="UTC (UTC+0000)",
    hostname="capsule",
    processors="0-1",
    told=4,
    threads="1",
    processes=1,
)


def report(verdict, summary="so it is", code=None, seen=USUAL, **facts):
    error = None if code is None else {"code": code, "message": f"of {code}", "fix": ""}
    return Report(
        bundle="b",
        mode="full",
        verdict=verdict,
        summary=summary,
        error=error,
        surroundings=seen,
        **facts,
    )


EQUAL, DIFFERS = report("reproduced-bitwise"), report("not-reproduced", "it differs in x")
UNDECIDED = report("inconclusive", "no memory", "CAP-E010", None)


@pytest.mark.parametrize(
    ("found", "reached", "outcome", "reason"),
    [
        (EQUAL, True, "equal", None),
        (DIFFERS, True, "differs", "it differs in x"),
        (EQUAL, False, "shielded", "the run saw the same value as the control"),
        (UNDECIDED, True, "undecided", "no memory"),
        (report("inconclusive", code="CAP-T101"), True, "shielded", "does not start: of CAP-T101"),
    ],
)
def test_an_execution_is_judged_by_its_verdict_and_by_what_it_saw(found, reached, outcome, reason):
    judged, why = judge_variation(found, reached=reached)
    assert judged == outcome
    assert why == reason or reason in why


def test_a_difference_without_a_change_is_not_blamed_on_it():
    outcome, why = judge_variation(DIFFERS, reached=False)
    assert outcome == "undecided"
    assert "it differs in x" in why


@pytest.fixture
def trial(honest_bundle, key, monkeypatch):
    """Return a function that varies a run whose verifications give prepared reports."""
    asked = []

    def work(*names, answers, engine="docker", mode="full", where_possible=False):
        def answer(request, *_):
            if request.mode.name == "integrity":
                return report("intact", seen=None)
            asked.append(request.variation)
            return answers[len(asked) - 1]

        monkeypatch.setattr(varying, "verify", answer)
        trust = load_policy(keys=[f"{key}.pub"])
        request = VerifyRequest(honest_bundle, trust, Mode.parse(mode), engine=engine)
        found = vary(request, Wanted(names, where_possible), None, SilentReporter())
        return found, asked

    return work


def seeing(verdict, **facts):
    return report(verdict, "it differs in x", seen=USUAL.model_copy(update=facts))


@pytest.mark.slow
def test_what_a_run_depends_on_is_said_in_a_sentence(trial):
    found, asked = trial(
        "threads",
        "processes",
        "hostname",
        answers=[
            EQUAL,
            seeing("not-reproduced", threads="2"),
            seeing("reproduced-bitwise", hostname="varied-host"),
        ],
    )
    assert [each.outcome for each in found.variations] == ["differs", "not-applicable", "equal"]
    assert (found.variations[0].was, found.variations[0].became) == ("1", "2")
    assert found.conclusion == (
        "The result does not depend on: hostname. The result depends on: threads (it differs in x; "
        "every re-execution has determinism.threads: 1). Not applicable: processes."
    )
    assert found.exit_code == ExitCode.DIFFERS
    assert len(asked) == 3  # the control, and what can be varied


def test_a_trainer_that_refuses_to_start_is_shielded(trial):
    refused = report("inconclusive", code="CAP-T101", seen=None)
    found, _ = trial("timezone", answers=[EQUAL, refused])
    assert found.conclusion == "The run is shielded from: timezone."
    assert found.exit_code == ExitCode.OK


def test_an_execution_without_a_result_decides_nothing(trial):
    found, _ = trial("threads", answers=[EQUAL, UNDECIDED])
    assert found.conclusion == "Undecided: threads."
    assert found.exit_code == ExitCode.INCONCLUSIVE


@pytest.mark.parametrize("control", [DIFFERS, UNDECIDED])
def test_nothing_is_varied_if_the_control_does_not_reproduce_the_run(trial, control):
    found, asked = trial("threads", answers=[control])
    assert (found.variations, len(asked)) == ((), 1)
    assert found.exit_code == control.exit_code
    assert control.summary in found.conclusion


def test_a_prefix_is_called_one():
    prefix = report("reproduced-prefix", reexecuted_steps=1200)
    same = VariedResult(name="threads", outcome="equal")
    assert conclude(prefix, [same]) == "The first 1,200 steps do not depend on: threads."
    step = report("reproduced-prefix", reexecuted_steps=1)
    assert conclude(step, [same]) == "The first step does not depend on: threads."


@pytest.mark.parametrize("mode", ["integrity", "environment", "segments:2", "fresh-seed"])
def test_a_mode_that_does_not_execute_from_the_start_is_refused(trial, mode):
    with pytest.raises(CapsuleError, match="CAP-V065 --vary requires"):
        trial("threads", answers=[], mode=mode)


def test_what_the_engine_cannot_vary_is_refused_by_name_before_anything_runs(trial):
    with pytest.raises(CapsuleError, match="CAP-V067 --vary hostname") as refused:
        trial("threads", "hostname", answers=[], engine="process")
    # Every engine with containers gives a run the host name that it is asked for.
    assert all(name in refused.value.fix for name in ("docker", "podman", "bwrap", "apptainer"))
    found, _ = trial("hostname", answers=[EQUAL], engine="process", where_possible=True)
    assert found.variations[0].outcome == "not-applicable"


@pytest.mark.slow
def test_an_impala_run_is_varied_as_far_as_its_trainer_lets_it(key, tmp_path, monkeypatch):
    bundle = bundled(train(tmp_path / "run", make_lock(LOCKSTEP)), key, tmp_path)
    monkeypatch.setattr(admission, "open_engine", lambda *_, **__: Machine(forks=False))
    trust = load_policy(keys=[f"{key}.pub"])
    request = VerifyRequest(bundle, trust, Mode("full"), engine="process", code="supplied")
    found = vary(replace(request), Wanted(NAMES, True), Cache(tmp_path / "cache"), SilentReporter())
    assert found.control.verdict == "reproduced-bitwise", found.control
    rows = {each.name: each for each in found.variations}
    assert {name: row.outcome for name, row in rows.items()} == {
        "threads": "equal",
        "processes": "shielded",  # nothing in the tests' environment counts the run's processes
        "locale": "shielded",
        "timezone": "shielded",
        "hostname": "not-applicable",
        "cpu-count": "not-applicable",  # of this machine, a task gets one processor
    }
    assert (rows["threads"].was, rows["threads"].became) == ("1", "2")
    assert rows["processes"].report.verdict == "reproduced-bitwise"
    assert "TZ is '<+14>-14'" in rows["timezone"].reason
    assert found.exit_code == ExitCode.OK
