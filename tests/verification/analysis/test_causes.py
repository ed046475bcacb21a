"""The rules for classes of causes on made-up facts, and the comparison of dense records."""

import json
from typing import get_args

import pytest

from capsule.experiment.dense import is_dense, read_updates
from capsule.experiment.errors import CapsuleError
from capsule.experiment.trace import Difference
from capsule.verification.analysis.bisection import compare_dense
from capsule.verification.analysis.causes import Facts, explain
from capsule.verification.analysis.pin_differences import OWN_ORDER, Change, Kind
from capsule.verification.analysis.trace_alignment import TraceAlignment
from capsule.verification.content.ulp import distance
from capsule.verification.verdict import (
    Bisection,
    ComponentDifference,
    OperatorDivergence,
    OperatorInvocation,
)


def parting(component, *also, step=40, last_equal=36):
    return TraceAlignment(
        first=Difference(step, component, None, "a", "b", also), last_equal=last_equal
    )


def change(kind, what="something"):
    return Change(kind, what, "1", "2")


def name(alignment, *changes, **facts):
    """Return the classes that are named, the most likely first, and how certain they are."""
    given = {"results": (), **facts}
    causes = explain(Facts(alignment=alignment, changes=changes, **given))
    return [(cause.name, cause.certainty) for cause in causes]


def test_equal_actions_and_other_observations_are_the_environments():
    found = name(parting("observations", "rewards", "loss"))
    assert found == [("environment-dynamics", "shown")]
    found = name(parting("streams", "observations"), change("code"))
    assert found == [("environment-dynamics", "shown"), ("changed-code-or-library", "possible")]


def test_other_actions_beside_other_observations_leave_it_open():
    mixed = parting("observations", "actions", "loss")
    assert name(mixed) == [("environment-dynamics", "possible")]
    found = name(mixed, change("numerics"))
    assert found == [("environment-dynamics", "possible"), ("arithmetic", "possible")]
    assert name(mixed, change("environment"))[0] == ("environment-dynamics", "likely")


def test_a_seed_explains_what_a_changed_environment_would():
    found = name(parting("streams", "observations"), change("seed"), change("environment"))
    assert found == [("other-seed", "shown")]


def test_rounding_tells_arithmetic_from_another_program():
    small, large = distance(1.0, 1.0 + 2e-7, 32), distance(1.0, 1.5, 32)
    both = change("machine"), change("code")
    assert name(parting("loss"), change("machine"), loss=small) == [("arithmetic", "likely")]
    assert name(parting("loss"), *both, loss=large) == [("changed-code-or-library", "likely")]
    found = name(parting("loss"), *both, loss=small)
    assert found == [("arithmetic", "possible"), ("changed-code-or-library", "possible")]


def test_an_operator_with_equal_inputs_and_arguments_shows_arithmetic():
    call = OperatorInvocation(operator="aten::addmm", where="capsule/training/x.py:1", arguments={})
    operator = OperatorDivergence(
        step=40, call=3, a=call, b=call, same_inputs=True, elements=4, differing=1, ulp=1
    )
    found = Bisection(step=40, component="gradient", operator=operator)
    assert name(parting("loss"), bisection=found) == [("arithmetic", "shown")]
    floor = call.model_copy(update={"arguments": {"floor": "0.015"}})
    other = found.model_copy(update={"operator": operator.model_copy(update={"b": floor})})
    assert name(parting("loss"), change("code"), bisection=other) == [
        ("changed-code-or-library", "likely")
    ]


def test_what_was_asked_for_comes_before_how_it_was_computed():
    found = name(parting("loss"), change("settings"), change("library"))
    assert found == [("other-settings", "likely"), ("changed-code-or-library", "possible")]


EQUAL = TraceAlignment(records=9, steps=36)
JUDGED = (ComponentDifference(component="evaluation.points[0]", claimed="1", found="2"),)
LEARNED = (ComponentDifference(component="checkpoints[0].digest", claimed="1", found="2"),)
LONE = TraceAlignment(
    first=Difference(4, "optimizer", "w", "1", "2"),
    intervals={"optimizer": [(4, 4)]},
    records=9,
    differing=1,
    reconverged=True,
)


@pytest.mark.parametrize(("alignment", "results"), [(EQUAL, JUDGED), (EQUAL, LEARNED), (LONE, ())])
def test_only_without_any_honest_reason_may_results_have_been_changed(alignment, results):
    (cause,) = explain(Facts(alignment=alignment, results=results, changes=(change("recording"),)))
    assert (cause.name, cause.certainty) == ("tampering", "possible")
    assert "or the run does not repeat itself" in cause.evidence[-1]
    for kind in set(get_args(Kind)) - {"recording"}:
        named = name(alignment, change(kind), results=results)
        assert "tampering" not in dict(named), kind
    named = name(alignment, results=results, circumstances=("the machine of a is not known",))
    assert named == [("unexplained", None)]


@pytest.mark.parametrize(
    ("kind", "class_"), [("machine", "arithmetic"), ("library", "changed-code-or-library")]
)
def test_results_that_are_in_no_trace_may_be_computed_otherwise(kind, class_):
    assert name(EQUAL, change(kind), results=JUDGED) == [(class_, "possible")]


def test_results_of_neither_kind_are_not_explained():
    outside = (ComponentDifference(component="flags.threads", claimed="1", found="2"),)
    assert name(EQUAL, results=outside) == [("unexplained", None)]
    # Traces without a common record show nothing.
    assert name(TraceAlignment(), results=LEARNED) == [("unexplained", None)]


def test_what_honest_runs_may_differ_in_is_said():
    facts = Facts(parting("loss"), (), (), circumstances=("a was resumed", "b was resumed"))
    (cause,) = explain(facts)
    said = "two honest runs may differ: a was resumed; b was resumed; 'capsule diagnose'"
    assert cause.evidence[-1].startswith(said)


def test_two_runs_that_recorded_their_orders_may_have_two():
    (cause,) = explain(Facts(parting("schedule"), (), (), circumstances=(OWN_ORDER, "other")))
    assert (cause.name, cause.evidence[-1]) == ("actor-order", OWN_ORDER)


def test_the_same_facts_in_another_spelling_are_no_lone_records():
    spelt = TraceAlignment(first=Difference(4, "format", None, None, None), reconverged=True)
    assert name(spelt) == [("unexplained", None)]


def test_without_evidence_nothing_is_named():
    assert name(parting("loss")) == [("unexplained", None)]
    assert name(None, change("code")) == [("unexplained", None)]


HEADER = {"schema": "capsule/dense/v1", "spec": "0" * 64, "first": 4, "last": 8}


def dense(path, *lines):
    path.write_text("".join(json.dumps(x, separators=(",", ":")) + "\n" for x in (HEADER, *lines)))
    return path


def call(operator, digest, data=None, inputs=("in",)):
    result = {"dtype": "float32", "shape": [1], "digest": digest, "data": data}
    return {
        "operator": operator,
        "where": "x.py:1",
        "arguments": {},
        "inputs": list(inputs),
        "results": [result],
    }


def test_dense_records_are_compared_update_by_update(tmp_path):
    one, other = "AACAPw==", "AQCAPw=="  # 1.0 and the next float32
    same = {"step": 4, "loss": "l"}
    a = dense(tmp_path / "a", call("f", "1"), same, call("g", "2", one), {"step": 8, "loss": "l"})
    b = dense(tmp_path / "b", call("f", "1"), same, call("g", "3", other), {"step": 8, "loss": "m"})
    assert is_dense(a)
    assert [update.record.step for update in read_updates(a)] == [4, 8]
    found, measured = compare_dense(a, b)
    assert measured
    assert (found.step, found.component, found.operator.call) == (8, "loss", 0)
    assert (found.operator.ulp, found.operator.differing, found.operator.same_inputs) == (
        1,
        1,
        True,
    )


@pytest.mark.parametrize("data", ["AAAA", "A", "\u00e9"])
def test_results_that_are_no_numbers_are_malformed(tmp_path, data):
    lines = [(call("f", digest, data), {"step": 4, "loss": digest}) for digest in ("1", "2")]
    a, b = (dense(tmp_path / name, *each) for name, each in zip("ab", lines, strict=True))
    with pytest.raises(CapsuleError) as caught:
        compare_dense(a, b)
    assert caught.value.code == "CAP-V074"


def test_copies_are_passed_over_where_the_sides_call_other_operators(tmp_path):
    a = dense(tmp_path / "a", call("clone", "in"), call("f", "1"), {"step": 4, "loss": "l"})
    b = dense(tmp_path / "b", call("g", "2"), {"step": 4, "loss": "m"})
    operator = compare_dense(a, b)[0].operator
    assert (operator.call, operator.a.operator, operator.b.operator) == (1, "f", "g")


def test_operators_that_only_follow_other_data_are_not_blamed(tmp_path):
    a = dense(tmp_path / "a", call("f", "1", inputs=["x"]), {"step": 4, "observations": "x"})
    b = dense(tmp_path / "b", call("f", "2", inputs=["y"]), {"step": 4, "observations": "y"})
    assert compare_dense(a, b)[0].operator is None


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["{}"], "CAP-V074"),
        (["[]"], "CAP-V074"),
        (['{"step":"4"}'], "CAP-V074"),
        (['{"operator":"f"}'], "CAP-V074"),
        (["[" * 10_000], "CAP-V074"),
        (['{"step":4}'], "CAP-V077"),
    ],
)
def test_malformed_and_equal_dense_records_are_refused(tmp_path, lines, code):
    path = tmp_path / "dense"
    path.write_text("\n".join([json.dumps(HEADER, separators=(",", ":")), *lines]) + "\n")
    with pytest.raises(CapsuleError) as caught:
        compare_dense(path, path)
    assert caught.value.code == code
