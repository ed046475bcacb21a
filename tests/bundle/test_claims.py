"""Claims and observations: gathered from a run directory, of which nothing is believed."""

import hashlib
import json
import os
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.bundle import claims as claims_module
from capsule.bundle.claims import (
    ImageClaim,
    Observations,
    ProgramClaims,
    TrainingClaims,
    claims_model,
    collect_claims,
    has_population,
    image_relaxations,
    open_run_file,
    read_arrivals,
    read_beneath,
    read_document,
    read_schedule,
    records_schedule,
)
from capsule.experiment import contract
from capsule.experiment.arrival_log import MAX_LOG_BYTES, ArrivalLog, Completions
from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import ScheduleLog
from capsule.host.run_directory import LOCK
from tests.entropy.evidence import SURROUNDINGS, make_mechanisms, make_report
from tests.report.runs import DQN, MACHINE, POPULATION, PROGRAM, finished, make_lock

SHA = "a" * 64
OUTPUT = contract.Output(size=3, sha256=SHA)
SCHEDULE = ScheduleLog(SHA, 2, 1, array("H", [0, 1]), array("H", [0, 1]))
ARRIVALS = ArrivalLog(waits={"0~1": Completions(tasks=2, order=(1, 0))})
RECORDED = {
    **POPULATION,
    "environment": {"suite": "atari", "game": "pong"},
    "trainer": {"algorithm": "impala", "schedule": {"mode": "recorded"}},
}


def canonical(value):
    """Write canonical JSON with the standard library, which is right without fractions."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def collected(run, engine="process", image=None):
    return collect_claims(run.lock, image, engine, run.directory)


def content(run, name):
    return json.loads((run.directory / name).read_bytes())


# --- what a run claims ----------------------------------------------------------------------------


def test_a_training_claims_what_its_documents_say(tmp_path):
    run = finished(tmp_path)
    image = ImageClaim(config=f"sha256:{SHA}", layers=(f"sha256:{SHA}",))
    claims = collected(run, "docker", image)
    result, index = content(run, contract.RESULT), content(run, contract.CHECKPOINT_INDEX)
    (checkpoint,) = index["checkpoints"]
    assert json.loads(claims.document()) == {
        "schema": "capsule/claims/v1",
        "lock": run.lock.digest(),
        "image": {"config": f"sha256:{SHA}", "layers": [f"sha256:{SHA}"]},
        "relaxations": [],
        "flags": content(run, contract.RUNTIME)["flags"],
        "libraries": content(run, contract.RUNTIME)["libraries"],
        "entropy_profile": None,
        "streams": content(run, contract.STREAMS)["streams"],
        "schedule": None,
        "trace": {"records": 4, "head": result["trace_head"]},
        "checkpoints": [{"step": 400, "digest": sha256(canonical(checkpoint))}],
        "evaluation": content(run, contract.EVALUATION),
        "steps": 400,
        "episodes": 12,
        "parameters": result["parameters"],
    }


def test_a_program_claims_what_it_wrote(tmp_path):
    run = finished(tmp_path, PROGRAM)
    (run.directory / contract.ENTROPY_PROFILE).write_bytes(b"numbers")
    (run.directory / contract.ARRIVALS).write_bytes(ARRIVALS.document())
    claims = collected(run)
    outputs = content(run, contract.OUTPUTS)
    assert json.loads(claims.document()) == {
        "schema": "capsule/program-claims/v1",
        "lock": run.lock.digest(),
        "image": None,
        "relaxations": ["engine=process"],
        "flags": content(run, contract.RUNTIME)["flags"],
        "libraries": content(run, contract.RUNTIME)["libraries"],
        "entropy_profile": sha256(b"numbers"),
        "outputs": outputs["files"],
        "deleted": [],
        "empty_folders": [],
        "standard_output": outputs["standard_output"],
        "arrivals": sha256(ARRIVALS.document()),
    }


def test_a_program_that_recorded_nothing_claims_neither_entropy_nor_arrivals(tmp_path):
    claims = collected(finished(tmp_path, PROGRAM))
    assert (claims.entropy_profile, claims.arrivals) == (None, None)


def test_a_recorded_schedule_is_claimed_by_its_digest(tmp_path):
    run = finished(tmp_path, RECORDED)
    with pytest.raises(CapsuleError, match=r"schedule\.log of the run .* No such file") as caught:
        collected(run)
    assert caught.value.code == "CAP-B090"
    (run.directory / contract.SCHEDULE).write_bytes(SCHEDULE.document())
    assert collected(run).schedule == SCHEDULE.digest()


@pytest.mark.parametrize("document", [DQN, PROGRAM], ids=["training", "program"])
def test_claims_read_back_as_they_were_written(tmp_path, document):
    run = finished(tmp_path, document)
    claims = collected(run)
    model = claims_model(run.lock)
    assert type(claims) is model
    assert model.parse(claims.document()) == claims
    assert claims.document() == canonical(json.loads(claims.document()))
    assert claims.claim_id() == sha256(claims.document())
    # Claims of before data sets have no such field, and keep their ids.
    assert b'"data"' not in claims.document()
    other = claims.model_copy(update={"data": {"digits": SHA}})
    assert json.loads(other.document())["data"] == {"digits": SHA}
    assert other.claim_id() != claims.claim_id()


@pytest.mark.parametrize("field", ["flags", "libraries", "relaxations", "lock", "image"])
def test_every_common_claim_changes_the_claim_id(tmp_path, field):
    claims = collected(finished(tmp_path))
    others = {
        "flags": {"threads": "1"},
        "libraries": {},
        "relaxations": ("engine=other",),
        "lock": "b" * 64,
        "image": ImageClaim(config=f"sha256:{SHA}", layers=()),
    }
    changed = claims.model_copy(update={field: others[field]})
    assert changed.claim_id() != claims.claim_id()


@pytest.mark.parametrize("name", ["", "sha256:/etc/x", "sha256:../x", SHA, f"sha256:{SHA}\n"])
def test_images_and_layers_are_named_by_digests_only(name):
    digest = f"sha256:{SHA}"
    for config, layers in ((name, ()), (digest, (digest, name))):
        with pytest.raises(ValueError, match="pattern"):
            ImageClaim(config=config, layers=layers)


def test_claims_of_another_kind_are_not_read(tmp_path):
    claims = collected(finished(tmp_path))
    with pytest.raises(ValueError, match="schema"):
        ProgramClaims.parse(claims.document())
    with pytest.raises(ValueError, match="extra"):
        TrainingClaims.parse(canonical({**json.loads(claims.document()), "extra": 1}))


def test_observations_without_data_sets_have_no_such_field():
    facts = Observations(
        capsule="1",
        capsule_sha256=SHA,
        started="2026-11-21T12:00:00+00:00",
        finished="2026-11-21T12:01:00+00:00",
        training_seconds=0.5,
        steps_per_second=None,
        engine={"name": "docker"},
        device={},
        fingerprint=MACHINE,
    )
    assert b'"data"' not in facts.document()
    assert Observations.parse(facts.document()) == facts
    known = facts.model_copy(update={"data": {"digits": None}})
    assert json.loads(known.document())["data"] == {"digits": None}


# --- what follows from the lock -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "model", "schedule", "population"),
    [
        (DQN, TrainingClaims, False, False),
        (PROGRAM, ProgramClaims, False, False),
        (POPULATION, TrainingClaims, False, True),
        (RECORDED, TrainingClaims, True, False),
    ],
)
def test_the_lock_says_what_a_run_leaves(document, model, schedule, population):
    lock = make_lock(document)
    assert claims_model(lock) is model
    assert (records_schedule(lock), has_population(lock)) == (schedule, population)


@pytest.mark.parametrize(
    ("engine", "report", "fixed_paths", "outside"),
    [
        ("docker", {}, True, []),
        ("bwrap", {"own_numbers": False}, True, []),
        ("process", {}, True, ["engine=process"]),
        ("process", {"own_numbers": False}, True, ["engine.namespaces=none", "engine=process"]),
        ("process", {"first_process": 7}, True, ["engine.namespaces=none", "engine=process"]),
        # As in a pod, where a run is alone without namespaces of its own.
        ("process", {}, False, ["engine.namespaces=none", "engine=process"]),
    ],
)
@pytest.mark.parametrize("relaxed", [False, True])
def test_what_a_run_lacked_of_a_container_is_declared(
    engine, report, fixed_paths, outside, relaxed
):
    settings = {"determinism": {"algorithms": "warn"}} if relaxed else {}
    lock = make_lock({**DQN, **settings})
    mechanisms = make_mechanisms(
        surroundings=SURROUNDINGS.model_copy(update={"fixed_paths": fixed_paths})
    )
    found = image_relaxations(lock, engine, make_report(**report), mechanisms)
    assert found == tuple(["determinism.algorithms=warn"] * relaxed + outside)


# --- programs in words ----------------------------------------------------------------------------


def program_claims(**changes):
    common = {"lock": SHA, "image": None, "relaxations": (), "flags": {}, "libraries": {}}
    return ProgramClaims(**{**common, "outputs": {}, "standard_output": None, **changes})


EMPTY = contract.Output(size=0, sha256=SHA)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"standard_output": EMPTY}, None),
        ({"outputs": {"a": OUTPUT}}, "1 file"),
        ({"outputs": {str(n): OUTPUT for n in range(1_500)}}, "1,500 files"),
        ({"deleted": ("a",), "empty_folders": ("b",)}, "1 deleted file, 1 empty folder"),
        (
            {"outputs": {"a": EMPTY}, "deleted": ("b", "c"), "empty_folders": ("d", "e")},
            "1 file, 2 deleted files, 2 empty folders",
        ),
        (
            {"standard_output": contract.Output(size=1, sha256=SHA)},
            "1 byte of standard output",
        ),
        (
            {"outputs": {"a": OUTPUT}, "standard_output": OUTPUT},
            "1 file, 3 bytes of standard output",
        ),
    ],
)
def test_what_a_program_claims_is_said_in_words(changes, words):
    claims = program_claims(**changes)
    assert claims.nothing is (words is None)
    assert claims.described == (words or "NOTHING: the program left no file and printed nothing")


# --- documents of a run directory -----------------------------------------------------------------


INDEX = contract.CheckpointIndex(checkpoints=())


@pytest.fixture
def folder(tmp_path):
    """A run directory with one sound document, a link to it, a folder, and a pipe."""
    folder = tmp_path / "work"
    (folder / "deep").mkdir(parents=True)
    (folder / "sound.json").write_bytes(INDEX.document())
    (folder / "deep" / "sound.json").write_bytes(INDEX.document())
    (folder / "link").symlink_to("sound.json")
    (folder / "way").symlink_to("deep")
    (folder / "spaces.json").write_bytes(INDEX.document() + b"\n")
    (folder / "twice.json").write_bytes(b'{"checkpoints":[],"checkpoints":[]}')
    (folder / "other.json").write_bytes(contract.StreamProfiles(streams=()).document())
    (folder / "bytes.json").write_bytes(b"\xff")
    (folder / "empty.json").write_bytes(b"")
    os.mkfifo(folder / "pipe")
    return folder


BAD = ["missing", "link", "deep", "pipe", "spaces.json", "twice.json", "other.json"]
BAD += ["bytes.json", "empty.json"]


def test_a_sound_document_is_read(folder):
    assert read_document(folder / "sound.json", contract.CheckpointIndex) == INDEX
    assert read_beneath(folder, "deep/sound.json", contract.CheckpointIndex) == INDEX


@pytest.mark.parametrize("name", BAD)
def test_a_document_that_breaks_the_contract_is_refused(folder, name):
    for read in (
        lambda: read_document(folder / name, contract.CheckpointIndex),
        lambda: read_beneath(folder, name, contract.CheckpointIndex),
    ):
        with pytest.raises(CapsuleError) as caught:
            read()
        assert caught.value.code == "CAP-B090"
        assert caught.value.message.startswith(f"{name} of the run is not a valid CheckpointIndex")
        assert "\n" not in caught.value.message
        assert str(folder) not in caught.value.message
        assert "output.log" in caught.value.fix


def test_a_document_that_is_too_large_is_called_so(folder, monkeypatch):
    monkeypatch.setattr(claims_module, "MAX_DOCUMENT_BYTES", 1 << 20)
    (folder / "large.json").write_bytes(b" " * (1 << 20) + (folder / "sound.json").read_bytes())
    with pytest.raises(CapsuleError, match="it is larger than 1 MiB"):
        read_document(folder / "large.json", contract.CheckpointIndex)


@pytest.mark.parametrize("path", ["way/sound.json", "../work/sound.json", "link", "deep", "pipe"])
def test_no_file_is_opened_through_a_link_or_from_elsewhere(folder, path):
    with pytest.raises(CapsuleError) as caught:
        open_run_file(folder, path)
    assert caught.value.code == "CAP-B090"
    assert caught.value.message.startswith(f"{path} of the run is not a valid file: ")
    with pytest.raises(CapsuleError, match="CAP-B090"):
        read_beneath(folder, path, contract.CheckpointIndex)


@given(data=st.binary(max_size=60))
def test_a_file_is_opened_as_it_is(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    (folder / LOCK).write_bytes(data)
    with open_run_file(folder, LOCK) as stream:
        assert stream.read() == data


@pytest.mark.parametrize(
    ("read", "log", "code"),
    [(read_schedule, SCHEDULE, "CAP-T341"), (read_arrivals, ARRIVALS, "CAP-T385")],
    ids=["schedule", "arrivals"],
)
def test_logs_are_read_or_refused(tmp_path, read, log, code):
    path = tmp_path / "log"
    path.write_bytes(log.document())
    assert read(path) == log
    path.write_bytes(log.document()[:-1])
    with pytest.raises(CapsuleError) as caught:
        read(path)
    assert caught.value.code == code
    (tmp_path / "link").symlink_to(path)
    for place in (tmp_path / "none", tmp_path / "link", tmp_path):
        with pytest.raises(CapsuleError) as caught:
            read(place)
        assert caught.value.code == "CAP-B090"
        assert caught.value.message.startswith(f"{place.name} of the run is not a valid ")


def test_an_arrival_log_that_is_too_long_is_said_to_be(tmp_path):
    path = tmp_path / "log"
    path.touch()
    os.truncate(path, MAX_LOG_BYTES + 1)
    with pytest.raises(CapsuleError, match=f"more than {MAX_LOG_BYTES} bytes"):
        read_arrivals(path)
