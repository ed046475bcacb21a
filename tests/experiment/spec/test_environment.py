"""The section ``environment``: each suite's refusals, its tasks, and their reference scores."""

import json

import pytest
from pydantic import TypeAdapter, ValidationError

from capsule.experiment.spec import (
    AtariEnvironment,
    EnvironmentSpec,
    GymnasiumEnvironment,
    MinAtarEnvironment,
    references_of,
    task_name,
    tasks_of,
)
from capsule.experiment.trainers import PopulationSpec, ScoreReference

sections = TypeAdapter(EnvironmentSpec)
ATARI = AtariEnvironment(suite="atari", game="breakout")
CARTPOLE = GymnasiumEnvironment(suite="gymnasium", id="CartPole-v1")
MINATAR = MinAtarEnvironment(suite="minatar", game="breakout")


def section(suite, **fields):
    return sections.validate_json(json.dumps({"suite": suite, **fields}))


def gymnasium(**fields):
    return section("gymnasium", id="x", **fields)


def refusal(suite, **fields):
    with pytest.raises(ValidationError) as caught:
        section(suite, **fields)
    return str(caught.value)


# ---- suites ----


@pytest.mark.parametrize("whole", [ATARI, CARTPOLE, MINATAR], ids=lambda each: each.suite)
def test_the_suite_decides_what_the_section_has(whole):
    assert sections.validate_json(whole.document()) == whole
    assert "Extra inputs" in refusal(**json.loads(whole.document()), more=1)


@pytest.mark.parametrize("suite", ["procgen", "", None])
def test_an_unknown_suite_is_rejected(suite):
    assert "'atari', 'gymnasium', 'minatar'" in refusal(suite, game="breakout")


def test_the_defaults_of_atari_are_the_protocol_of_mnih_et_al_2015():
    """Extended Data Table 1; 30 minutes at 60 frames a second, of which a run plays all."""
    assert (ATARI.noop_max, ATARI.frame_skip, ATARI.frame_stack) == (30, 4, 4)
    assert (ATARI.clip_rewards, ATARI.terminal_on_life_loss) == (True, True)
    assert ATARI.max_episode_frames == 30 * 60 * 60
    assert (ATARI.sticky_action_probability, ATARI.full_action_set) == (0.0, False)


@pytest.mark.parametrize(
    ("suite", "fields", "name"),
    [
        ("atari", {"game": "Breakout"}, "game"),
        ("atari", {"game": ""}, "game"),
        ("atari", {"game": "ms pacman"}, "game"),
        ("atari", {"game": "pong", "further_games": ["ALE/Pong-v5"]}, "further_games.0"),
        ("atari", {"game": "pong", "sticky_action_probability": 1.1}, "sticky_action_probability"),
        ("atari", {"game": "pong", "sticky_action_probability": -0.1}, "sticky_action_probability"),
        ("atari", {"game": "pong", "noop_max": -1}, "noop_max"),
        ("atari", {"game": "pong", "frame_skip": 0}, "frame_skip"),
        ("atari", {"game": "pong", "frame_stack": 0}, "frame_stack"),
        ("atari", {"game": "pong", "max_episode_frames": 0}, "max_episode_frames"),
        ("atari", {"game": "pong", "clip_rewards": 1}, "clip_rewards"),
        ("gymnasium", {}, "id"),
        ("gymnasium", {"id": "x", "max_episode_steps": 0}, "max_episode_steps"),
        ("gymnasium", {"id": "x", "frames": "grey"}, "frames"),
        ("gymnasium", {"id": "x", "frame_stack": 0}, "frame_stack"),
        ("gymnasium", {"id": "x", "masked_observations": [-1]}, "masked_observations.0"),
        ("minatar", {"game": "pong"}, "game"),
        ("minatar", {"game": "breakout", "max_episode_steps": 0}, "max_episode_steps"),
    ],
)
def test_a_value_out_of_range_is_rejected_by_its_field(suite, fields, name):
    assert f"{suite}.{name}\n" in refusal(suite, **fields)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_a_probability_includes_its_bounds(probability):
    found = section("minatar", game="freeway", sticky_action_probability=probability)
    assert found.sticky_action_probability == probability


# ---- modules ----


@pytest.mark.parametrize("name", ["", "pop gym", "3d", "a..b", "a.", ".a", "a-b", "a\n"])
def test_modules_have_names_of_modules(name):
    with pytest.raises(ValidationError, match="modules"):
        GymnasiumEnvironment(suite="gymnasium", id="CartPole-v1", modules=(name,))


@pytest.mark.parametrize("name", ["popgym", "a.b_2", "_private"])
def test_names_of_modules_are_accepted(name):
    assert gymnasium(modules=[name]).modules == (name,)


# ---- observations ----


@pytest.mark.parametrize(
    "fields",
    [
        {"numbers": ["kind"]},
        {"numbers": ["kind"], "frames": "image"},
        {"numbers": ["kind"], "observation": "grey"},
        {"numbers": ["kind", "kind"], "observation": "grey", "frames": "image"},
        {"numbers": ["grey"], "observation": "grey", "frames": "image"},
        {"numbers": ["m"], "observation": "grey", "frames": "image", "instruction": "m"},
        {"numbers": [], "observation": "grey", "frames": "image"},
    ],
)
def test_numbers_go_with_an_image_and_are_named_once(fields):
    assert "numbers" in refusal("gymnasium", id="x", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"observation": "grey"},
        {"images": ["left", "right"]},
        {"observation": "grey", "instruction": "mission"},
        {"images": ["left", "right"], "instruction": "mission"},
    ],
)
def test_numbers_are_accepted_beside_images_and_an_instruction(fields):
    found = gymnasium(numbers=["kind", "speed"], frames="image", **fields)
    assert found.numbers == ("kind", "speed")
    assert GymnasiumEnvironment.parse(found.document()) == found


def test_nothing_of_an_image_is_hidden():
    with pytest.raises(
        ValidationError, match="masked_observations does not apply to frames: image; remove it"
    ):
        GymnasiumEnvironment(suite="gymnasium", id="x", frames="image", masked_observations=(1,))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"images": ["a", "b"]}, "images requires frames: image"),
        ({"images": ["a", "b"], "frames": "image", "observation": "c"}, "replaces observation 'c'"),
        ({"images": ["a"], "frames": "image"}, "images\n.* at least 2"),
        ({"images": ["a", "a"], "frames": "image"}, "images names an entry twice"),
        ({"images": ["a", "b"], "frames": "image", "instruction": "b"}, "is the instruction"),
        ({"images": ["a", "b"], "frames": "image", "numbers": ["b"]}, "numbers names an entry"),
        (
            {"images": ["a", "b"], "frames": "image", "masked_observations": [0]},
            "masked_observations does not apply to frames: image",
        ),
    ],
)
def test_a_spec_that_names_images_wrongly_is_refused(changes, said):
    with pytest.raises(ValidationError, match=said):
        gymnasium(**changes)


def test_a_spec_without_images_keeps_its_document():
    plain = gymnasium(observation="image", frames="image").document()
    assert b'"images"' not in plain
    assert b'"numbers"' not in plain
    assert GymnasiumEnvironment.parse(plain).images is None
    several = gymnasium(images=["a", "b"], frames="image")
    assert GymnasiumEnvironment.parse(several.document()) == several


# ---- tasks ----

GAMES = ATARI.model_copy(update={"further_games": ("pong", "alien"), "frame_skip": 3})


@pytest.mark.parametrize("environment", [CARTPOLE, MINATAR, ATARI], ids=lambda each: each.suite)
def test_an_environment_without_further_games_is_one_task(environment):
    assert tasks_of(environment) == (environment,)


def test_every_game_is_a_task_with_the_settings_of_all():
    tasks = tasks_of(GAMES)
    assert [task.game for task in tasks] == ["breakout", "pong", "alien"]
    assert all(task.further_games == () for task in tasks)
    assert all(task.frame_skip == 3 for task in tasks)
    assert GAMES.further_games == ("pong", "alien")


def test_the_tasks_of_a_task_are_itself():
    for task in tasks_of(GAMES):
        assert tasks_of(task) == (task,)


@pytest.mark.parametrize(
    ("environment", "name"), [(ATARI, "breakout"), (CARTPOLE, "CartPole-v1"), (MINATAR, "breakout")]
)
def test_a_task_is_called_after_its_game_or_id(environment, name):
    assert task_name(environment) == name


# ---- reference scores ----

GIVEN = ScoreReference(random=20.0, human=400.0)


def references(environment, **given):
    return references_of(environment, PopulationSpec(references=given))


def test_published_scores_are_taken_for_atari_in_the_order_of_the_tasks():
    games = AtariEnvironment(
        suite="atari", game="pong", further_games=("boxing", "alien", "enduro")
    )
    found = references(games)
    assert list(found) == ["pong", "boxing", "alien", "enduro"]
    assert (found["pong"].random, found["pong"].human) == (-20.7, 14.6)


def test_a_gymnasium_id_of_an_atari_game_has_published_scores():
    environment = GymnasiumEnvironment(suite="gymnasium", id="ALE/Pong-v5")
    assert (
        references(environment)["ALE/Pong-v5"]
        == references(AtariEnvironment(suite="atari", game="pong"))["pong"]
    )


@pytest.mark.parametrize(
    ("environment", "name"), [(CARTPOLE, "CartPole-v1"), (MINATAR, "breakout")]
)
def test_other_tasks_need_references_and_take_them(environment, name):
    """MinAtar's games count otherwise than the Atari games they are called after."""
    with pytest.raises(ValueError, match=f"trainer.population.references lacks '{name}'") as caught:
        references(environment)
    assert f"add {{{name}: {{random: …, human: …}}}}" in str(caught.value)
    found = references(environment, **{name: GIVEN})
    assert list(found) == [name]
    assert (found[name].random, found[name].human) == (20.0, 400.0)


def test_given_scores_are_added_to_published_ones_in_the_order_of_the_tasks():
    games = ATARI.model_copy(update={"further_games": ("tetris", "pong")})
    found = references(games, tetris=GIVEN)
    assert list(found) == ["breakout", "tetris", "pong"]
    assert found["tetris"] == (20.0, 400.0)


@pytest.mark.parametrize(
    ("environment", "name", "message"),
    [
        (ATARI, "breakout", "'breakout' has published scores; remove it"),
        (ATARI, "pong", "'pong' is not one of the tasks breakout"),
        (GAMES, "qbert", "'qbert' is not one of the tasks breakout, pong, alien"),
        (CARTPOLE, "CartPole-v0", "'CartPole-v0' is not one of the tasks CartPole-v1"),
    ],
)
def test_references_without_use_are_rejected(environment, name, message):
    with pytest.raises(ValueError, match=f"trainer.population.references: {message}"):
        references(environment, **{name: GIVEN})
