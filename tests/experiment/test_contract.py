"""The run contract: names, identities by digest, and the documents of a run directory."""

import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from capsule.experiment import contract
from capsule.experiment.contract import (
    Ancestry,
    Checkpoint,
    CheckpointIndex,
    DenseWindow,
    EpisodeOrder,
    Evaluation,
    EvaluationPoint,
    Generation,
    Job,
    Output,
    Outputs,
    Runtime,
    checkpoint_name,
    gpu_identity,
    stream_key,
    tensor_digest,
    tensor_header,
)
from tests.bundle.locks import make_lock
from tests.experiment.specs import make_spec

ZERO, ONE = "0" * 64, "1" * 64
SHARED = Path(__file__).parents[2] / "capsule" / "native" / "source" / "shared" / "entropy.h"


# ---- names and identities ----


def test_checkpoint_names_sort_by_step():
    assert checkpoint_name(1_000) == "step-000000001000"
    assert checkpoint_name(999_999) < checkpoint_name(20_000_000)


@given(st.lists(st.integers(0, 10**12 - 1), min_size=2, unique=True))
def test_the_order_of_checkpoint_names_is_that_of_their_steps(steps):
    names = [checkpoint_name(step) for step in sorted(steps)]
    assert all(one < other for one, other in pairwise(names))
    assert [int(name.removeprefix("step-")) for name in names] == sorted(steps)


def test_a_stream_key_is_the_documented_hash():
    text = b'["capsule/stream/v1",7,"exploration",3]'
    assert stream_key(7, "exploration", 3) == hashlib.sha256(text).hexdigest()[:32]
    assert stream_key(7, "exploration") == stream_key(7, "exploration", 0)


def test_streams_of_another_seed_name_or_index_have_other_keys():
    keys = {
        stream_key(seed, name, index)
        for seed in (0, 1, 2**53 - 1)
        for name in ("no-op", "minibatch")
        for index in (0, 1, 10)
    }
    assert len(keys) == 18


def test_a_gpu_is_published_by_a_salted_hash():
    uuid = "GPU-2c1d0000-0000-0000-0000-000000000000"
    expected = hashlib.sha256(b"capsule/gpu-uuid/v1\0" + uuid.encode()).hexdigest()
    assert gpu_identity(uuid) == expected
    assert gpu_identity(uuid) != hashlib.sha256(uuid.encode()).hexdigest()


def test_shape_and_dtype_are_part_of_the_digest():
    data = bytes(16)
    assert len({tensor_digest("F32", (4,), data), tensor_digest("F32", (2, 2), data),
                tensor_digest("I32", (4,), data)}) == 3  # fmt: skip


def test_a_tensor_is_its_header_and_its_elements():
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    header = b'{"dtype":"F32","shape":[2,3]}'
    assert tensor_header("F32", array.shape) == header
    expected = hashlib.sha256(header + array.tobytes()).hexdigest()
    assert tensor_digest("F32", array.shape, array.tobytes()) == expected
    assert tensor_digest("F32", [2, 3], memoryview(array.tobytes())) == expected


def test_a_scalar_is_not_a_vector_of_one_element():
    assert tensor_header("I64", ()) == b'{"dtype":"I64","shape":[]}'
    assert tensor_digest("I64", (), bytes(8)) != tensor_digest("I64", (1,), bytes(8))


# ---- constants that other parts repeat ----


def test_the_numbers_of_processes_are_those_of_the_native_parts():
    text = SHARED.read_text()
    for name in ("NUMBERS_SIGNAL", "FIRST_PROCESS", "PROGRAM_PROCESS"):
        (value,) = re.findall(rf"#define CAPSULE_{name} (\d+)", text)
        assert int(value) == getattr(contract, name)


def test_every_file_of_a_run_directory_has_a_name_of_its_own():
    names = [*contract.READ_FILES, *contract.READ_FOLDERS]
    names += [contract.STATE, contract.WORKSPACE, contract.ARRIVALS_FOLDER, contract.INTERPRETERS]
    names += [contract.SCHEDULE_REPLAY, contract.ARRIVALS_REPLAY, contract.EPISODE_ORDER]
    assert len({name.lower() for name in names}) == len(names)
    assert not [name for name in names if "/" in name or name.startswith(".")]


# ---- jobs ----


def test_a_job_has_the_spec_and_the_tree_of_its_lock():
    lock = make_lock()
    job = Job.of(lock, stop_after=8, learners=2)
    assert (job.spec, job.tree, job.stop_after, job.learners) == (lock.spec, {}, 8, 2)
    assert Job.parse(job.document()) == job


@pytest.mark.parametrize(
    "how", [{"learners": 0}, {"replicas": 0}, {"more": 1}, {"dense": {"first": 0, "last": 4}}]
)
def test_a_job_that_cannot_be_done_is_rejected(how):
    with pytest.raises(ValidationError, match=next(iter(how))):
        Job.of(make_lock(), **how)


def test_a_job_without_options_is_the_whole_run():
    job = Job(spec=make_spec())
    assert (job.stop_after, job.dense, job.segment, job.tree) == (None, None, False, {})
    assert (job.learners, job.replicas) == (1, 1)


# ---- documents ----

POINT = EvaluationPoint(step=4, returns=((1.5).hex(), (-0.0).hex()), lengths=(10, 20))
GENERATION = Generation(
    number=3, member=1, parent=0, step=800, parent_step=640,
    hyperparameters={"learning_rate": (0.1).hex()}, score=(0.5).hex(), rival=0,
    rival_score=None, copied=True,
)  # fmt: skip
CHECKPOINT = Checkpoint(step=4, tensors={"parameters/b": ZERO, "parameters/a": ONE}, trace_head=ONE)
DOCUMENTS = [
    Job(spec=make_spec(), dense=DenseWindow(first=4, last=8)),
    Runtime(flags={"a": "b"}, libraries={}, device={"kind": "cpu", "cores": 2}),
    Ancestry(generations=(GENERATION,)),
    CheckpointIndex(checkpoints=(CHECKPOINT,)),
    Evaluation(starts=((0, 1), ()), points=(POINT,)),
    EpisodeOrder(seed=2**53 - 1, step=4, starts=((), (3,)), episode=1),
    Outputs(files={"a": Output(size=1, sha256=ZERO)}, standard_output=None),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: type(each).__name__)
def test_a_document_is_read_back_and_names_its_version(document):
    data = document.document()
    assert type(document).parse(data) == document
    facts = json.loads(data)
    assert re.fullmatch(r"capsule/[a-z-]+/v1", facts["schema"])
    other = json.dumps({**facts, "schema": facts["schema"][:-1] + "2"}).encode()
    with pytest.raises(ValidationError, match="schema"):
        type(document).model_validate_json(other)


def test_an_ancestry_is_read_back():
    first = GENERATION.model_copy(update={"number": 0, "member": 0, "parent": None})
    assert first.name == "generation 0, member 0"
    ancestry = Ancestry(generations=(first,))
    assert Ancestry.model_validate_json(ancestry.model_dump_json(by_alias=True)) == ancestry


def test_a_trace_record_has_all_facts_of_a_generation():
    facts = GENERATION.facts()
    assert Generation.model_validate_json(json.dumps(facts)) == GENERATION
    assert facts["hyperparameters"] == {"learning_rate": "0x1.999999999999ap-4"}
    assert GENERATION.name == "generation 3, member 1"


def test_the_digest_of_a_checkpoint_is_that_of_its_canonical_json():
    text = f'{{"step":4,"tensors":{{"parameters/a":"{ONE}","parameters/b":"{ZERO}"}},'
    text += f'"trace_head":"{ONE}"}}'
    assert CHECKPOINT.digest() == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "change", [{"step": 8}, {"tensors": {"parameters/a": ONE}}, {"trace_head": ZERO}]
)
def test_every_fact_of_a_checkpoint_changes_its_digest(change):
    assert CHECKPOINT.model_copy(update=change).digest() != CHECKPOINT.digest()


@pytest.mark.parametrize("digest", ["0" * 63, "0" * 65, "A" * 64, "g" * 64, ""])
def test_a_checkpoint_names_tensors_by_sha_256(digest):
    with pytest.raises(ValidationError, match="trace_head"):
        Checkpoint(step=4, tensors={}, trace_head=digest)


def test_a_start_set_is_identified_by_the_canonical_json_of_its_starts():
    evaluation = Evaluation(starts=((0, 1), (), (12,)), points=())
    assert evaluation.start_set == hashlib.sha256(b"[[0,1],[],[12]]").hexdigest()
    other = Evaluation(starts=((0,), (1,), (12,)), points=())
    assert other.start_set != evaluation.start_set


@pytest.mark.parametrize(
    ("output", "fact"),
    [
        (Output(size=3, sha256=ONE), f"file 0644 {ONE}"),
        (Output(size=3, sha256=ONE, executable=True), f"file 0755 {ONE}"),
        (Output(size=3, sha256=ONE, target="../a b"), "symlink ../a b"),
        (Output(size=3, sha256=ONE, target="x", executable=True), "symlink x"),
    ],
)
def test_an_output_is_what_a_lock_says_of_a_file(output, fact):
    assert output.fact == fact


@pytest.mark.parametrize("field", ["flags", "libraries"])
def test_a_run_says_only_so_much_of_itself(field):
    facts = {"flags": {}, "libraries": {}, "device": {}}
    fits = {f"name {number}": "" for number in range(contract.MAX_FACTS)}
    assert getattr(Runtime(**{**facts, field: fits}), field) == fits
    for wrong in ({**fits, "one more": ""}, {"n" * 201: ""}, {"name": "v" * 4_097}):
        with pytest.raises(ValidationError, match=field):
            Runtime(**{**facts, field: wrong})


@pytest.mark.parametrize("field", ["files", "empty_folders"])
def test_a_program_has_only_so_many_outputs(field):
    names = [str(number) for number in range(contract.MAX_OUTPUTS + 1)]
    output = Output(size=0, sha256=ZERO)

    def listed(names):
        found = dict.fromkeys(names, output) if field == "files" else tuple(names)
        return Outputs(**{"files": {}, "standard_output": None, field: found})

    assert len(getattr(listed(names[1:]), field)) == contract.MAX_OUTPUTS
    with pytest.raises(ValidationError, match=field):
        listed(names)


# ---- numbers that must compare exactly ----


@given(st.floats())
def test_every_float_has_a_hexadecimal_form_that_documents_accept(value):
    point = EvaluationPoint(step=1, returns=(value.hex(),), lengths=(1,))
    assert float.fromhex(point.returns[0]).hex() == value.hex()


@pytest.mark.parametrize(
    "text", ["500", "abc", "", "1.5", "0x2p+0", "0X1P+0", " 0x1p+0", "0x1p+0\n", "0x1p0", "-nan"]
)
def test_a_number_in_another_form_is_refused(text):
    with pytest.raises(ValidationError):
        EvaluationPoint(step=1, returns=(text,), lengths=(1,))
