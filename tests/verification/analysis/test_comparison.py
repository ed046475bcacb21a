"""Comparing claims and traces, on hand-made cases."""

import json

import pytest

from capsule.bundle.claims import CheckpointClaim, ProgramClaims, TraceClaim, TrainingClaims
from capsule.experiment.contract import (
    Checkpoint,
    CheckpointIndex,
    Evaluation,
    EvaluationPoint,
)
from capsule.verification.analysis.comparison import (
    MAX_DIFFERENCES,
    ORDER,
    compare_checkpoints,
    compare_claims,
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


@pytest.mark.parametrize("claims", [TrainingClaims, ProgramClaims])
def test_every_claim_is_compared(claims):
    assert claims.model_fields.keys() - {*ORDER} == {"schema_id"}


@pytest.mark.parametrize("claim", [{"entropy_profile": ONE}, {"data": {"digits": ONE}}])
def test_a_replay_beyond_its_profile_and_other_data_are_differences(claim):
    (difference,) = compare_claims(make_claims(**claim), make_claims())
    assert difference.component in claim


def test_a_missing_fact_and_another_length_are_differences():
    other = make_claims(libraries={}, checkpoints=())
    components = [item.component for item in compare_claims(make_claims(), other)]
    assert components == ["libraries.torch", "checkpoints"]


def test_an_absent_value_has_a_word():
    """A claim may be null, and a name may be in one of the two claims only."""
    recorded = make_claims(entropy_profile=ONE, libraries={"torch": "2.13.0", "numpy": "2.4.0"})
    found = compare_claims(recorded, make_claims())
    assert [(each.component, each.claimed, each.found) for each in found] == [
        ("libraries.numpy", "2.4.0", "absent"),
        ("entropy_profile", ONE, "absent"),
    ]
    assert compare_claims(make_claims(), recorded)[0].claimed == "absent"


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
    assert compare_checkpoints(claimed, shorter, 8)[0].found == "absent"
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
    first = compare_traces(left, right)
    assert (first.step, first.component, first.claimed, first.found) == (8, "actions", "a", "other")
    assert first.also == ("loss",)
    assert compare_traces(left, left) is None


def test_a_trace_that_ends_early_differs(tmp_path):
    records = [{"step": step, "streams": "s"} for step in (4, 8)]
    whole, part = write(tmp_path / "whole", records), write(tmp_path / "part", records[:1])
    assert compare_traces(whole, part).component == "end"


def test_namespaces_that_one_machine_lacks_contradict_no_claim():
    left, right = (make_claims(relaxations=names) for names in ((), ("engine.namespaces=none",)))
    assert compare_claims(left, right) == compare_claims(right, left) == ()
    (difference,) = compare_claims(left, make_claims(relaxations=("engine=process",)))
    assert difference.component.startswith("relaxations")
