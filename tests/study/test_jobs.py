"""Waiting for jobs, with a scheduler that answers as the test says."""

import signal
from dataclasses import dataclass

import pytest

from capsule.host.errors import CapsuleError
from capsule.study.directory import OUTCOME, Outcome, StudyDirectory
from capsule.study.jobs import Element, JobArray, Programs, Scheduler, reservation
from capsule.study.running import MemberBatch
from tests.study.studies import BASE, make_lock

RUNS, ENDS = Element("RUNNING"), Element("ENDED", ended=True)
DONE = Outcome(bundle="x.capsule.tar", claim_id="a" * 64)
FAILED = Outcome(code="CAP-E007", message="out of memory", fix="Buy more.")


class ScriptedArray(JobArray):
    """An array whose elements are the next of a script; an error in it is raised."""

    @property
    def name(self):
        return self.job

    @property
    def cancellation(self):
        return ["cancel", self.job]

    def elements(self):
        answers = SCRIPTS[self.job]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return dict(zip(self.members, answer, strict=False))

    def element_name(self, member):
        return f"{self.job}.{self.members.index(member)}"

    def log(self, _study, member):
        return f"{member}.log"


SCRIPTS = {}


@dataclass(frozen=True)
class Scripted(Scheduler):
    title = "Scripted"
    folder = "scripted"
    array = ScriptedArray

    def submit(self, batch, _interruptions):
        return [ScriptedArray(str(len(SCRIPTS)), tuple(batch.names))]


@pytest.fixture
def study(tmp_path):
    SCRIPTS.clear()
    return StudyDirectory.create(tmp_path / "study", make_lock(), resume=False)


def run(study, names, *script, earlier=(), on_poll=lambda: None, **settings):
    """Run members; the script is what the next array says at each poll."""
    SCRIPTS.update(earlier)
    SCRIPTS[str(len(SCRIPTS) + 1)] = [*script]
    noted = []
    settings = {"poll_seconds": 0.0, "settle_seconds": 0.0} | settings
    Scripted(noted.append, **settings).run(MemberBatch(study, names, None), on_poll)
    return noted


def test_a_member_that_left_no_outcome_is_failed_with_what_its_job_says(study):
    names = study.missing()[:3]
    memory = Element("KILLED", "Memory", "3 GB of 2 GB", ended=True, fix="Raise it.")
    noted = run(study, names, (RUNS, RUNS, RUNS), (ENDS, memory))
    assert noted == ["Scripted job 1 was submitted for 3 members"]
    assert [study.outcome(name).message for name in names] == [
        "Scripted job 1.0 ended as ENDED",
        "Scripted job 1.1 ended as KILLED (Memory: 3 GB of 2 GB)",
        "Scripted job 1.2 has ended, and Scripted has no record of how it ended",
    ]
    assert [study.outcome(name).fix for name in names] == [
        f"Add --resume to run the member again. See {names[0]}.log.",
        f"Raise it. See {names[1]}.log.",
        f"Add --resume to run the member again. See {names[2]}.log.",
    ]
    assert {study.outcome(name).code for name in names} == {"CAP-Y025"}


def test_a_member_that_says_itself_how_it_ended_stays(study):
    name = study.missing()[0]
    polls = []

    def on_poll():
        polls.append(study.outcome(name))
        if len(polls) == 3:
            study.fail(name, FAILED)  # a file that is seen late

    run(study, [name], [ENDS], settle_seconds=60.0, on_poll=on_poll)
    assert study.outcome(name) == FAILED
    assert len(polls) == 4


def test_a_job_that_returns_has_not_ended(study, monkeypatch):
    name = study.missing()[0]
    clock = iter(range(0, 1000, 40))
    monkeypatch.setattr("capsule.study.jobs.time.monotonic", lambda: next(clock))
    polls = []

    def on_poll():
        polls.append(study.outcome(name))

    run(study, [name], [ENDS], [RUNS], [ENDS], settle_seconds=100.0, on_poll=on_poll)
    # Each poll reads the clock for the answer and for the end: 80 s between two of them.
    assert polls[:-1] == [None] * (len(polls) - 1)
    assert len(polls) == 5
    assert study.outcome(name).code == "CAP-Y025"


def test_each_reason_is_said_once(study):
    names = study.missing()[:2]
    full = Element("PENDING", "Full", "3 of 3", hindered=True)
    waits = [Element("PENDING", "Priority"), full]
    noted = run(study, names, waits, [full, full._replace(details="4 of 4")], [ENDS, ENDS])
    assert noted[1:] == ["members of Scripted job 1 wait: Full: 3 of 3"]


def test_members_of_an_earlier_job_are_not_submitted_again(study):
    first, second, third, *_ = study.missing()
    folder = study.path / "scripted"
    folder.mkdir()
    for job, members in (("0", (third,)), ("1", (first, second)), ("2", (first,))):
        (folder / f"{job}.members").write_text("".join(f"{member}\n" for member in members))
    earlier = {"0": [[ENDS]], "1": [[ENDS, RUNS], [ENDS, ENDS]], "2": [[RUNS], [ENDS]]}
    noted = run(study, [first, second, third], [ENDS], earlier=earlier)
    assert sorted(noted) == [
        "Scripted job 1 still has members that wait or run",
        "Scripted job 2 still has members that wait or run",
        "Scripted job 4 was submitted for 1 member",
    ]
    assert [study.outcome(name).message for name in (first, second, third)] == [
        "Scripted job 2.0 ended as ENDED",
        "Scripted job 1.1 ended as ENDED",
        "Scripted job 4.0 ended as ENDED",
    ]
    assert (folder / "4.members").read_text() == f"{third}\n"


def test_a_scheduler_may_be_silent_for_a_while(study):
    name = study.missing()[0]
    silent = CapsuleError("CAP-Y022", "no answer", fix="Wait.")
    run(study, [name], silent, [RUNS], silent, [ENDS])
    assert study.outcome(name).code == "CAP-Y025"
    with pytest.raises(CapsuleError) as caught:
        run(study, [name], silent, patience_seconds=0.0)
    assert caught.value.code == "CAP-Y023"
    assert "jobs 2 may still run: no answer" in caught.value.message
    assert str(study.path) in caught.value.fix


class Fast(Scripted):
    """Its jobs have begun and failed before they are known here."""

    def submit(self, batch, interruptions):
        for name in batch.names:
            batch.study.fail(name, FAILED)
        return super().submit(batch, interruptions)


def test_a_member_that_is_submitted_again_may_end_at_once(study):
    name = study.missing()[0]
    study.fail(name, Outcome(code="CAP-E010", message="an earlier attempt", fix="Mend it."))
    SCRIPTS["1"] = [[ENDS]]
    Fast(print, poll_seconds=0.0, settle_seconds=0.0).run(
        MemberBatch(study, [name], None), lambda: None
    )
    assert study.outcome(name) == FAILED


class Late(Scripted):
    """The job of an earlier command finishes its members while the scheduler is asked about it."""

    def _earlier(self, batch):
        for name in batch.names:
            with batch.study.held(name) as (folder, _):
                (folder / DONE.bundle).touch()
                (folder / OUTCOME).write_bytes(DONE.document())
        return {}


def test_a_member_that_has_just_finished_is_not_submitted_again(study):
    name = study.missing()[0]
    noted = []
    Late(noted.append).run(MemberBatch(study, [name], None), lambda: None)
    assert (noted, study.state(name).state) == ([], "done")


def test_an_interruption_before_the_submission_leaves_earlier_failures(study, monkeypatch):
    names = study.missing()[:2]
    for name in names:
        study.fail(name, FAILED)
    forget = study.forget

    def interrupted(name):
        forget(name)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(study, "forget", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(study, names, [ENDS, ENDS])
    assert [study.outcome(name) for name in names] == [FAILED, FAILED]


class Half(Scripted):
    """The first of its arrays is submitted, and the second is not."""

    programs = Programs("x", "Install it.", "Correct it.")
    error = CapsuleError("CAP-Y022", "it is full", fix="Wait.")

    def submit(self, batch, _interruptions):
        yield ScriptedArray("1", tuple(batch.names[:1]))
        raise self.error


@pytest.mark.parametrize("error", [CapsuleError("CAP-Y022", "full", fix="Wait."), OSError("full")])
def test_an_array_is_written_down_before_the_next_one_and_cancelled_with_it(
    study, monkeypatch, error
):
    names = study.missing()[:2]
    monkeypatch.setattr(Half, "error", error)
    written = []

    def call(_, command):
        written.append((command, (study.path / "scripted/1.members").read_text().split()))

    monkeypatch.setattr(Programs, "call", call)
    with pytest.raises(type(error), match="full"):
        Half(print).run(MemberBatch(study, names, None), lambda: None)
    assert written == [(["cancel", "1"], names[:1])]
    assert not (study.path / "scripted/1.members").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CapsuleError("CAP-Y022", "full", fix="Wait."), "CAP-Y022"),
        (KeyboardInterrupt(), "CAP-Y024"),
    ],
)
def test_an_array_that_cannot_be_cancelled_stays_written_down(study, monkeypatch, error, code):
    names = study.missing()[:2]
    for name in names:
        study.fail(name, FAILED)
    monkeypatch.setattr(Half, "error", error)
    with pytest.raises(CapsuleError) as caught:  # there is no program 'cancel'
        Half(print).run(MemberBatch(study, names, None), lambda: None)
    assert caught.value.code == code
    assert "jobs 1" in caught.value.message
    assert "'cancel 1' cancels" in caught.value.fix
    assert (study.path / "scripted/1.members").read_text().split() == names[:1]
    # The first member may run by now, and the second does not.
    assert [study.outcome(name) for name in names] == [None, FAILED]


def test_an_interrupted_wait_says_how_to_cancel(study):
    with pytest.raises(CapsuleError) as caught:
        run(study, study.missing()[:1], KeyboardInterrupt())
    assert caught.value.code == "CAP-Y024"
    assert "'cancel 1' cancels the members" in caught.value.fix


class Interrupted(Scripted):
    """The user interrupts the command as soon as the jobs exist."""

    def submit(self, *arguments):
        arrays = super().submit(*arguments)
        signal.raise_signal(signal.SIGINT)
        return arrays


def test_jobs_of_an_interrupted_submission_are_written_down(study):
    SCRIPTS["1"] = [[RUNS, RUNS], [ENDS, ENDS]]
    names = study.missing()[:2]
    with pytest.raises(CapsuleError) as caught:
        Interrupted(print).run(MemberBatch(study, names, None), lambda: None)
    assert caught.value.code == "CAP-Y024"
    assert "jobs 1" in caught.value.message
    assert "'cancel 1' cancels the members" in caught.value.fix
    assert (study.path / "scripted/1.members").read_text().split() == names
    noted = run(study, names)
    assert noted == ["Scripted job 1 still has members that wait or run"]


def test_the_largest_limits_are_reserved_unless_the_study_says(tmp_path):
    limits = {"memory_mb": 2_000, "minutes": 30}
    lock = make_lock(base={**BASE, "limits": limits}, resources={"cores": 3, "minutes": 5})
    study = StudyDirectory.create(tmp_path / "study", lock, resume=False)
    assert reservation(MemberBatch(study, study.missing(), None)) == (3, 2_512, 5, 0)


def test_a_program_that_fails_in_a_way_that_is_known():
    programs = Programs("x", "Install it.", "Correct it.")
    failing = ["sh", "-c", "echo half; echo it is forbidden >&2; exit 3"]
    assert programs.call(failing, accepted="is forbidden") == "half\n"
    with pytest.raises(CapsuleError, match="sh failed: it is forbidden"):
        programs.call(failing)
    with pytest.raises(CapsuleError, match="sh failed: exit status 3"):
        programs.call(["sh", "-c", "exit 3"])
    with pytest.raises(CapsuleError, match="--on x needs nonesuch-program"):
        programs.call(["nonesuch-program"])
