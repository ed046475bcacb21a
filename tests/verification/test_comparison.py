"""Comparing claims and traces, on hand-made cases."""

import json
import shutil

import pytest

from capsule.bundle.claims import CheckpointClaim, ProgramClaims, TraceClaim, TrainingClaims
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.contract import (
    WORKSPACE,
    Checkpoint,
    CheckpointIndex,
    Evaluation,
    EvaluationPoint,
    Output,
)
from capsule.verification.comparison import (
    MAX_DIFFERENCES,
    STANDARD_OUTPUT,
    compare_checkpoints,
    compare_claims,
    compare_outputs,
    compare_traces,
)

ZERO, ONE = "0" * 64, "1" * 64


def make_claims(**changes):
    facts = {
        "lock": ZERO,
        "image": None,
        "relaxations": (),
        "flags": {"threads": "1"},
        "libraries": {"torch": "2.13.0"},
        "streams": (),
        "trace": TraceClaim(records=2, head=ZERO),
        "checkpoints": (CheckpointClaim(step=4, digest=ZERO),),
        "evaluation": Evaluation(
            starts=((0, 1),), points=(EvaluationPoint(step=4, returns=("0x0p+0",), lengths=(3,)),)
        ),
        "steps": 8,
        "episodes": 1,
        "parameters": ZERO,
    }
    return TrainingClaims(**(facts | changes))


def test_equal_claims_have_no_differences_and_one_id():
    assert compare_claims(make_claims(), make_claims()) == ()
    assert make_claims().claim_id() == make_claims().claim_id()


def test_differences_are_named_by_path_with_causes_first():
    other = make_claims(
        parameters=ONE,
        flags={"threads": "2"},
        checkpoints=(CheckpointClaim(step=4, digest=ONE),),
        steps=12,
    )
    found = compare_claims(make_claims(), other)
    assert [item.component for item in found] == [
        "flags.threads",
        "checkpoints[0].digest",
        "parameters",
        "steps",
    ]
    assert (found[0].claimed, found[0].found) == ("1", "2")


def test_a_missing_fact_and_another_length_are_differences():
    other = make_claims(libraries={}, checkpoints=())
    components = [item.component for item in compare_claims(make_claims(), other)]
    assert components == ["libraries.torch", "checkpoints"]


def test_the_list_of_differences_is_bounded():
    many = make_claims(libraries={f"library-{n}": "1" for n in range(200)})
    assert len(compare_claims(make_claims(), many)) == MAX_DIFFERENCES


def checkpoint(step, digest):
    return Checkpoint(step=step, tensors={"w": digest}, trace_head=ZERO)


def test_a_prefix_compares_the_checkpoints_up_to_its_end():
    made = [checkpoint(4, ZERO), checkpoint(8, ZERO)]
    claimed = tuple(CheckpointClaim(step=item.step, digest=item.digest()) for item in made)
    shorter = CheckpointIndex(checkpoints=(made[0],))
    assert compare_checkpoints(claimed, shorter, 4) == ()
    assert compare_checkpoints(claimed, shorter, 8)[0].found == "missing"
    other = CheckpointIndex(checkpoints=(checkpoint(4, ONE),))
    assert compare_checkpoints(claimed, other, 4)[0].component == "checkpoints.4"


def write(path, records):
    path.write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in records))
    return path


def test_the_first_differing_record_and_component_are_found(tmp_path):
    records = [
        {"step": step, "streams": "s", "observations": "o", "actions": "a", "loss": "l"}
        for step in (4, 8, 12)
    ]
    left = write(tmp_path / "left", records)
    changed = [dict(record) for record in records]
    changed[1] |= {"loss": "other", "actions": "other"}
    right = write(tmp_path / "right", changed)
    first = compare_traces(left, right, prefix=False)
    assert (first.step, first.component, first.claimed, first.found) == (8, "actions", "a", "other")
    assert first.also == ("loss",)
    assert compare_traces(left, left, prefix=False) is None


def test_only_a_prefix_may_end_early(tmp_path):
    records = [{"step": step, "streams": "s"} for step in (4, 8)]
    whole, part = write(tmp_path / "whole", records), write(tmp_path / "part", records[:1])
    assert compare_traces(whole, part, prefix=True) is None
    assert compare_traces(whole, part, prefix=False).component == "end"


def make_output(folder, path, data):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(data)
    return Output(size=len(data), sha256=sha256_hex(data))


@pytest.fixture
def two_runs(tmp_path):
    """Compare a recorded run with another, both given as files and standard output."""

    def compare(recorded_files, found_files, printed=(b"", b"")):
        recorded, directory = tmp_path / "recorded", tmp_path / "again"
        claims = []
        for files, text, folder, output in (
            (recorded_files, printed[0], recorded, "stdout.txt"),
            (found_files, printed[1], directory / WORKSPACE, "../stdout.txt"),
        ):
            claims.append(
                ProgramClaims(
                    lock=ZERO,
                    image=None,
                    relaxations=(),
                    flags={},
                    libraries={},
                    outputs={path: make_output(folder, path, data) for path, data in files.items()},
                    standard_output=make_output(folder, output, text),
                )
            )
        members = {path: recorded / path for path in recorded_files}
        members[STANDARD_OUTPUT] = recorded / "stdout.txt"
        return compare_outputs(*claims, members, directory), compare_claims(*claims)

    return compare


def test_equal_outputs_do_not_differ(two_runs):
    assert two_runs({"a": b"1"}, {"a": b"1"}) == (None, ())


def test_the_first_file_and_line_that_differ_are_named(two_runs):
    first, all_of_them = two_runs(
        {"b.jsonl": b"1\n2\n3\n", "c": b"x", "a": b"="},
        {"b.jsonl": b"1\n2\n4\n", "c": b"y", "a": b"="},
        printed=(b"p", b"q"),
    )
    assert (first.path, first.line, first.claimed, first.found) == ("b.jsonl", 3, "3", "4")
    assert [item.component for item in all_of_them] == [
        "outputs.b.jsonl.sha256",
        "outputs.c.sha256",
        "standard_output.sha256",
    ]


def test_a_shorter_text_differs_where_it_ends(two_runs):
    first, _ = two_runs({"a": b"1\n2\n"}, {"a": b"1\n"})
    assert (first.line, first.claimed, first.found) == (2, "2", "end of file")


def test_bytes_that_are_no_text_have_no_line(two_runs):
    for data in (b"\xff\n", b"\0\n"):
        first, _ = two_runs({"a": data + b"1"}, {"a": data + b"2"})
        assert (first.path, first.line) == ("a", None)
        assert first.claimed.startswith(f"{len(data) + 1} bytes, sha256:")


def test_a_missing_and_an_additional_file_are_named(two_runs):
    first, _ = two_runs({"a": b"", "b": b""}, {"b": b""})
    assert (first.path, first.found) == ("a", "missing")
    first, _ = two_runs({"b": b""}, {"a": b"", "b": b""})
    assert (first.path, first.claimed) == ("a", "missing")


def test_what_was_printed_comes_last(two_runs):
    first, _ = two_runs({"z": b"="}, {"z": b"="}, printed=(b"1\nlast\n", b"1\nend\n"))
    assert (first.path, first.line, first.claimed) == ("standard output", 2, "last")


@pytest.mark.parametrize("link", ["a", "folder"])
def test_a_file_of_the_machine_never_ends_up_in_a_report(two_runs, tmp_path, link):
    """A program says that it wrote a file, and leaves a link to one that only the machine has."""
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine/a").write_text("secret")
    path = "a" if link == "a" else "folder/a"
    two_runs({path: b"claimed"}, {path: b"secret"})
    workspace = tmp_path / "again" / WORKSPACE
    if link == "a":
        (workspace / "a").unlink()
        (workspace / "a").symlink_to(tmp_path / "machine/a")
    else:
        shutil.rmtree(workspace / "folder")
        (workspace / "folder").symlink_to(tmp_path / "machine")
    left, right = (make_program_claims({path: data}) for data in (b"claimed", b"secret"))
    recorded = {path: tmp_path / "recorded" / path}
    first = compare_outputs(left, right, recorded, tmp_path / "again")
    assert (first.path, first.line) == (path, None)
    assert "secret" not in first.found


def test_namespaces_that_one_machine_lacks_contradict_no_claim():
    left, right = (make_claims(relaxations=names) for names in ((), ("engine.namespaces=none",)))
    assert compare_claims(left, right) == compare_claims(right, left) == ()
    (difference,) = compare_claims(left, make_claims(relaxations=("engine=process",)))
    assert difference.component.startswith("relaxations")


def make_program_claims(files):
    outputs = {
        path: Output(size=len(data), sha256=sha256_hex(data)) for path, data in files.items()
    }
    return ProgramClaims(
        lock=ZERO,
        image=None,
        relaxations=(),
        flags={},
        libraries={},
        outputs=outputs,
        standard_output=None,
    )
