"""Human-normalised scores: by hand, and against what papers print beside their scores per game."""

import csv
from pathlib import Path

import gymnasium
import pytest
from ale_py import roms

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.scores import (
    ATARI_57,
    DMLAB_30,
    Aggregate,
    ReferenceScores,
    aggregate,
    human_normalized,
    task_name,
)


def published(suite, agent):
    """Return an agent's scores: Espeholt et al. 2018, tables B.1 and C.1; R2D2's table 4."""
    path = Path(__file__).with_name(f"published_{suite}.csv")
    with path.open(encoding="ascii", newline="") as stream:
        return {row["task"]: float(row[agent]) for row in csv.DictReader(stream)}


def percent(scores):
    return [100 * value for value in aggregate(scores)]


@pytest.mark.parametrize(
    ("identifier", "score", "expected"),
    [
        ("breakout", 30.5, 1.0),
        ("breakout", 1.7, 0.0),
        ("breakout", 16.1, 0.5),  # 14.4 of 28.8 points
        ("pong", -20.7 - 35.3, -1.0),  # a person is 35.3 points above random
        ("enduro", 2 * 860.5, 2.0),
        ("language_execute_random_task", 254.1, 1.0),
        ("rooms_collect_good_objects_test", 5.05, 0.5),  # 4.95 of 9.9 points
    ],
)
def test_normalizing_by_hand(identifier, score, expected):
    assert human_normalized(identifier, score) == pytest.approx(expected, abs=1e-12)


def test_aggregates_by_hand():
    scores = {"breakout": 30.5, "ALE/Enduro-v5": 4 * 860.5, "freeway": 0.0}
    assert aggregate(scores) == pytest.approx(Aggregate(1.0, 5 / 3, 2 / 3))
    scores["venture"] = 1187.5 * 0.5
    assert aggregate(scores) == pytest.approx(Aggregate(0.75, 5.5 / 4, 2.5 / 4))
    with pytest.raises(ValueError, match="no median"):
        aggregate({})


def test_references_are_of_the_suites_games():
    assert len(ATARI_57) == 57
    assert len(DMLAB_30) == 30
    assert ATARI_57["skiing"] == ReferenceScores(random=-17098.1, human=-4336.9)
    assert DMLAB_30["explore_object_rewards_many"] == ReferenceScores(random=2.4, human=106.7)
    assert all(random < human for random, human in (*ATARI_57.values(), *DMLAB_30.values()))
    assert ATARI_57.keys() <= set(roms.get_all_rom_ids())


@pytest.mark.parametrize(
    ("agent", "expected", "mean"),
    [
        ("impala_multitask", 59.7, 176.9),
        ("impala_shallow", 93.2, 466.4),
        ("impala_deep", 191.8, 957.6),
    ],
)
def test_impala_as_espeholt_et_al_print_it(agent, expected, mean):
    """Espeholt et al. 2018, table 4, from table C.1."""
    found = percent(published("atari57", agent))
    assert round(found[0], 1) == expected
    assert found[1] == pytest.approx(mean, abs=0.4)  # their references have more digits


def test_reactor_as_espeholt_et_al_print_it():
    """Espeholt et al. 2018, table 4: 187 %."""
    assert round(percent(published("atari57", "reactor"))[0]) == 187


def test_r2d2_as_kapturowski_et_al_print_it():
    """Kapturowski et al. 2019, table 1: 1920.6 % and 4024.9 %, from table 4.

    The median is that of Double Dunk, whose printed score is exact to 0.05 of 2.2 points.
    """
    scores = published("atari57", "r2d2")
    found = percent(scores)
    assert found[0] == 100 * human_normalized("double_dunk", scores["double_dunk"])
    assert found[0] == pytest.approx(1920.6, abs=100 * 0.05 / 2.2)
    assert found[1] == pytest.approx(4024.9, abs=0.1)


@pytest.mark.parametrize(
    ("agent", "expected"), [("impala_experts", 44.5), ("impala_multitask", 49.4)]
)
def test_impala_on_dmlab_as_espeholt_et_al_print_it(agent, expected):
    """Espeholt et al. 2018, table B.1: mean capped normalised scores."""
    assert percent(published("dmlab30", agent))[2] == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("identifier", "name"),
    [
        ("ALE/Breakout-v5", "breakout"),
        ("ALE/UpNDown-v5", "up_n_down"),
        ("MsPacmanNoFrameskip-v4", "ms_pacman"),
        ("YarsRevengeDeterministic-v0", "yars_revenge"),
        ("Hero-v4", "hero"),
        ("kung_fu_master", "kung_fu_master"),
        ("rooms_watermaze", "rooms_watermaze"),
    ],
)
def test_names(identifier, name):
    assert task_name(identifier) == name


def test_every_game_has_a_gymnasium_id():
    known = {
        spec.kwargs["game"]: spec.id
        for spec in gymnasium.registry.values()
        if spec.namespace == "ALE"
    }
    assert {game: task_name(known[game]) for game in ATARI_57} == {game: game for game in ATARI_57}


@pytest.mark.parametrize(
    ("identifier", "fix"),
    [
        ("brekout", "Did you mean breakout"),
        ("ALE/Pacman-v5", "Did you mean ms_pacman"),
        ("rooms_collect_good_objects_train", "Did you mean rooms_collect_good_objects_test"),
        ("CartPole-v1", "Name a game of Atari-57"),
        ("", "Name a game of Atari-57"),
    ],
)
def test_unknown_games_are_refused(identifier, fix):
    with pytest.raises(CapsuleError, match="CAP-S007 no human score is known for") as refused:
        human_normalized(identifier, 1.0)
    assert refused.value.fix.startswith(fix)
    assert refused.value.exit_code is ExitCode.USAGE
