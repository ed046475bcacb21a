"""The sections ``seeds`` and ``entropy``: the range of seeds, and a root that is drawn or given."""

import json
from typing import get_args

import pytest
from pydantic import ValidationError

from capsule.experiment.spec import EntropySpec, SeedsSpec, StreamName

LARGEST = 2**53 - 1  # RFC 8785: numbers of JSON are doubles


def parse(model, **fields):
    return model.model_validate_json(json.dumps(fields))


def refusal(model, **fields):
    with pytest.raises(ValidationError) as caught:
        parse(model, **fields)
    return str(caught.value)


@pytest.mark.parametrize("seed", [0, 1, LARGEST])
def test_seeds_are_read_back_exactly(seed):
    seeds = parse(SeedsSpec, root=seed, streams={"minibatch": seed})
    assert SeedsSpec.parse(seeds.document()) == seeds
    entropy = parse(EntropySpec, seed=seed)
    assert EntropySpec.parse(entropy.document()).seed == seed


@pytest.mark.parametrize("seed", [-1, LARGEST + 1, 1.0, "1", True])
@pytest.mark.parametrize("field", ["root", "streams", "seed"])
def test_a_seed_that_is_no_exact_number_of_json_is_rejected(field, seed):
    if field == "seed":
        assert "seed\n" in refusal(EntropySpec, seed=seed)
    elif field == "root":
        assert "root\n" in refusal(SeedsSpec, root=seed)
    else:
        assert "streams.minibatch\n" in refusal(SeedsSpec, streams={"minibatch": seed})


@pytest.mark.parametrize("name", get_args(StreamName))
def test_every_stream_has_a_root_of_its_own_on_request(name):
    assert parse(SeedsSpec, streams={name: 3}).streams == {name: 3}


@pytest.mark.parametrize("name", ["", "Minibatch", "environment.0"])
def test_a_stream_that_no_trainer_has_is_rejected(name):
    assert "streams" in refusal(SeedsSpec, streams={name: 3})


def test_a_root_is_either_given_or_drawn():
    assert "root 7 is given although random is true" in refusal(SeedsSpec, root=7, random=True)
    assert parse(SeedsSpec, root=7, random=False).root == 7
    assert parse(SeedsSpec, random=True).random


def test_a_stored_spec_of_a_drawn_root_is_read_back():
    """It spells out the default root, which is no contradiction."""
    drawn = parse(SeedsSpec, random=True)
    assert json.loads(drawn.document())["root"] == 0
    assert SeedsSpec.parse(drawn.document()) == drawn


def test_randomness_is_virtual_and_supervised_unless_the_spec_says_otherwise():
    entropy = EntropySpec()
    assert (entropy.mode, entropy.supervised, entropy.address_randomization) == (
        "virtual",
        True,
        False,
    )
    assert (entropy.seed, entropy.clock, entropy.on_exhaustion) == (None, None, "fail")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("mode", ("virtual", "recorded", "system")),
        ("on_exhaustion", ("fail", "virtual")),
        ("clock", ("system", "fixed", "virtual", None)),
    ],
)
def test_settings_have_these_values_only(field, values):
    for value in values:
        entropy = parse(EntropySpec, **{field: value})
        assert EntropySpec.parse(entropy.document()) == entropy
    for wrong in ("", "replay", "Virtual", 1):
        assert f"{field}\n" in refusal(EntropySpec, **{field: wrong})
