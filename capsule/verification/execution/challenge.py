"""A challenge: segments of a recorded run that the verifier chooses, and a seed it draws.

A full re-execution compares answers that were known before. A challenge asks for what the signer
could not know when the bundle was made: which segments are executed again, each from the state that
the run kept at its beginning, and what a prefix gives with a root seed that did not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, get_args

from capsule.bundle import run_bundle
from capsule.bundle.claims import (
    CheckpointClaim,
    open_run_file,
    read_beneath,
    read_document,
    read_schedule,
    records_schedule,
)
from capsule.bundle.run_bundle import RecordedRun
from capsule.experiment import contract
from capsule.experiment.contract import Checkpoint, CheckpointIndex, StreamProfile, StreamProfiles
from capsule.experiment.lock import Lock
from capsule.experiment.spec import SeedsSpec, Spec, StreamName
from capsule.experiment.states import RESUME, ResumeState
from capsule.experiment.trace import BEGINNING, Mark, first_difference, read_trace
from capsule.host.errors import CapsuleError
from capsule.host.owner import temporary_folder
from capsule.host.reporter import Progress
from capsule.host.wording import agreeing, counted
from capsule.verification.analysis.comparison import (
    compare_checkpoints,
    compare_states,
    compare_traces,
)
from capsule.verification.component_words import component_differs, component_words
from capsule.verification.execution.reexecution import reexecution_folder
from capsule.verification.execution.segment_states import (
    bad_state,
    check_state,
    lay_out,
    other_memory,
    read_resume,
)
from capsule.verification.verdict import (
    Challenge,
    ComponentDifference,
    FreshSeed,
    Judgement,
    ReexecutedSegment,
)

# No seed has more: in canonical JSON (RFC 8785) a number is a double.
_SEED_BITS = 53
_INDEX_DIGITS = 15
# The errors with which the training side rejects a state to resume from.
_REFUSED_STATES = (
    *("CAP-T121", "CAP-T132", "CAP-T133"),  # trace, tensors, spec
    *("CAP-T201", "CAP-T211", "CAP-T223", "CAP-T342"),  # streams, environment, replay, schedule
)


class Execute(Protocol):
    """Runs the training side in a run directory up to a step, and evaluates nothing."""

    def __call__(
        self, lock: Lock, directory: Path, *, stop_after: int, schedule: Path | None
    ) -> object:
        """Raise :class:`CapsuleError` if the training does not reach the step."""


def challenge(
    recorded: RecordedRun, number: int | None, execute: Execute, note: Progress
) -> Challenge:
    """Choose segments, execute each from the state it begins with, and compare.

    Args:
        recorded: A run that :meth:`capsule.verification.request.Mode.check` has accepted.
        number: How many; None: all of them.
        execute: Runs the training side.
        note: Called with messages about the progress.

    Raises:
        CapsuleError: CAP-V061, a state is not the claimed checkpoint's, or cannot be resumed from;
            what ``execute`` raises.
    """
    checkpoints = recorded.checkpoints()
    marks = _marks(recorded.trace, checkpoints)
    of = len(checkpoints)
    chosen = choose(number, of)
    segments = []
    for index in chosen:
        with reexecution_folder(note) as directory:
            segments.append(_segment(recorded, checkpoints, marks, index, execute, directory))
    return Challenge(
        chosen="all" if number is None else "at random",
        of=of,
        segments=tuple(segments),
        undetected=1.0 - len(chosen) / of,
    )


def choose(number: int | None, of: int) -> list[int]:
    """Choose segments, every choice of so many equally likely, by the system's randomness."""
    if number is None:
        return list(range(of))
    # A signer who could predict the choice would need to compute only the chosen segments honestly.
    return sorted(secrets.SystemRandom().sample(range(of), number))


def _marks(trace: Path, checkpoints: Sequence[Checkpoint]) -> list[Mark]:
    """Return the place in the trace at which each segment begins."""
    steps = {checkpoint.step for checkpoint in checkpoints[:-1]}
    marks = {record.step: record.after for record in read_trace(trace) if record.step in steps}
    for step in sorted(steps - marks.keys()):
        raise bad_state(run_bundle.state_members(step)[0], f"has no trace record at step {step}")
    return [BEGINNING, *(marks[checkpoint.step] for checkpoint in checkpoints[:-1])]


def _segment(
    recorded: RecordedRun,
    checkpoints: tuple[Checkpoint, ...],
    marks: Sequence[Mark],
    index: int,
    execute: Execute,
    directory: Path,
) -> ReexecutedSegment:
    """Execute one segment in a new run directory."""
    mark, end = marks[index], checkpoints[index]
    if index:
        _go_back(recorded, checkpoints[:index], mark, directory)
    try:
        execute(recorded.lock, directory, stop_after=end.step, schedule=recorded.schedule)
    except CapsuleError as error:
        # The first segment begins without a state that could be at fault.
        if index and error.code in _REFUSED_STATES:
            name, _ = run_bundle.state_members(mark.step)
            raise bad_state(name, f"cannot be resumed from: {error.message}") from error
        raise
    first = compare_traces(recorded.trace, _trace_of(directory), mark, end.step)
    found = read_document(directory / contract.CHECKPOINT_INDEX, CheckpointIndex)
    claimed = CheckpointClaim(step=end.step, digest=end.digest())
    differences = compare_checkpoints((claimed,), found, end.step)
    # No segment begins at the last checkpoint, so the run kept no state there.
    if index + 1 < len(checkpoints):
        steps = [checkpoint.step for checkpoint in checkpoints[: index + 1]]
        with temporary_folder("capsule-state-") as folder:
            # Of the next segment's state, this document is enough: it has the digests of tensors,
            # and other_memory() compares the replay memory in place.
            lay_out(recorded, steps, folder, only={RESUME})
            kept = read_resume(folder, run_bundle.state_members(end.step)[0])
        reached = read_beneath(directory, f"{contract.STATE}/{RESUME}", ResumeState)
        differences += compare_states(kept, reached)
        differences += tuple(
            ComponentDifference(
                component=f"state.{path}", claimed="other blocks", found="those reached"
            )
            for path in other_memory(recorded, end.step, directory)
        )
    return ReexecutedSegment(
        begins=mark.step,
        ends=end.step,
        equal=first is None and not differences,
        first_difference=first,
        differences=differences,
    )


def _go_back(
    recorded: RecordedRun, checkpoints: tuple[Checkpoint, ...], mark: Mark, directory: Path
) -> None:
    """Make a run directory stand at the last of ``checkpoints``."""
    state = directory / contract.STATE
    state.mkdir(parents=True)
    steps = [checkpoint.step for checkpoint in checkpoints]
    lay_out(recorded, steps, state)
    # The container does not see the state before this check.
    check_state(recorded, checkpoints, mark, state)
    with (directory / contract.TRACE).open("wb") as trace:
        trace.truncate(mark.offset)  # a hole: the records before are not looked at


def begin_before(recorded: RecordedRun, step: int, directory: Path) -> Mark:
    """Make a new run directory stand at the last kept state from which ``step`` is still to come.

    Returns:
        Where its trace stands; the beginning, and nothing was made, if no state is that early.

    Raises:
        CapsuleError: CAP-V061, the state is not the claimed checkpoint's.
    """
    checkpoints = recorded.checkpoints()
    passed = tuple(each for each in checkpoints[:-1] if each.step < step)
    mark = _marks(recorded.trace, checkpoints)[len(passed)]
    if passed:
        _go_back(recorded, passed, mark, directory)
    return mark


def fresh_seed(recorded: RecordedRun, execute: Execute, note: Progress) -> FreshSeed:
    """Execute a prefix twice with a root seed drawn now, and check that it is computed from that.

    The two must be equal, unless the spec gave that up. Their random streams must have the keys
    that this process derives from the seed, and no trace record may have the streams or the
    parameters of the recorded one.

    Raises:
        CapsuleError: What ``execute`` raises.
    """
    seed = secrets.randbits(_SEED_BITS)
    spec = _with_seed(recorded.lock.spec, seed)
    lock = recorded.lock.model_copy(update={"spec": spec})
    steps = prefix_steps(spec)
    with reexecution_folder(note) as one, reexecution_folder(note) as two:
        execute(lock, one, stop_after=steps, schedule=None)
        # Where the order of actors is recorded, it does not follow from the seed: the second
        # execution has to be given the first one's.
        schedule = None
        if records_schedule(lock):
            # The log is parsed and written anew, since an untrusted image left it, and lies beside
            # the run directory, which execute() makes.
            schedule = two.parent / contract.SCHEDULE
            schedule.write_bytes(read_schedule(one / contract.SCHEDULE).document())
        execute(lock, two, stop_after=steps, schedule=schedule)
        streams, again = (
            read_document(each / contract.STREAMS, StreamProfiles).streams for each in (one, two)
        )
        contradictions = (
            *_underivable(streams, seed),
            *_recitation(recorded.trace, _trace_of(one)),
        )
        unrepeated = tuple(_repetition(_trace_of(one), _trace_of(two)))
    if streams != again:
        unrepeated += ("the two executions drew other numbers",)
    return FreshSeed(
        seed=seed,
        steps=steps,
        keys=sum(_is_derived(item, seed) is True for item in streams),
        contradictions=contradictions,
        unrepeated=unrepeated,
    )


def prefix_steps(spec: Spec) -> int:
    """Return the steps of a prefix that ends on a trace record after the first update."""
    training = spec.training()
    begins = getattr(training.trainer, "replay_start", 0)
    record = training.recording.trace_interval
    needed = begins + 2 * training.trainer.interval_steps
    return min(training.trainer.total_steps, -(-needed // record) * record)


def _with_seed(spec: Spec, seed: int) -> Spec:
    """Return the spec with every stream derived from another root seed, and no randomness else."""
    entropy = spec.entropy
    if entropy.mode == "recorded":
        # Recorded bytes belong to the recorded run, and would be the same for every seed.
        entropy = entropy.model_copy(update={"mode": "virtual"})
    return spec.model_copy(update={"seeds": SeedsSpec(root=seed), "entropy": entropy})


def _is_derived(profile: StreamProfile, seed: int) -> bool | None:
    """Tell whether a stream has the key of a seed; None if it derives from another stream.

    Streams of actors are named ``stream/actor``, and have the actor as their index.
    """
    name, _, actor = profile.name.partition("/")
    if name not in get_args(StreamName) or (actor and not actor.isdecimal()):
        return None
    # No actor has a larger index, and the hash is of a number of canonical JSON.
    is_index = len(actor) <= _INDEX_DIGITS
    return is_index and profile.key == contract.stream_key(seed, name, int(actor or 0))


def _underivable(profiles: Sequence[StreamProfile], seed: int) -> Iterator[str]:
    """Name the random streams that are not those of a seed, or are missing."""
    wrong = [profile.name for profile in profiles if _is_derived(profile, seed) is False]
    if wrong:
        streams = counted(len(wrong), "random stream has", "random streams have")
        yield f"{streams} no key of this seed; the first is {wrong[0]!r}"
    for name in sorted({*get_args(StreamName)} - {profile.name for profile in profiles}):
        yield f"there is no stream {name!r}"


def _repetition(one: Path, two: Path) -> Iterator[str]:
    """Name the place where the two executions differ."""
    if difference := first_difference(one, two):
        where = component_words(difference.component)
        yield f"the two executions first differ at step {difference.step}, in {where}"


def _recitation(recorded: Path, fresh: Path) -> Iterator[str]:
    """Name what a fresh seed has in common with the recorded run and cannot have.

    Frames, actions and rewards may well be the same; what was drawn cannot, nor all parameters.
    """
    # The fresh trace is short, and zip() reads no more of the recorded one.
    records = list(zip(read_trace(recorded), read_trace(fresh), strict=False))
    if not records:
        yield "there is no trace record"
    for component in ("streams", "parameters"):
        for left, right in records:
            value = right.values.get(component)
            if value is not None and value == left.values.get(component):
                words = component_words(component)
                yield f"the record at step {right.step} has {words} of the recorded run"
                break


def _trace_of(directory: Path) -> Path:
    """Return the trace that an execution left, and check that there is one."""
    open_run_file(directory, contract.TRACE).close()
    return directory / contract.TRACE


def judge_challenge(
    challenge: Challenge | None, fresh: FreshSeed, relaxed: Sequence[str]
) -> Judgement:
    """Judge a fresh seed, and segments if there were some.

    Args:
        challenge: The segments.
        fresh: The fresh seed.
        relaxed: Relaxations of the spec with which a machine may not repeat its own bits.
    """
    # This comes first: segments that an image recites are worth nothing.
    if fresh.contradictions:
        recites = "the image does not compute from the seed that it is given"
        return Judgement("not-reproduced", f"{recites}: {fresh.contradictions[0]}")
    if fresh.unrepeated and not relaxed:
        differs = "the image does not give the same results twice, although the spec requires it"
        return Judgement("not-reproduced", f"{differs}: {fresh.unrepeated[0]}")
    # A segment that differs is judged as a prefix is: no relaxation excuses other bits.
    different = () if challenge is None else [each for each in challenge.segments if not each.equal]
    if challenge is not None and different:
        return Judgement("not-reproduced", _difference(different, _among(challenge)))
    if fresh.unrepeated:
        return Judgement(
            "inconclusive",
            f"{fresh.unrepeated[0]}, which the spec allows ({'; '.join(relaxed)}), so it is not "
            "known whether the image computes from the seed that it is given",
        )
    computes = (
        f"{counted(fresh.steps, 'step')} with the fresh seed {fresh.seed} gave the same results "
        "twice, with the random streams of that seed and other parameters than the recorded run's"
    )
    if challenge is None:
        nothing = "nothing of the recorded run was executed again"
        return Judgement("answers-fresh-seed", f"{computes}; {nothing}")
    done = len(challenge.segments)
    left = challenge.of - done
    rest = f"{left} more and the evaluation were" if left else "the evaluation was"
    return Judgement(
        "reproduced-segments",
        f"{_among(challenge)}, {agreeing(done, 'was', 'were')} executed again from the recorded "
        f"states and {agreeing(done, 'is', 'are')} the same, bit for bit; {rest} not executed; "
        f"{computes}",
    )


def _among(challenge: Challenge) -> str:
    how = "all" if challenge.chosen == "all" else "chosen at random by this verifier"
    return f"{len(challenge.segments)} of {counted(challenge.of, 'segment')}, {how}"


def _difference(different: Sequence[ReexecutedSegment], among: str) -> str:
    segment = different[0]
    if segment.first_difference is not None:
        first = segment.first_difference
        name = f" ({first.name})" if first.name else ""
        what = f"first differs at step {first.step}, in {component_words(first.component)}{name}"
    else:
        differs = component_differs(segment.differences[0].component)
        what = f"has the recorded trace, but at its end {differs}"
    differ = agreeing(len(different), "differs", "differ")
    return (
        f"{len(different)} of the executed segments ({among}) {differ}: the one from step "
        f"{segment.begins} to {segment.ends} {what}"
    )
