"""States of a bundle's segments are untrusted: they are laid out within bounds, and checked."""

import shutil

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from capsule.bundle import run_bundle
from capsule.bundle.run_bundle import RecordedRun
from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json, parse_canonical_json, sha256_hex
from capsule.experiment.contract import Checkpoint, StreamProfile, StreamProfiles
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.states import BLOCK_BYTES, RESUME, ResumeState
from capsule.experiment.trace import Mark
from capsule.training.state.segment_states import keep_state
from capsule.verification.execution.segment_states import (
    bad_state,
    check_state,
    lay_out,
    read_resume,
)
from tests.verification.execution.files import Files
from tests.verification.forked import lock_of, spec_of

STATE = {
    RESUME: b"{}",
    "tensors-400.safetensors": bytes(range(200)),
    "replay/rewards.bin": b"1" * BLOCK_BYTES + b"2" * 9,
}


def keep(folder, states):
    """Return a run whose bundle has states, by step, as runs keep them and bundles pack them."""
    members = {}
    for step, files in states.items():
        shutil.rmtree(folder / contract.STATE, ignore_errors=True)
        for path, data in files.items():
            (folder / contract.STATE / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / contract.STATE / path).write_bytes(data)
        keep_state(folder, step)
        name = folder / contract.SEGMENT_STATES / contract.checkpoint_name(step)
        index, pack = run_bundle.state_members(step)
        members[index], members[pack] = name.with_suffix(".json"), name.with_suffix(".zst")
        members[pack].write_bytes(zstandard.compress(name.with_suffix(".blocks").read_bytes()))
    return RecordedRun(Files(members), lock_of(spec_of("dqn")), None)


@pytest.fixture
def kept():
    """A function that keeps the same state in a folder."""
    return lambda folder: keep(folder, {400: STATE})


@pytest.fixture
def recorded(kept, tmp_path):
    return kept(tmp_path / "bundle")


# --- indexes and packs ----------------------------------------------------------------------------


def member(recorded, step, kind):
    return recorded.bundle.files[run_bundle.state_members(step)[kind]]


def refused_layout(recorded, tmp_path, steps=(400,)):
    folder = tmp_path / "inner" / "state"
    folder.mkdir(parents=True)
    with pytest.raises(CapsuleError) as refusal:
        lay_out(recorded, steps, folder)
    assert refusal.value.code in ("CAP-V061", "CAP-B144")
    assert refusal.value.exit_code == ExitCode.TAMPERED
    assert [path.name for path in tmp_path.glob("inner/*")] == ["state"]
    return refusal.value.message


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/x",
        "a/../../x",
        ".hidden",
        "a//b",
        "a/",
        "",
        "-x",
        "a\\b",
        "a\nb",
        "é",
        "a" * 101,
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(recorded, tmp_path, path):
    index = member(recorded, 400, 0)
    document = parse_canonical_json(index.read_bytes())
    document["files"][path] = document["files"][RESUME]
    index.write_bytes(canonical_json(document))
    refused_layout(recorded, tmp_path)


def test_a_file_that_is_a_folder_as_well_is_refused(recorded, tmp_path):
    index = member(recorded, 400, 0)
    document = parse_canonical_json(index.read_bytes())
    document["files"][f"{RESUME}/x"] = document["files"][RESUME]
    index.write_bytes(canonical_json(document))
    assert "as a file and as a folder" in refused_layout(recorded, tmp_path)


def change_index(recorded, step, change):
    index = member(recorded, step, 0)
    document = parse_canonical_json(index.read_bytes())
    change(document)
    index.write_bytes(canonical_json(document))


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it["packed"].append(it["packed"][0]),
        lambda it: it["packed"].append("0" * 64),
        lambda it: it["packed"].pop(),
        lambda it: it["packed"].reverse(),
        lambda it: it["files"][RESUME]["blocks"].append("0" * 64),
        lambda it: it["files"][RESUME].update(size=it["files"][RESUME]["size"] + 1),
        lambda it: it["files"][RESUME].update(size=-1),
        lambda it: it["files"][RESUME].update(size=1 << 50),
        lambda it: it.update(step=401),
        lambda it: it.update(files={}),
        lambda it: it.update(more=1),
    ],
)
def test_an_index_that_does_not_fit_its_pack_is_refused(recorded, tmp_path, change):
    change_index(recorded, 400, change)
    refused_layout(recorded, tmp_path)


def unpacked(data):
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def zeros(size):
    """Return so many bytes of zeros, a multiple of 16 MiB, in one frame."""
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    chunks = [packer.compress(bytes(1 << 24)) for _ in range(size >> 24)]
    return b"".join([*chunks, packer.flush()])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not zstandard",
        lambda data: data[:-5],
        lambda data: zstandard.compress(unpacked(data) + b"more"),
        zstandard.compress(bytes(100)),
        zeros(1 << 30),
    ],
    ids=["empty", "other", "cut", "more", "less", "bomb"],
)
def test_a_pack_that_holds_something_else_is_refused(recorded, tmp_path, content):
    pack = member(recorded, 400, 1)
    pack.write_bytes(content(pack.read_bytes()) if callable(content) else content)
    assert pack.stat().st_size < 1 << 20
    refused_layout(recorded, tmp_path)


def test_a_state_larger_than_the_run_was_allowed_to_be_is_refused(recorded, tmp_path):
    blocks = recorded.lock.spec.limits.disk_mb + 1
    digest = sha256_hex(bytes(BLOCK_BYTES))

    def grow(document):
        document["files"]["big"] = {"size": blocks * BLOCK_BYTES, "blocks": [digest] * blocks}

    change_index(recorded, 400, grow)
    assert "more than limits.disk_mb" in refused_layout(recorded, tmp_path)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.integers(0, 255), st.sampled_from([0, 1]))
def test_a_changed_byte_is_refused_or_changes_no_file(kept, tmp_path_factory, place, byte, kind):
    folder = tmp_path_factory.mktemp("state")
    recorded = kept(folder / "bundle")
    path = member(recorded, 400, kind)
    data = bytearray(path.read_bytes())
    data[place % len(data)] = byte
    path.write_bytes(data)
    try:
        (folder / "out").mkdir()
        lay_out(recorded, [400], folder / "out")
    except CapsuleError as error:
        assert error.exit_code == ExitCode.TAMPERED
    else:  # the byte was as before, or one of a name, which the checks after this look for
        assert contents(folder / "out") == sorted(STATE.values())


def contents(folder):
    return sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file())


SIZES = st.sampled_from([0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES])
FILES = st.dictionaries(
    st.sampled_from(["a", "b.bin", "replay/c.bin", "replay/d"]),
    st.tuples(st.sampled_from([b"\0", b"x"]), SIZES),
    min_size=1,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(FILES, min_size=1, max_size=3))
def test_states_come_back_as_they_were_kept(tmp_path_factory, states):
    folder = tmp_path_factory.mktemp("states")
    written = {
        step: {path: byte * size for path, (byte, size) in files.items()}
        for step, files in enumerate(states, 1)
    }
    run = keep(folder, written)
    for step, files in written.items():
        (target := folder / f"out-{step}").mkdir()
        lay_out(run, range(1, step + 1), target)
        found = {
            path.relative_to(target).as_posix(): path.read_bytes()
            for path in target.rglob("*")
            if path.is_file()
        }
        assert found == files
    shutil.rmtree(folder)


def test_only_the_files_that_are_wanted_are_written(recorded, tmp_path):
    (tmp_path / "out").mkdir()
    lay_out(recorded, [400], tmp_path / "out", only={RESUME})
    assert [path.name for path in (tmp_path / "out").rglob("*")] == [RESUME]
    assert (tmp_path / "out" / RESUME).read_bytes() == STATE[RESUME]


def test_a_state_is_laid_out_from_all_packs_up_to_it(tmp_path):
    later = {**STATE, RESUME: b'{"later":1}'}
    run = keep(tmp_path / "bundle", {400: STATE, 800: later})
    (tmp_path / "out").mkdir()
    lay_out(run, [400, 800], tmp_path / "out")
    assert contents(tmp_path / "out") == sorted(later.values())
    (tmp_path / "alone").mkdir()
    with pytest.raises(CapsuleError, match=r"lacks block [0-9a-f]{64}") as caught:
        lay_out(run, [800], tmp_path / "alone")
    assert caught.value.code == "CAP-V061"


def test_the_states_must_be_of_the_steps_that_are_asked_for(tmp_path):
    run = keep(tmp_path / "bundle", {400: STATE, 800: STATE})
    first, second = (run.bundle.files[run_bundle.state_members(step)[0]] for step in (400, 800))
    shutil.copyfile(first, second)
    assert "is of another step" in refused_layout(run, tmp_path, (400, 800))


# --- the document of a state ----------------------------------------------------------------------

KEY = "ab" * 16
WEIGHTS = np.array([1.0, 2.0], np.float32)
DIGESTS = {"w": contract.tensor_digest("F32", (2,), WEIGHTS.tobytes())}
CHECKPOINTS = tuple(
    Checkpoint(step=step, tensors=DIGESTS, trace_head=digit * 64)
    for step, digit in ((400, "1"), (800, "2"))
)
MARK = Mark(offset=99, records=200, step=800, head="2" * 64)


def resume_state(**changes):
    facts = {
        "spec": spec_of("dqn").digest(),
        "step": 800,
        "seconds": 1.0,
        "tensors": DIGESTS,
        "streams": {"no-op": {"key": KEY, "draws": 3}},
        "trainer": {},
        "trace": {"head": MARK.head, "offset": MARK.offset, "records": MARK.records, "rest": "x"},
        "checkpoints": CHECKPOINTS,
    }
    return ResumeState(**facts | changes)


@pytest.fixture
def check(tmp_path):
    """A function that checks a state against the claims of two checkpoints."""
    profile = StreamProfile(name="no-op", seed=1, key=KEY, draws=9, digest="0" * 64)
    streams = tmp_path / "streams.json"
    streams.write_bytes(StreamProfiles(streams=(profile,)).document())
    run = RecordedRun(Files({run_bundle.STREAMS: streams}), lock_of(spec_of("dqn")), None)

    def check(resume=None, weights=WEIGHTS, checkpoints=CHECKPOINTS, mark=MARK):
        folder = tmp_path / "state"
        folder.mkdir(exist_ok=True)
        (folder / RESUME).write_bytes((resume or resume_state()).document())
        if weights is not None:
            save_file({"w": weights}, folder / "tensors-800.safetensors")
        check_state(run, checkpoints, mark, folder)

    return check


def test_a_state_of_the_claimed_checkpoint_is_accepted(check):
    check()


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"spec": "0" * 64}, "spec"),
        ({"step": 400}, "step"),
        ({"checkpoints": CHECKPOINTS[:1]}, "checkpoints"),
        ({"checkpoints": CHECKPOINTS[::-1]}, "checkpoints"),
        ({"trace": {"head": "1" * 64, "offset": 99, "records": 200}}, "place in the trace"),
        ({"trace": {"head": "2" * 64, "offset": 98, "records": 200}}, "place in the trace"),
        ({"trace": {"head": "2" * 64, "offset": 99}}, "place in the trace"),
        ({"streams": {"no-op": {"key": "0" * 32}}}, "keys of random streams"),
        ({"streams": {"no-op": {}}}, "keys of random streams"),
        ({"streams": {"other": {"key": KEY}}}, "keys of random streams"),
        ({"tensors": {"w": "0" * 64}}, "tensors"),
        ({"tensors": {}}, "tensors"),
    ],
)
def test_a_state_that_contradicts_the_claims_is_tampering(check, changes, fact):
    wanted = f"is not of the claimed checkpoint at step 800: another {fact}$"
    with pytest.raises(CapsuleError, match=wanted) as caught:
        check(resume_state(**changes))
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V061", ExitCode.TAMPERED)
    assert run_bundle.state_members(800)[0] in caught.value.message
    assert "Do not trust this bundle" in caught.value.fix


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"weights": WEIGHTS * 2}, "another content of tensors-800.safetensors"),
        ({"weights": None}, "has no tensors-800.safetensors"),
        ({"mark": Mark(99, 200, 800, "3" * 64)}, "another trace head"),
    ],
)
def test_other_tensors_and_another_trace_are_tampering(check, facts, reason):
    with pytest.raises(CapsuleError, match=reason) as caught:
        check(**facts)
    assert caught.value.code == "CAP-V061"


def test_a_malformed_file_of_tensors_is_tampering(check, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "tensors-800.safetensors").write_bytes(b"\xff" * 9)
    with pytest.raises(CapsuleError, match="has a malformed file: tensors-800") as caught:
        check(weights=None)
    assert caught.value.code == "CAP-V061"


@pytest.mark.parametrize(
    "plant",
    [
        lambda _: None,
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"{}"),
        lambda path: path.write_bytes(b"not JSON"),
        lambda path: path.write_bytes(b" " + resume_state().document()),
    ],
    ids=["missing", "a folder", "empty", "without fields", "text", "not canonical"],
)
def test_a_document_that_is_missing_or_malformed_is_tampering(tmp_path, plant):
    plant(tmp_path / RESUME)
    with pytest.raises(CapsuleError, match="states/0") as caught:
        read_resume(tmp_path, "states/0")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V061", ExitCode.TAMPERED)


def test_a_document_is_read_as_it_was_written(tmp_path):
    (tmp_path / RESUME).write_bytes(resume_state().document())
    assert read_resume(tmp_path, "states/0") == resume_state()


def test_the_error_of_a_bad_state_names_its_member():
    error = bad_state("states/0", "lacks something")
    assert (error.code, error.message) == ("CAP-V061", "states/0 lacks something")
