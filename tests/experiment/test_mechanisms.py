"""The document of the mechanisms that a run used: what it may say, and its canonical form."""

import json

import pytest
from pydantic import ValidationError

from capsule.experiment.mechanisms import Interpreters, Mechanisms, Surroundings, TrainerUse
from tests.entropy.evidence import SERIAL, SURROUNDINGS, make_interpreters, make_mechanisms


@pytest.mark.parametrize("program", [False, True])
def test_a_document_is_read_back(program):
    mechanisms = make_mechanisms(program=program)
    assert Mechanisms.parse(mechanisms.document()) == mechanisms


@pytest.mark.parametrize(
    ("seeds", "started"), [({}, 0), ({"0": 1}, 1), ({"0": 2, "random": 3, "7": 1}, 6)]
)
def test_every_process_that_reported_its_hash_seed_was_started(seeds, started):
    assert make_interpreters(0, hash_seeds=seeds).started == started


def test_a_run_without_data_keeps_the_document_that_it_had_before_data_sets():
    stored = json.loads(make_mechanisms().document())
    assert "data" not in stored["surroundings"]
    assert Mechanisms.parse(make_mechanisms().document()).surroundings.data is None
    mounted = SURROUNDINGS.model_copy(update={"data": "read-only"})
    stored = json.loads(make_mechanisms(surroundings=mounted).document())
    assert stored["surroundings"]["data"] == "read-only"


@pytest.mark.parametrize(
    ("model", "whole", "wrong"),
    [
        (Surroundings, SURROUNDINGS, {"interfaces": {"eth0": "somewhere"}}),
        (Surroundings, SURROUNDINGS, {"data": "mounted"}),
        (Surroundings, SURROUNDINGS, {"fixed_paths": 1}),
        (Surroundings, SURROUNDINGS, {"path": "/home/alice"}),
        (Interpreters, make_interpreters(), {"hash_seeds": {"0": 0}}),
        (Interpreters, make_interpreters(), {"restarted": -1}),
        (Interpreters, make_interpreters(), {"unwatched": -1}),
        (Interpreters, make_interpreters(), {"torch": [{"processes": 0, "flags": {}}]}),
        (TrainerUse, SERIAL, {"schedule": "random"}),
        (TrainerUse, SERIAL, {"actors": 0}),
        (Mechanisms, make_mechanisms(program=True), {"process": 0}),
        (Mechanisms, make_mechanisms(), {"schema": "capsule/mechanisms/v2"}),
    ],
)
def test_what_no_run_can_have_used_is_rejected(model, whole, wrong):
    (name,) = wrong
    facts = json.loads(whole.document()) | wrong
    with pytest.raises(ValidationError, match=name):
        model.model_validate_json(json.dumps(facts))


@pytest.mark.parametrize("name", ["surroundings", "interpreters", "trainer", "process"])
def test_what_is_unknown_is_stated_and_not_left_out(name):
    facts = json.loads(make_mechanisms().document())
    del facts[name]
    with pytest.raises(ValidationError, match=name):
        Mechanisms.model_validate_json(json.dumps(facts))
