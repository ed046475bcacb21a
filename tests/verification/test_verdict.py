"""The report of a verification: its exit status, its parts, and its form as a document."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from capsule.experiment.canonical import parse_canonical_json
from capsule.experiment.errors import ExitCode
from capsule.verification.content.parts import Comparison, Part
from capsule.verification.verdict import (
    Cause,
    Challenge,
    ComponentDifference,
    Divergence,
    DivergenceMap,
    OutputComparison,
    OutputDifference,
    ReexecutedSegment,
    Report,
    RunSurroundings,
    TraceDifference,
)

FACTS = {"bundle": "b", "mode": "full", "verdict": "intact", "summary": "s"}

# docs/grades.md and docs/verify.md: 0 what was asked for, 1 differs, 3 tampered or untrusted,
# 4 inconclusive.
STATUS = {
    "tampered": 3,
    "untrusted": 3,
    "not-reproduced": 1,
    "inconclusive": 4,
    "intact": 0,
    "environment-matches": 0,
    "reproduced-prefix": 0,
    "reproduced-segments": 0,
    "answers-fresh-seed": 0,
    "reproduced-bitwise": 0,
}


def test_the_exit_status_is_of_the_grade_that_was_asked_for():
    facts = {"bundle": "b", "mode": "full", "verdict": "reproduced-statistical", "summary": "s"}
    assert Report(**facts).exit_code == ExitCode.DIFFERS
    assert Report(**facts, required="bitwise").exit_code == ExitCode.DIFFERS
    assert Report(**facts, required="statistical").exit_code == ExitCode.OK
    better = facts | {"verdict": "reproduced-bitwise"}
    assert Report(**better, required="statistical").exit_code == ExitCode.OK


@pytest.mark.parametrize("required", ["bitwise", "content", "statistical"])
@pytest.mark.parametrize("verdict", STATUS)
def test_most_verdicts_have_one_exit_status_whatever_is_required(verdict, required):
    report = Report(**FACTS | {"verdict": verdict, "required": required})
    assert report.exit_code == STATUS[verdict]


STRENGTH = ["statistical", "content", "bitwise"]


@given(st.sampled_from(STRENGTH), st.sampled_from(STRENGTH))
def test_a_grade_is_accepted_if_it_is_as_strong_as_the_required_one(found, required):
    report = Report(**FACTS | {"verdict": f"reproduced-{found}", "required": required})
    accepted = STRENGTH.index(found) >= STRENGTH.index(required)
    assert report.exit_code == (ExitCode.OK if accepted else ExitCode.DIFFERS)


# --- documents ------------------------------------------------------------------------------------


def full_report():
    part = Part(where="line 2", claimed="1", found="2")
    content = Comparison(format="text", parts=(part,), count=1, nature="content")
    output = OutputDifference(path="a", claimed="1", found="2", content=content)
    first = TraceDifference(step=8, component="loss", claimed="1", found="2", also=("gradient",))
    segment = ReexecutedSegment(begins=0, ends=8, equal=False, first_difference=first)
    divergence = Divergence(
        a="a",
        b="b",
        equal=False,
        first=first,
        equal_until={"loss": 4, "actions": None},
        map=DivergenceMap(steps=8, components={"loss": ((8, 8),), "actions": ()}),
        causes=(Cause(name="arithmetic", certainty="likely", evidence=("x",)),),
    )
    return Report(
        **FACTS | {"verdict": "not-reproduced"},
        first_difference=output,
        outputs=OutputComparison(count=1, nature="content", files=(output,)),
        differences=(ComponentDifference(component="c", claimed="1", found="2"),),
        divergence=divergence,
        challenge=Challenge(chosen="all", of=1, segments=(segment,), undetected=0.0),
        seconds=1.5,
    )


@pytest.mark.parametrize("report", [Report(**FACTS), full_report()], ids=["short", "full"])
def test_a_report_is_read_as_it_was_written(report):
    document = report.document()
    assert Report.parse(document) == report
    assert parse_canonical_json(document)["schema"] == "capsule/verify-report/v1"


def test_a_divergence_is_a_document_of_its_own():
    divergence = full_report().divergence
    assert Divergence.parse(divergence.document()) == divergence
    assert json.loads(divergence.document())["schema"] == "capsule/divergence/v1"


def test_both_kinds_of_a_first_difference_are_told_apart_when_read():
    report = full_report()
    in_trace = report.model_copy(update={"first_difference": report.divergence.first})
    for each, kind in ((report, OutputDifference), (in_trace, TraceDifference)):
        assert type(Report.parse(each.document()).first_difference) is kind


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "reproduced"},
        {"required": "prefix"},
        {"image_source": "docker"},
        {"seconds": "1"},
        {"more": 1},
        {"schema": "capsule/verify-report/v2"},
    ],
)
def test_a_report_with_another_field_or_value_is_rejected(change):
    with pytest.raises(ValidationError, match=next(iter(change))):
        Report(**FACTS | change)


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("equal", "status"), [(True, ExitCode.OK), (False, ExitCode.DIFFERS)])
def test_the_exit_status_of_a_divergence(equal, status):
    assert Divergence(a="a", b="b", equal=equal).exit_code == status


@given(st.lists(st.booleans(), max_size=6))
def test_the_first_segment_that_differs_is_found(equals):
    segments = tuple(
        ReexecutedSegment(begins=number, ends=number + 1, equal=equal)
        for number, equal in enumerate(equals)
    )
    challenge = Challenge(chosen="all", of=6, segments=segments, undetected=0.0)
    found = challenge.first_unequal
    assert (None if found is None else found.begins) == (
        equals.index(False) if False in equals else None
    )


def test_an_output_is_named_with_its_first_part():
    assert full_report().first_difference.where == "line 2"
    whole = Part(where="", claimed="1", found="2")
    content = Comparison(format="bytes", parts=(whole,), count=1, nature="content")
    facts = {"path": "a", "claimed": "1", "found": "2"}
    assert OutputDifference(**facts, content=content).where is None
    assert OutputDifference(**facts).where is None


def test_a_cause_is_shown_with_its_certainty():
    assert Cause(name="clock", certainty="shown", evidence=()).shown == "clock (shown)"
    assert Cause(name="unexplained", certainty=None, evidence=()).shown == "unexplained"


def surroundings(**changes):
    facts = {
        "locale": "C",
        "timezone": "UTC +0000",
        "hostname": "h",
        "processors": "0-2,5",
        "told": 4,
        "threads": "1",
        "processes": 1,
    }
    return RunSurroundings(**facts | changes)


@pytest.mark.parametrize(
    ("processors", "usable"), [("0", 1), ("0-2,5", 4), ("3,7,9-10", 4), ("0-63", 64)]
)
def test_the_usable_processors_are_counted(processors, usable):
    assert surroundings(processors=processors).processor_count == f"{usable} usable, 4 reported"


@pytest.mark.parametrize("told", [0, -1])
def test_no_machine_reports_less_than_one_processor(told):
    with pytest.raises(ValidationError, match="told"):
        surroundings(told=told)
