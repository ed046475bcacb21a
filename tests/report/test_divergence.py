"""The first difference of two runs on a terminal."""

import pytest

from capsule.report.divergence import divergence_lines, show_divergence, show_lines
from capsule.verification.verdict import (
    Bisection,
    Cause,
    ComponentDifference,
    Divergence,
    DivergenceMap,
    Explanation,
    NumberDifference,
    OperatorDivergence,
    OperatorInvocation,
    TensorDifference,
    TraceDifference,
)
from tests.report.terminals import printed

FIRST = TraceDifference(
    step=1200, component="loss", name="td", claimed="0x1p0", found="0x1p1", also=("gradients", "q")
)


def lines(*, equal=False, **facts):
    return list(divergence_lines(Divergence(a="a", b="b", equal=equal, **facts)))


def test_equal_runs_have_one_line():
    compared = DivergenceMap(steps=12_000, components={"loss": ()})
    expected = [("trace", "equal, record by record, up to step 12,000")]
    assert lines(equal=True, map=compared) == expected


def test_outputs_without_a_trace_have_no_place():
    assert lines(equal=True) == []


def test_the_first_difference_has_its_place_both_values_and_what_was_equal_before():
    assert lines(first=FIRST, equal_until={"observations": 1100, "loss": None}) == [
        ("first difference", "step 1,200, loss, td"),
        ("", "0x1p0 / 0x1p1"),
        ("", "and in the same record gradients, q"),
        ("equal until step", "observations 1,100, loss not at all"),
    ]


def test_causes_have_their_evidence_and_their_remedy():
    causes = (
        Cause(name="arithmetic", certainty="likely", evidence=("one", "two"), fix="Use portable."),
        Cause(name="unexplained", certainty=None, evidence=()),
    )
    assert lines(causes=causes) == [
        ("cause", "arithmetic (likely)"),
        ("fix", "Use portable."),
        ("evidence", "- one"),
        ("", "- two"),
        ("cause", "unexplained"),
    ]


@pytest.mark.parametrize(
    ("a", "b", "ulp", "relative", "expected"),
    [
        ("0x1.8p+0", "0x1.0p+1", 4_194_304, 0.25, "1.5 / 2.0, 4,194,304 ulp, relative 0.25"),
        ("0x0.0p+0", "inf", 7, None, "0.0 / inf, 7 ulp"),
        ("nan", "0x1.0p+0", None, None, "nan / 1.0"),
    ],
)
def test_two_numbers_are_shown_with_their_distance(a, b, ulp, relative, expected):
    number = NumberDifference(what="loss at step 8", a=a, b=b, ulp=ulp, relative=relative)
    assert lines(numbers=(number,)) == [("distance", f"loss at step 8: {expected}")]


def tensor(number, **facts):
    return TensorDifference(name=f"w{number}", **{"elements": 2000, "differing": 500, **facts})


def test_tensors_are_shown_with_the_share_and_the_size_of_their_differences():
    tensors = (
        tensor(0, ulp=1234, relative=0.001),
        tensor(1, nonfinite=2, ulp=1),
        tensor(2, elements=0, differing=0),
        tensor(3),
    )
    assert lines(checkpoint=4000, tensors=tensors) == [
        ("checkpoint", "step 4,000: 4 tensors differ"),
        ("", "w0: 25 % of 2,000 elements, up to 1,234 ulp, relative 0.001"),
        ("", "w1: 25 % of 2,000 elements, up to 1 ulp, 2 not finite"),
        ("", "w2: 0 % of 0 elements, not comparable"),
    ]


def test_a_checkpoint_may_be_equal():
    assert lines(checkpoint=4000) == [("checkpoint", "step 4,000: every tensor is equal")]


@pytest.mark.parametrize(("number", "rest"), [(3, []), (5, [("", "and 2 more results")])])
def test_the_first_results_that_differ_are_shown(number, rest):
    differences = tuple(
        ComponentDifference(component=f"c{n}", claimed="1", found="2") for n in range(number)
    )
    shown = [("differs", f"c{n}: 1 / 2") for n in range(3)]
    assert lines(differences=differences) == shown + rest


def test_differences_of_the_locks_explain_only_runs_that_differ():
    explanations = tuple(
        Explanation(what=f"pin {n}", a="1", b="2", why="it may matter") for n in range(8)
    )
    found = lines(explanations=explanations)
    assert found[0] == ("possible reason", "pin 0: 1 / 2; it may matter")
    assert len(found) == 6 + 1
    assert found[-1] == ("", "and 2 more differences of pins or machines")
    assert lines(equal=True, explanations=explanations) == []


def test_a_difference_that_cannot_matter_is_no_possible_reason():
    kernel = Explanation(what="kernel", a="6.1", b="6.12", why="no effect", matters=False)
    assert lines(explanations=(kernel,)) == [("not a reason", "kernel: 6.1 / 6.12; no effect")]


# --- the exact place ----------------------------------------------------------------------------


def invocation(operator="aten::add", where="train.py:3", **arguments):
    return OperatorInvocation(operator=operator, where=where, arguments=arguments)


def exact(a=None, b=None, **facts):
    """Return the lines of the operator that differs first."""
    usual = {"step": 1201, "call": 1234, "same_inputs": True, "elements": 4000, "differing": 1000}
    a = a or invocation()
    operator = OperatorDivergence(**{**usual, "ulp": 2, "a": a, "b": b or a, **facts})
    bisection = Bisection(step=1201, component="gradients", name="w", operator=operator)
    found = lines(first=FIRST, bisection=bisection)
    assert ("exact place", "in the update that ends at step 1,201: gradients, w") in found
    return found[5:]


def test_an_operator_that_differs_is_shown_with_its_line_and_its_distance():
    assert exact() == [
        ("operator", "call 1,234 in this update: aten::add at train.py:3"),
        ("", "1,000 of 4,000 elements differ, up to 2 ulp apart; equal inputs"),
    ]
    assert exact(ulp=None, same_inputs=False)[-1] == (
        "",
        "1,000 of 4,000 elements differ, not comparable; different inputs",
    )


def test_arguments_that_differ_are_shown():
    found = exact(invocation(alpha="1", beta="2"), invocation(alpha="1", beta="3"))
    assert found[1] == ("", "argument beta: 2 / 3")
    assert not any("alpha" in text for _, text in found)


def test_an_argument_of_one_side_is_absent_on_the_other():
    assert exact(invocation(alpha="1"), invocation())[1] == ("", "argument alpha: 1 / absent")
    assert exact(invocation(), invocation(alpha="1"))[1] == ("", "argument alpha: absent / 1")


def test_the_line_of_a_call_may_be_unknown():
    assert exact(invocation(where=None), invocation())[:2] == [
        ("operator", "call 1,234 in this update: aten::add at an unknown line"),
        ("", "b calls aten::add at train.py:3"),
    ]


def test_one_thing_is_written_in_the_singular():
    assert exact(elements=1, differing=1)[-1] == (
        "",
        "1 of 1 element differs, up to 2 ulp apart; equal inputs",
    )
    found = lines(checkpoint=4000, tensors=(tensor(0, elements=1, differing=1, ulp=1),))
    assert found == [
        ("checkpoint", "step 4,000: 1 tensor differs"),
        ("", "w0: 100 % of 1 element, up to 1 ulp"),
    ]
    differences = tuple(
        ComponentDifference(component=f"c{n}", claimed="1", found="2") for n in range(4)
    )
    assert lines(differences=differences)[-1] == ("", "and 1 more result")
    explanations = tuple(Explanation(what=f"pin {n}", a="1", b="2", why="y") for n in range(7))
    assert lines(explanations=explanations)[-1] == ("", "and 1 more difference of pins or machines")


def test_other_operators_have_no_distance():
    assert exact(invocation(), invocation("aten::mul", "train.py:4")) == [
        ("operator", "call 1,234 in this update: aten::add at train.py:3"),
        ("", "b calls aten::mul at train.py:4"),
        ("", "from here on the two runs execute different operators"),
    ]


def test_a_difference_without_an_operator_comes_from_outside():
    bisection = Bisection(step=1201, component="gradients")
    place, reason = lines(first=FIRST, bisection=bisection)[4:]
    assert place == ("exact place", "in the update that ends at step 1,201: gradients")
    assert "the difference comes from outside torch" in reason[1]


# --- the terminal -------------------------------------------------------------------------------


@pytest.mark.parametrize(("equal", "result"), [(True, "equal, bit for bit"), (False, "different")])
def test_an_analysis_begins_with_the_two_runs_and_ends_with_the_result(equal, result):
    found = Divergence(a="one.tar", b="two", equal=equal, first=None if equal else FIRST)
    text = printed(show_divergence, found, width=60).splitlines()
    assert text[:2] == ["a                one.tar", "b                two"]
    assert text[-1] == f"result           {result}"
    assert (len(text) > 3) == (not equal)


def test_lines_are_neither_wrapped_nor_markup_nor_padded_and_steer_nothing():
    long = "word " * 30 + "end"
    lines = [("label", long), ("", "[bold]x[/bold]\x1b[31m"), ("empty", "")]
    text = printed(show_lines, lines, width=60)
    assert text.splitlines() == [
        f"label            {long}",
        "                 [bold]x[/bold]\N{REPLACEMENT CHARACTER}[31m",
        "empty",
    ]
