"""Rows on actors that ask for their actions: batches, seeds and routes of their requests."""

import pytest

from capsule.entropy.rows import requests
from tests.entropy.evidence import (
    TRAINER,
    answered,
    assert_changed,
    changed_rows,
    evidence_of,
    judged,
)

# A run, the same with a mechanism broken or missing, and the rows that change; None: no such row.
BROKEN = {
    "actors that are answered": (
        TRAINER,
        answered(),
        {
            "Batching of inference": "ordered",
            "Seeds of requests": "seeded",
            "Routing of requests": "ordered",
        },
    ),
    "actors that asked for nothing": (TRAINER, answered(requests=0, own_row=0, own_stream=0), {}),
    "batches as requests arrive": (
        answered(),
        answered(own_row=479),
        {"Batching of inference": "unsupported"},
    ),
    "batches of a fixed size without a test": (
        answered(),
        answered(tested_rows=0),
        {"Batching of inference": "unsupported"},
    ),
    "layers of independent rows": (
        answered(),
        answered(independent=True, own_row=0),
        {"Batching of inference": "eliminated"},
    ),
    "layers of independent rows without a test": (
        answered(),
        answered(independent=True, own_row=0, tested_rows=0),
        {"Batching of inference": "assumed"},
    ),
    "an action that was drawn otherwise": (
        answered(),
        answered(own_stream=479),
        {"Seeds of requests": "unsupported"},
    ),
    "a request that another replica answered": (
        answered(),
        answered(misrouted=1),
        {"Routing of requests": "unsupported"},
    ),
    "one replica": (answered(), answered(replicas=1), {"Routing of requests": "eliminated"}),
    "actors that are answered where they play": (
        answered(),
        answered(replicas=0),
        {"Routing of requests": None},
    ),
}


@pytest.mark.parametrize(("whole", "broken", "changes"), BROKEN.values(), ids=BROKEN)
def test_a_broken_mechanism_changes_its_rows_and_no_others(whole, broken, changes):
    assert_changed(whole, broken, changes)


def test_every_row_is_broken_by_some_case():
    assert {source.name for source in requests.SOURCES} - changed_rows(BROKEN) == set()


ROWS = ("Batching of inference", "Seeds of requests", "Routing of requests")


def test_trainers_whose_actors_make_no_requests_have_no_such_rows():
    assert judged(TRAINER).keys().isdisjoint(ROWS)
    assert judged(answered()).keys() >= {*ROWS}


@pytest.mark.parametrize(
    ("changes", "source", "said"),
    [
        ({}, ROWS[0], "each of 480 requests had the row of its actor in a batch of 16; 16 rows"),
        ({"own_row": 400}, ROWS[0], "80 of 480 requests were answered in batches as they arrived"),
        ({"independent": True}, ROWS[0], "independent rows answered 480 requests; 16 rows"),
        ({}, ROWS[1], "each of 480 actions was drawn from the stream of its request"),
        ({"own_stream": 470}, ROWS[1], "10 of 480 actions were not drawn from the stream"),
        ({}, ROWS[2], "480 requests were answered by the replica of their actor, one of 2"),
        ({"misrouted": 3}, ROWS[2], "3 of 480 requests were answered by another replica"),
        ({"replicas": 1}, ROWS[2], "one replica answered 480 requests"),
        ({"tested_rows": 1}, ROWS[0], "in a batch of 16; 1 row of a batch"),
        ({"own_row": 479, "tested_rows": 1}, ROWS[0], "1 of 480 requests was answered in batches"),
        ({"own_row": 479, "tested_rows": 1}, ROWS[0], "1 row was tested at the start"),
        ({"own_stream": 479}, ROWS[1], "1 of 480 actions was not drawn from the stream of its"),
        ({"misrouted": 1}, ROWS[2], "1 of 480 requests was answered by another replica than"),
        ({"requests": 1}, ROWS[2], "1 request was answered by the replica of its actor, one of 2"),
        ({"requests": 1, "replicas": 1}, ROWS[2], "one replica answered 1 request"),
    ],
)
def test_the_evidence_has_the_counts_of_the_actors(changes, source, said):
    assert said in evidence_of(answered(**changes), source)


def test_one_misrouted_request_is_not_excused_by_a_single_replica():
    assert judged(answered(replicas=1, misrouted=1))[ROWS[2]] == "unsupported"


@pytest.mark.parametrize("independent", [False, True])
def test_rows_that_were_not_tested_are_never_proven(independent):
    found = judged(answered(independent=independent, tested_rows=0))
    assert found[ROWS[0]] not in ("eliminated", "ordered")
