"""The arrival log: one order of arrival, one document; nothing of a stranger's is believed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment import arrival_log
from capsule.experiment.arrival_log import (
    NOTHING,
    ArrivalLog,
    Completions,
    Messages,
    parse_arrivals,
)
from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode

LOG = ArrivalLog(
    waits={
        "0x/0~1": Completions(tasks=3, order=(2, 0)),
        "mail~1": Messages(sources=("b", "a"), order=(0, NOTHING, 1, 0)),
    }
)


@st.composite
def completions(draw):
    tasks = draw(st.integers(0, 20))
    order = draw(st.permutations(range(tasks)))[: draw(st.integers(0, tasks))]
    return Completions(tasks=draw(st.sampled_from((tasks, None))), order=tuple(order))


@st.composite
def messages(draw):
    senders = draw(st.lists(st.sampled_from((None, "a", "b", "agent 3", "ü"))))
    sources = [sender for sender in dict.fromkeys(senders) if sender is not None]
    order = (NOTHING if sender is None else sources.index(sender) for sender in senders)
    return Messages(sources=tuple(sources), order=tuple(order))


WAITS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    completions() | messages(),
    min_size=1,
    max_size=5,
)


@given(WAITS)
def test_a_log_is_read_back_from_its_only_document(waits):
    log = ArrivalLog(waits=waits)
    assert parse_arrivals(log.document()) == log
    assert parse_arrivals(log.document()).document() == log.document()


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_with_a_code(data):
    assert refused(data)


def test_arrivals_are_counted_without_the_moments_at_which_nothing_came():
    assert LOG.arrivals == 5


def refused(data):
    with pytest.raises(CapsuleError) as caught:
        parse_arrivals(data)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-T385", ExitCode.TAMPERED)
    return caught.value.message


@pytest.mark.parametrize(
    ("wait", "reason"),
    [
        ({"kind": "completions", "tasks": 3, "order": [0, 0]}, "completes twice"),
        ({"kind": "completions", "tasks": 3, "order": [3]}, "not one of the 3"),
        ({"kind": "completions", "tasks": None, "order": [-1]}, ""),
        ({"kind": "completions", "tasks": 3, "order": [True]}, ""),
        ({"kind": "messages", "sources": ["a", "a"], "order": [0, 1]}, "listed twice"),
        ({"kind": "messages", "sources": ["a"], "order": []}, "first arrival"),
        ({"kind": "messages", "sources": ["a", "b"], "order": [1, 0]}, "first arrival"),
        ({"kind": "messages", "sources": [], "order": [0]}, "first arrival"),
        ({"kind": "messages", "sources": ["a"], "order": [0, -2]}, ""),
        ({"kind": "messages", "sources": ["a" * 501], "order": [0]}, ""),
        ({"kind": "other", "order": []}, ""),
    ],
)
def test_what_no_run_can_have_recorded_is_refused(wait, reason):
    document = {"schema": "capsule/arrivals/v1", "waits": {"w": wait}}
    with pytest.raises(CapsuleError) as caught:
        parse_arrivals(canonical_json(document))
    assert reason in str(caught.value.__cause__)


def test_other_writings_of_a_log_and_empty_ones_are_refused():
    data = LOG.document()
    assert "canonical" in refused(data.replace(b",", b", ", 1))
    assert "canonical" in refused(data + b"\n")
    refused(b'{"schema":"capsule/arrivals/v1","waits":{}}')
    refused(data.replace(b"/v1", b"/v2"))


def test_a_log_of_any_size_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(arrival_log, "MAX_LOG_BYTES", 100)
    assert "more than 100 bytes" in refused(LOG.document())


# --- a repetition that ends -----------------------------------------------------------------------

MAIL = Messages(sources=("a",), order=(0, 0))
PUTS = Messages(sources=("a",), order=(0, NOTHING, 0, NOTHING))
RECORDED = ArrivalLog(waits={"mail~1": MAIL, "mail~1 cancellations of a": PUTS})


@pytest.mark.parametrize("made", [(), (0,), (0, NOTHING), PUTS.order])
def test_a_repetition_may_make_fewer_of_the_last_attempts(made):
    waits = {"mail~1": MAIL}
    if made:
        waits["mail~1 cancellations of a"] = Messages(sources=("a",), order=made)
    assert ArrivalLog(waits=waits).repeats(RECORDED)


@pytest.mark.parametrize(
    "waits",
    [
        {"mail~1 cancellations of a": PUTS},
        {"mail~1": Messages(sources=("a",), order=(0,)), "mail~1 cancellations of a": PUTS},
        {"mail~1": MAIL, "mail~1 cancellations of a": Messages(sources=("a",), order=(0, 0))},
        {"mail~1": MAIL, "mail~1 cancellations of b": PUTS},
        {"mail~1": MAIL, "mail~2": MAIL},
    ],
    ids=["no message", "fewer messages", "another attempt", "another source", "another wait"],
)
def test_everything_else_is_another_order(waits):
    assert not ArrivalLog(waits=waits).repeats(RECORDED)


def test_more_attempts_than_were_recorded_are_another_order():
    waits = {"mail~1": MAIL, "mail~1 cancellations of a": Messages(sources=(), order=(NOTHING,))}
    assert not RECORDED.repeats(ArrivalLog(waits=waits))
