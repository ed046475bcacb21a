"""Entries of nested observations: paths, order, values, and which of them are vectors."""

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from capsule.training.environments.entries import (
    Entry,
    entries_of,
    is_image,
    is_text,
    not_numbers,
)

NUMBER = spaces.Box(0.0, 9.0, (1,))
SPACE = spaces.Dict(
    {
        "camera": spaces.Dict({"left": spaces.Box(0, 255, (2, 3), np.uint8)}),
        "arm": spaces.Tuple([spaces.Discrete(3), spaces.Dict({"speed": NUMBER})]),
        "order": spaces.Text(9),
    }
)
SEEN = {"camera": {"left": "a picture"}, "arm": (2, {"speed": 1.5}), "order": "go"}


def test_every_entry_has_the_path_of_its_keys_and_the_outer_ones_come_first():
    found = entries_of(SPACE)
    assert list(found) == [
        "arm",
        "camera",
        "order",
        "arm/0",
        "arm/1",
        "camera/left",
        "arm/1/speed",
    ]
    assert found["arm/1/speed"].keys == ("arm", 1, "speed")
    assert found["arm/1/speed"].space is NUMBER


@pytest.mark.parametrize(
    ("path", "value"),
    [("camera/left", "a picture"), ("arm/0", 2), ("arm/1/speed", 1.5), ("arm/1", {"speed": 1.5})],
)
def test_the_value_of_an_entry_is_what_its_keys_lead_to(path, value):
    assert entries_of(SPACE)[path].of(SEEN) == value


def test_the_whole_observation_is_an_entry_without_a_path():
    whole = Entry(SPACE, ())
    assert (whole.path, whole.of(SEEN)) == ("", SEEN)
    assert all(whole.contains(entry) for entry in entries_of(SPACE).values())


@pytest.mark.parametrize("space", [NUMBER, spaces.Text(3), spaces.Dict({}), spaces.Tuple([])])
def test_a_space_without_parts_has_no_entries(space):
    assert entries_of(space) == {}


def test_of_two_entries_with_one_path_the_outer_one_is_meant():
    inner, outer = spaces.Discrete(2), spaces.Discrete(3)
    space = spaces.Dict({"a": spaces.Dict({"b": inner}), "a/b": outer})
    assert entries_of(space)["a/b"] == Entry(outer, ("a/b",))


def test_an_entry_contains_itself_and_what_is_inside_but_no_neighbour():
    found = entries_of(SPACE)
    assert found["arm"].contains(found["arm"])
    assert found["arm"].contains(found["arm/1/speed"])
    assert not found["arm/1/speed"].contains(found["arm"])
    assert not found["arm/0"].contains(found["arm/1"])


def test_a_common_beginning_of_two_names_is_no_containment():
    found = entries_of(spaces.Dict({"arm": spaces.Dict({"a": NUMBER}), "arms": NUMBER}))
    assert not found["arm"].contains(found["arms"])


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((4, 6), np.uint8, True),
        ((4, 6, 3), np.uint8, True),
        ((4, 6, 3), np.float32, False),
        ((4, 6, 3), np.int8, False),
        ((24,), np.uint8, False),
        ((2, 4, 6, 3), np.uint8, False),
        ((), np.uint8, False),
    ],
)
def test_only_bytes_in_rows_and_columns_are_an_image(shape, dtype, expected):
    assert is_image(spaces.Box(0, 100, shape, dtype)) is expected


@pytest.mark.parametrize("space", [spaces.MultiBinary((4, 6)), spaces.Discrete(255), SPACE])
def test_a_space_that_is_no_box_is_no_image(space):
    assert not is_image(space)


def test_only_texts_are_texts():
    assert is_text(spaces.Text(9))
    others = [NUMBER, spaces.Discrete(2), spaces.MultiBinary(2), SPACE, spaces.Tuple([NUMBER])]
    assert not any(map(is_text, others))


def test_the_obstacles_to_a_vector_are_named_from_the_outside_to_the_inside():
    space = spaces.Dict(
        {
            "a": spaces.Tuple([NUMBER, spaces.Text(3)]),
            "b": spaces.Sequence(NUMBER),
            "c": spaces.Dict({"d": spaces.Dict({}), "e": spaces.MultiBinary(2)}),
        }
    )
    assert [entry.path for entry in not_numbers(Entry(space, ()))] == ["a/1", "b", "c/d"]
    # Of an entry inside, paths still begin at the whole observation.
    assert [entry.path for entry in not_numbers(entries_of(space)["c"])] == ["c/d"]


def test_a_text_itself_is_its_obstacle():
    text = Entry(spaces.Text(3), ("order",))
    assert not_numbers(text) == [text]


FLAT = st.sampled_from(
    [NUMBER, spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4)]
)
OTHERS = st.sampled_from(
    [spaces.Text(3), spaces.Sequence(NUMBER), spaces.Dict({}), spaces.Tuple([])]
)


def nested(leaves):
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(spaces.Dict),
            st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        ),
        max_leaves=6,
    )


def becomes_a_vector(space):
    try:
        return isinstance(spaces.flatten_space(space), spaces.Box)
    except ValueError:  # of an empty space, which has nothing to join
        return False


@given(nested(FLAT | OTHERS))
def test_without_an_obstacle_gymnasium_makes_a_vector_of_a_space(space):
    whole = Entry(space, ())
    # Gymnasium makes vectors of texts as well, of the numbers of their characters.
    texts = any(is_text(entry.space) for entry in (whole, *entries_of(space).values()))
    assert (not not_numbers(whole)) == (becomes_a_vector(space) and not texts)


@given(nested(FLAT), st.integers(0, 2**31))
def test_each_entry_of_a_sample_is_in_its_space(space, seed):
    space.seed(seed)
    sample = space.sample()
    for path, entry in entries_of(space).items():
        assert entry.of(sample) in entry.space
        assert path == "/".join(str(key) for key in entry.keys)
