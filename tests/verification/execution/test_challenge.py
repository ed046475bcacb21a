"""Challenges of real runs of every trainer: honest ones pass, and each kind of lie is found."""

import json
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import hypergeom

from capsule.bundle import packing, run_bundle
from capsule.bundle.claims import collect_claims
from capsule.bundle.run_bundle import RecordedRun
from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json, parse_canonical_json
from capsule.experiment.contract import CheckpointIndex, Job, StreamProfile
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.states import RESUME, StateIndex
from capsule.experiment.trace import first_difference
from capsule.machine.compare import unrepeatable
from capsule.training.dqn.replay import ReplayMemory
from capsule.training.state.checkpoint import load_resume_state, save_resume_state, tensor_digests
from capsule.training.state.segment_states import keep_state
from capsule.verification.analysis.comparison import compare_claims
from capsule.verification.execution.challenge import (
    _underivable,
    challenge,
    choose,
    fresh_seed,
    judge_challenge,
    prefix_steps,
)
from capsule.verification.execution.segment_states import lay_out
from capsule.verification.request import Mode
from capsule.verification.verdict import FreshSeed
from tests.hostile.genuine import write_entropy_report
from tests.training.conftest import ROOT
from tests.verification.execution.files import Files
from tests.verification.execution.xxh3 import BLOCK, with_the_same_digest
from tests.verification.forked import FAILED, SPECS, Forks, lock_of, spec_of

RELAXED = ("determinism.cudnn_benchmark: cuDNN chooses its kernels by measured speed",)
STEPS = {"dqn": [400, 800, 1_000], "r2d2": [300, 600, 900], "impala": [160, 320, 480]}


@pytest.fixture(scope="module")
def forks():
    server = Forks()
    yield server
    server.close()


@pytest.fixture(scope="module")
def run_of(forks, tmp_path_factory):
    """A function that gives the finished run of one of the small specs; not to be changed."""
    runs = {}

    def run(name):
        if name not in runs:
            directory = tmp_path_factory.mktemp(name)
            runs[name] = forks.train(directory, Job(spec=spec_of(name)))
        return runs[name]

    return run


@pytest.fixture
def opened(tmp_path):
    """A function that gives the bundle of a run directory as a verifier has it."""

    def bundle(directory, name):
        lock, scratch = lock_of(spec_of(name)), tmp_path / f"bundle-{time.monotonic_ns()}"
        scratch.mkdir()
        run = SimpleNamespace(lock=lock, directory=directory)
        write_entropy_report(directory, lock)  # the launcher's, without which these trainers ran
        claims = collect_claims(lock, None, "process", directory)
        files = {}
        for member, source in packing._run_files(run, claims, scratch).items():
            if source.exists():  # the host's documents do not, as no engine executed the run
                files[member] = scratch / member.replace("/", "-")
                shutil.copyfile(source, files[member])
        return RecordedRun(Files(files), lock, claims)

    return bundle


# What honest runs give


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_every_segment_of_an_honest_run_is_the_same(run_of, opened, forks, name):
    result = challenge(opened(run_of(name), name), None, forks.execute, print)
    ends = STEPS[name if name in STEPS else "impala"]
    assert [(each.begins, each.ends) for each in result.segments] == list(
        zip([0, *ends], ends, strict=False)
    )
    assert [each.equal for each in result.segments] == [True] * 3
    assert (result.of, result.undetected, result.chosen) == (3, 0.0, "all")


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_an_honest_run_answers_a_fresh_seed(run_of, opened, forks, name):
    result = fresh_seed(opened(run_of(name), name), forks.execute, print)
    assert result.contradictions == ()
    actors = {"r2d2": 3, "impala": 6, "live": 6}.get(name, 0)  # those of members derive otherwise
    assert result.keys == 6 + 3 * actors
    grade, summary = judge_challenge(None, result, ())
    assert grade == "answers-fresh-seed"
    assert "nothing of the recorded run" in summary


@pytest.mark.slow
def test_states_change_no_bit(run_of, forks, tmp_path):
    spec = spec_of("dqn", recording={"segment_states": False})
    without = forks.train(tmp_path, Job(spec=spec))
    assert not (without / contract.SEGMENT_STATES).exists()
    for name in (contract.TRACE, contract.CHECKPOINT_INDEX, contract.EVALUATION, contract.STREAMS):
        assert (without / name).read_bytes() == (run_of("dqn") / name).read_bytes()


@pytest.mark.slow
def test_a_run_killed_before_a_state_was_kept_keeps_it_when_it_goes_on(run_of, forks, tmp_path):
    forks.train(tmp_path, Job(spec=spec_of("dqn"), stop_after=400))
    shutil.rmtree(tmp_path / contract.SEGMENT_STATES)
    (tmp_path / contract.RESULT).unlink()
    forks.train(tmp_path, Job(spec=spec_of("dqn")))
    for step in (400, 800):
        found, wanted = (index_of(each, step) for each in (tmp_path, run_of("dqn")))
        assert found.files.keys() == wanted.files.keys()
        for path in found.files.keys() - {RESUME}:  # which has the seconds it took
            assert found.files[path] == wanted.files[path]


@pytest.mark.slow
def test_unrolls_that_a_killed_process_left_are_overwritten_before_they_are_compared(
    opened, forks, tmp_path
):
    """As many as can follow a state, with a content that no process plays."""
    spec = spec_of("live")
    folder = forks.train(tmp_path, Job(spec=spec, stop_after=160)) / contract.STATE
    replay = load_resume_state(folder, spec.digest())[0].trainer["replay"]
    slack = 160 // spec.trainer.interval_steps * spec.trainer.fresh
    slots = spec.trainer.replay.capacity + slack
    left = np.arange(replay["count"], replay["count"] + slack) % slots
    assert replay["count"] < slots  # some of them were never used
    for path in (folder / "replay").iterdir():
        data = np.fromfile(path, np.uint8).reshape(slots, path.stat().st_size // slots)
        data[left] = 1
        path.write_bytes(data.tobytes())
    (tmp_path / contract.RESULT).unlink()
    resumed = forks.train(tmp_path, Job(spec=spec))
    result = challenge(opened(resumed, "live"), None, forks.execute, print)
    assert [each.equal for each in result.segments] == [True] * 3


def index_of(directory, step):
    path = directory / contract.SEGMENT_STATES / f"{contract.checkpoint_name(step)}.json"
    return StateIndex.model_validate_json(path.read_bytes())


# Lies about a state


def state_files(recorded, steps, folder):
    lay_out(recorded, steps, folder)
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def put_state(recorded, step, files, directory):
    """Replace a state of the bundle by one of these files, kept as a run keeps them."""
    shutil.rmtree(directory, ignore_errors=True)
    for path, data in files.items():
        (directory / contract.STATE / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / contract.STATE / path).write_bytes(data)
    keep_state(directory, step)
    index, pack = run_bundle.state_members(step)
    name = directory / contract.SEGMENT_STATES / contract.checkpoint_name(step)
    shutil.copyfile(f"{name}.json", recorded.bundle.files[index])
    packed = zstandard.compress(name.with_suffix(".blocks").read_bytes())
    recorded.bundle.files[pack].write_bytes(packed)


def edited(files, edit):
    document = parse_canonical_json(files[RESUME])
    edit(document)
    return {**files, RESUME: canonical_json(document)}


@pytest.fixture
def lie(run_of, opened, forks, tmp_path, monkeypatch):
    """A function that puts changed files for the state at step 400 and executes from there."""
    monkeypatch.setattr("capsule.verification.execution.challenge.choose", lambda *_: [1])

    def lie(change):
        recorded = opened(run_of("dqn"), "dqn")
        folder = tmp_path / "files"
        folder.mkdir()
        files = state_files(recorded, [400], folder)
        put_state(recorded, 400, change(files), tmp_path / "lie")
        return challenge(recorded, 1, forks.execute, print).segments[0]

    return lie


@pytest.mark.slow
def test_the_state_as_it_is_passes(lie):
    assert lie(lambda files: files).equal


def refused(lie, change):
    with pytest.raises(CapsuleError) as refusal:
        lie(change)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-V061", ExitCode.TAMPERED)
    return refusal.value.message


def test_parameters_that_were_not_claimed_are_refused(lie):
    def change(files):
        name = "tensors-400.safetensors"
        data = bytearray(files[name])
        data[-1] ^= 1
        return {**files, name: bytes(data)}

    assert "another content of tensors-400.safetensors" in refused(lie, change)


def test_malformed_parameters_are_the_bundles_and_refused(lie):
    cut = refused(lie, lambda files: {**files, "tensors-400.safetensors": b"\xff" * 9})
    assert "has a malformed file: tensors-400.safetensors is not a well-formed" in cut


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda it: it["tensors"].update({"parameters/bias": "0" * 64}), "tensors"),
        (lambda it: it["trace"].update(head="0" * 64), "place in the trace"),
        (lambda it: it["trace"].update(offset=0), "place in the trace"),
        (lambda it: it["streams"]["minibatch"].update(key="0" * 32), "keys of random streams"),
        (lambda it: it["streams"].update(other=it["streams"]["no-op"]), "keys of random streams"),
        (lambda it: it["checkpoints"][0].update(trace_head="0" * 64), "checkpoints"),
        (lambda it: it.update(step=800), "step"),
        (lambda it: it.update(spec="0" * 64), "spec"),
    ],
)
def test_a_document_that_contradicts_the_claims_is_refused(lie, edit, reason):
    assert f"another {reason}" in refused(lie, lambda files: edited(files, edit))


def test_the_state_of_another_checkpoint_is_refused(run_of, opened, forks, tmp_path, lie):
    recorded = opened(run_of("dqn"), "dqn")
    other = state_files(recorded, [400, 800], tmp_path)
    assert "has no tensors-400" in refused(lie, lambda _: other)
    renamed = {path.replace("-800.", "-400."): data for path, data in other.items()}
    shutil.rmtree(tmp_path / "files")
    assert "another step" in refused(lie, lambda _: renamed)


def test_another_replay_memory_is_refused_or_differs(lie, tmp_path):
    def other_rewards(files):
        name = "replay/rewards.bin"
        return {**files, name: np.zeros(len(files[name]) // 4, np.float32).tobytes()}

    assert "cannot be resumed from: the replay files" in refused(lie, other_rewards)
    shutil.rmtree(tmp_path / "files")

    def with_their_digest(files):
        files = other_rewards(files)
        digest = digest_of_replay(files, tmp_path / "replay")
        return edited(files, lambda it: it["trainer"]["replay"].update(digest=digest))

    segment = lie(with_their_digest)
    assert not segment.equal
    assert segment.first_difference.component in ("minibatch", "loss")
    assert 400 < segment.first_difference.step <= 480


def digest_of_replay(files, folder):
    """Return what the trainer itself says of a replay memory's files."""
    folder.mkdir()
    for path, data in files.items():
        if path.startswith("replay/"):
            (folder / path.removeprefix("replay/")).write_bytes(data)
    trainer = spec_of("dqn").trainer
    slots = len(files["replay/marks.bin"])
    slack = slots - trainer.replay_capacity
    memory = ReplayMemory(folder, capacity=trainer.replay_capacity, slack=slack, frame_shape=(4,),
                          frame_dtype=np.float32, frame_stack=1)  # fmt: skip
    memory._ring.counts[0] = parse_canonical_json(files[RESUME])["trainer"]["replay"]["count"]
    return memory.digest()


@pytest.mark.slow
def test_another_environment_differs(lie):
    def other_actions(document):
        document["trainer"]["return"] += 1.0

    segment = lie(lambda files: edited(files, other_actions))
    assert segment.first_difference is None  # nothing traced depends on it
    assert "state.trainer" in segment.differences[0].component


# States


# Lies about a run


def forge(forks, directory, change):
    """Leave a run that was changed at step 400, went on, and claims what agrees with that.

    ``change`` gets the folder of the state, its document and its tensors, and returns the latter
    two.
    """
    spec = spec_of("dqn")
    forks.train(directory, Job(spec=spec, stop_after=400))
    folder = directory / contract.STATE
    state, tensors = change(folder, *load_resume_state(folder, spec.digest()))
    digests = tensor_digests(tensors)
    last = state.checkpoints[-1].model_copy(update={"tensors": digests})
    checkpoints = (*state.checkpoints[:-1], last)
    lie = state.model_copy(update={"tensors": digests, "checkpoints": checkpoints})
    save_resume_state(folder, lie, tensors)
    shutil.rmtree(directory / contract.SEGMENT_STATES)
    (directory / contract.RESULT).unlink()
    return forks.train(directory, Job(spec=spec))


def other_parameters(_folder, state, tensors):
    factors = {name: 1.5 if name.startswith("parameters/") else 1.0 for name in tensors}
    return state, {name: array * np.float32(factors[name]) for name, array in tensors.items()}


def other_experience(folder, state, tensors):
    rewards = folder / "replay" / "rewards.bin"
    rewards.write_bytes(np.full(rewards.stat().st_size // 4, 0.5, np.float32).tobytes())
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in [folder / RESUME, *(folder / "replay").iterdir()]
    }
    digest = digest_of_replay(files, folder.parent / "replay")
    replay = {**state.trainer["replay"], "digest": digest}
    return state.model_copy(update={"trainer": {**state.trainer, "replay": replay}}), tensors


@pytest.fixture(scope="module")
def forged(forks, tmp_path_factory):
    """A run whose parameters were changed in the middle."""
    return forge(forks, tmp_path_factory.mktemp("forged"), other_parameters)


@pytest.mark.slow
def test_a_poisoned_replay_memory_is_found_where_the_segment_before_ends(forks, opened, tmp_path):
    forged = forge(forks, tmp_path, other_experience)
    result = challenge(opened(forged, "dqn"), None, forks.execute, print)
    assert [segment.equal for segment in result.segments] == [False, True, True]
    assert result.segments[0].first_difference is None  # its trace and its checkpoint are honest
    assert [each.component for each in result.segments[0].differences] == [
        "state.trainer.replay.digest",
        "state.replay/rewards.bin",
    ]
    _, summary = judge_challenge(result, FreshSeed(steps=1, seed=1, keys=6), ())
    assert "has the recorded trace, but at its end the state to resume from differs" in summary


def with_other_frames(files, folder):
    """Return the files of a state in which other frames have the digest of the replay memory."""
    replay = parse_canonical_json(files[RESUME])["trainer"]["replay"]
    # Nothing was overwritten yet, so that the digest begins with this header and the first frame.
    header = canonical_json(["frames", "<f4", [4], replay["count"], 0])
    frames = bytearray(files["replay/frames.bin"])
    block = slice(BLOCK - len(header), 2 * BLOCK - len(header))
    frames[block] = with_the_same_digest(bytes(frames[block]), bytes(BLOCK))
    changed = {**files, "replay/frames.bin": bytes(frames)}
    assert digest_of_replay(changed, folder) == replay["digest"]
    return changed


def test_a_replay_memory_with_the_digest_of_the_honest_one_is_found(
    run_of, opened, forks, tmp_path, monkeypatch
):
    monkeypatch.setattr("capsule.verification.execution.challenge.choose", lambda *_: [0])
    recorded = opened(run_of("dqn"), "dqn")
    (folder := tmp_path / "files").mkdir()
    files = with_other_frames(state_files(recorded, [400], folder), tmp_path / "replay")
    put_state(recorded, 400, files, tmp_path / "lie")
    (segment,) = challenge(recorded, 1, forks.execute, print).segments
    assert segment.first_difference is None
    assert [each.component for each in segment.differences] == ["state.replay/frames.bin"]
    assert not segment.equal


def test_one_segment_is_written_in_the_singular():
    segment = SimpleNamespace(equal=True)
    result = SimpleNamespace(segments=(segment,), chosen="at random", of=3)
    _, summary = judge_challenge(result, FreshSeed(steps=1, seed=7, keys=6), ())
    assert summary.startswith(
        "1 of 3 segments, chosen at random by this verifier, was executed again from the recorded "
        "states and is the same, bit for bit; 2 more and the evaluation were not executed; "
        "1 step with the fresh seed 7 gave the same results twice"
    )


@pytest.mark.slow
def test_a_forged_segment_is_found_if_all_are_executed(forged, opened, forks):
    result = challenge(opened(forged, "dqn"), None, forks.execute, print)
    assert [segment.equal for segment in result.segments] == [False, True, True]
    assert result.segments[0].differences[0].component == "checkpoints.400"
    honest = FreshSeed(steps=1, seed=1, keys=6)
    # A relaxation does not excuse a segment with other bits, as it does not excuse a prefix.
    unsteady = honest.model_copy(update={"unrepeated": ("the two executions differ",)})
    for fresh, relaxed in ((honest, ()), (honest, RELAXED), (unsteady, RELAXED)):
        grade, summary = judge_challenge(result, fresh, relaxed)
        assert grade == "not-reproduced"
        assert "from step 0 to 400" in summary


def test_a_forged_segment_passes_where_others_are_chosen(forged, opened, forks, monkeypatch):
    monkeypatch.setattr("capsule.verification.execution.challenge.choose", lambda *_: [2])
    result = challenge(opened(forged, "dqn"), 1, forks.execute, print)
    assert [segment.equal for segment in result.segments] == [True]
    assert result.undetected == pytest.approx(2 / 3)
    assert (result.of, result.chosen) == (3, "at random")


def test_a_changed_record_is_named(run_of, opened, forks, monkeypatch):
    monkeypatch.setattr("capsule.verification.execution.challenge.choose", lambda *_: [0])
    recorded = opened(run_of("dqn"), "dqn")
    lines = recorded.trace.read_bytes().splitlines(keepends=True)
    record = json.loads(lines[30])
    lines[30] = json.dumps(record | {"actions": "0" * 32}, separators=(",", ":")).encode() + b"\n"
    recorded.trace.write_bytes(b"".join(lines))
    (segment,) = challenge(recorded, 1, forks.execute, print).segments
    assert not segment.equal
    assert (segment.first_difference.step, segment.first_difference.component) == (248, "actions")


class Reciter:
    """An image that emits what it has stored, whatever it is asked."""

    def __init__(self, directory):
        self._stored = directory

    def __call__(self, lock, directory, *, stop_after, **_):
        shutil.copytree(self._stored, directory, dirs_exist_ok=True)
        lines = (self._stored / contract.TRACE).read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= stop_after]
        (directory / contract.TRACE).write_bytes(b"".join(kept))
        path = directory / contract.CHECKPOINT_INDEX
        index = CheckpointIndex.model_validate_json(path.read_bytes())
        upto = tuple(each for each in index.checkpoints if each.step <= stop_after)
        path.write_bytes(
            canonical_json(CheckpointIndex(checkpoints=upto).model_dump(mode="json", by_alias=True))
        )
        if stop_after < lock.spec.trainer.total_steps:
            self._recite_state(stop_after, directory)

    def _recite_state(self, step, directory):
        states = self._stored / contract.SEGMENT_STATES
        name = states / contract.checkpoint_name(step)
        if not name.with_suffix(".json").exists():
            return
        blocks = {}
        for path in sorted(states.glob("*.json")):
            index = StateIndex.model_validate_json(path.read_bytes())
            data, sizes = path.with_suffix(".blocks").read_bytes(), index.block_sizes()
            for digest in index.packed:
                blocks[digest], data = data[: sizes[digest]], data[sizes[digest] :]
        index = StateIndex.model_validate_json(name.with_suffix(".json").read_bytes())
        for path, file in index.files.items():
            content = b"".join(blocks[digest] for digest in file.blocks)
            (directory / contract.STATE / path).write_bytes(content)


def test_an_image_that_recites_fools_everything_but_a_fresh_seed(run_of, opened, tmp_path):
    directory = run_of("dqn")
    recorded, recite = opened(directory, "dqn"), Reciter(directory)
    # What --mode full compares: the whole trace, and every claim.
    recite(recorded.lock, tmp_path, stop_after=1_000, schedule=None)
    assert first_difference(recorded.trace, tmp_path / contract.TRACE) is None
    found = collect_claims(recorded.lock, None, "process", tmp_path)
    assert compare_claims(recorded.claims, found) == ()
    segments = challenge(recorded, None, recite, print)
    assert all(segment.equal for segment in segments.segments)
    # What it cannot have stored.
    fresh = fresh_seed(recorded, recite, print)
    assert "6 random streams have no key of this seed" in fresh.contradictions[0]
    assert any("parameters of the recorded run" in each for each in fresh.contradictions)
    # No relaxation excuses an image that recites.
    for relaxed in ((), RELAXED):
        grade, summary = judge_challenge(segments, fresh, relaxed)
        assert grade == "not-reproduced"
        assert "does not compute from the seed" in summary


@pytest.mark.parametrize(
    "name", [contract.TRACE, contract.CHECKPOINT_INDEX, f"{contract.STATE}/{RESUME}"]
)
@pytest.mark.parametrize("leaves", ["a link", "nothing"])
def test_what_an_image_leaves_is_not_followed(run_of, opened, tmp_path, monkeypatch, name, leaves):
    monkeypatch.setattr("capsule.verification.execution.challenge.choose", lambda *_: [0])
    recite = Reciter(run_of("dqn"))

    def hostile(lock, directory, *, stop_after, **_):
        recite(lock, directory, stop_after=stop_after)
        (directory / name).replace(tmp_path / "elsewhere")
        if leaves == "a link":
            (directory / name).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(CapsuleError) as refusal:
        challenge(opened(run_of("dqn"), "dqn"), 1, hostile, print)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-B090", FAILED)


def test_an_image_that_derives_the_keys_and_recites_the_rest_is_found(run_of, opened, forks):
    recite = Reciter(run_of("dqn"))

    def clever(lock, directory, *, stop_after, schedule):
        forks.execute(lock, directory, stop_after=stop_after, schedule=schedule)
        streams = (directory / contract.STREAMS).read_bytes()
        recite(lock, directory, stop_after=stop_after, schedule=schedule)
        (directory / contract.STREAMS).write_bytes(streams)

    fresh = fresh_seed(opened(run_of("dqn"), "dqn"), clever, print)
    assert fresh.keys == 6
    assert len(fresh.contradictions) == 2
    assert all("of the recorded run" in each for each in fresh.contradictions)


def test_an_image_with_randomness_of_its_own_is_found(run_of, opened, forks):
    calls = []

    def moody(lock, directory, *, stop_after, schedule):
        calls.append(directory)
        rate = lock.spec.trainer.model_copy(update={"learning_rate": 0.1 * len(calls)})
        spec = lock.spec.model_copy(update={"trainer": rate})
        forks.execute(lock_of(spec), directory, stop_after=stop_after, schedule=schedule)

    fresh = fresh_seed(opened(run_of("dqn"), "dqn"), moody, print)
    assert len(calls) == 2
    assert fresh.contradictions == ()
    assert fresh.unrepeated[0].startswith("the two executions first differ at step")
    grade, summary = judge_challenge(None, fresh, ())
    assert grade == "not-reproduced"
    # Hardware that makes errors looks the same, so that nothing is said of the seed.
    assert "does not give the same results twice" in summary
    assert "seed" not in summary


def test_a_relaxed_run_that_does_not_repeat_its_bits_is_not_accused():
    spec = spec_of("dqn", determinism={"algorithms": "off"})
    fresh = FreshSeed(seed=7, steps=1, keys=6, unrepeated=("the two executions differ",))
    grade, summary = judge_challenge(None, fresh, unrepeatable(spec))
    assert grade == "inconclusive"
    assert summary.startswith("the two executions differ, which the spec allows")
    assert "determinism.algorithms: operators without a fixed order" in summary
    assert judge_challenge(None, fresh, unrepeatable(spec_of("dqn")))[0] == "not-reproduced"


# What is asked


@given(st.integers(1, 12).flatmap(lambda of: st.tuples(st.integers(1, of), st.just(of))))
def test_a_choice_is_a_set_of_so_many_segments(numbers):
    number, of = numbers
    chosen = choose(number, of)
    assert len(chosen) == number == len({*chosen})
    assert chosen == sorted(chosen)
    assert {*chosen} <= {*range(of)}
    assert choose(None, of) == list(range(of))


@pytest.mark.parametrize("actor", ["9" * 20, "9" * 5_000], ids=len)
def test_a_stream_of_an_impossible_actor_has_no_key_of_the_seed(actor):
    name, key = "environment", contract.stream_key(5, "environment")
    streams = [
        StreamProfile(name=each, seed=5, key=key, draws=0, digest="0" * 64)
        for each in (name, f"{name}/{actor}")
    ]
    assert next(_underivable(streams, 5)).startswith("1 random stream has no key of this seed")


def test_every_segment_is_chosen_about_as_often():
    counts = np.bincount([each for _ in range(3_000) for each in choose(2, 5)], minlength=5)
    assert abs(counts - 1_200).max() < 6 * np.sqrt(3_000 * 0.4 * 0.6)


def test_the_documented_probabilities_are_hypergeometric():
    text = (ROOT / "docs" / "verify.md").read_text()
    table = text[text.index("| false segments of 100 |") :].split("\n\n")[0].splitlines()
    numbers = [int(cell.removeprefix(" N = ")) for cell in table[0].split("|")[2:-1]]
    for row in table[2:]:
        false, *given_ = (float(cell) for cell in row.split("|")[1:-1])
        exact = [hypergeom.pmf(0, 100, int(false), number) for number in numbers]
        assert given_ == pytest.approx(exact, rel=0.05), false
    assert len(table) == 5


def test_what_cannot_be_challenged_is_refused_with_its_reason():
    for changes, reason, wanted in (
        (
            {"recording": {"segment_states": False}},
            "segment_states",
            "recording.segment_states: true",
        ),
        ({"entropy": {"mode": "recorded"}}, "randomness", "entropy.mode: virtual"),
    ):
        lock = lock_of(spec_of("dqn", **changes))
        with pytest.raises(CapsuleError, match=reason) as refusal:
            Mode("segments").check(lock)
        assert (refusal.value.code, refusal.value.exit_code) == ("CAP-V062", ExitCode.USAGE)
        assert refusal.value.fix.endswith(f"or ask the author for a run with {wanted}.")
        Mode("fresh-seed").check(lock)  # a fresh seed needs no state
    with pytest.raises(CapsuleError, match="has 3 segments") as refusal:
        Mode("segments", segments=4).check(lock_of(spec_of("dqn")))
    assert refusal.value.code == "CAP-V063"
    Mode("segments", segments=3).check(lock_of(spec_of("dqn")))


@pytest.mark.parametrize(("name", "steps"), [("dqn", 168), ("r2d2", 210), ("impala", 40)])
def test_a_prefix_ends_on_a_record_after_the_first_update(name, steps):
    assert prefix_steps(spec_of(name)) == steps


def test_states_between_trace_records_are_refused():
    with pytest.raises(ValueError, match="segment_states"):
        spec_of("dqn", recording={"checkpoint_interval": 404})


@pytest.mark.slow
@pytest.mark.parametrize("text", ["segments:1", "segments:30", "segments:all", "fresh-seed"])
def test_a_mode_is_written_as_it_is_read(text):
    mode = Mode.parse(text)
    assert str(mode) == text
    assert mode.challenges


@pytest.mark.parametrize("text", ["segments:", "segments:0", "segments:-1", "segments:1.5"])
@pytest.mark.slow
def test_segments_of_no_number_are_refused(text):
    with pytest.raises(CapsuleError) as refusal:
        Mode.parse(text)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-V060", ExitCode.USAGE)
