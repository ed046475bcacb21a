"""R2D2 as a spec says: how episodes are cut, its actors, its network and its replay memory."""

import numpy as np
import pytest
import torch

from capsule.experiment.spec import CpuAccelerator
from capsule.training.environments import make_environment
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.r2d2.cutting import SequenceLayout
from capsule.training.r2d2.factory import (
    actor_settings,
    make_network,
    replay_options,
    sequence_layout,
)
from capsule.training.r2d2.replay import Frames, SequenceReplay
from capsule.training.state.streams import make_streams
from capsule.training.trainer import TrainerContext
from tests.training.conftest import ANY_GPU, make_spec
from tests.training.r2d2.test_learner import BREAKOUT, TASK

pytestmark = pytest.mark.usefixtures("deterministic")


def parts(document=TASK, folder=None, **changes):
    """Return a context, the section ``trainer``, and an example of the environment."""
    spec = make_spec(document, **changes).training()
    context = TrainerContext(folder, spec, spec.seeds, {}, None, torch.device("cpu"), 1)
    example = make_environment(spec.environment, make_streams(spec.seeds), training=True)
    return context, spec.trainer, example


def options_of(context, trainer, example):
    network = make_network(trainer, example, context.spec.accelerator)
    return replay_options(context, trainer, example, network)


def test_sequences_have_the_steps_of_the_spec_and_states_for_whole_targets():
    _, trainer, _ = parts()
    layout = sequence_layout(trainer)
    assert layout == SequenceLayout(burn_in=4, trained=8, period=4, lookahead=3)
    assert layout.rows == 4 + 8 + 3


def test_actors_have_the_settings_of_the_spec():
    context, trainer, example = parts(
        trainer={"life_loss": "reset", "exploration_base": 0.3, "exploration_exponent": 5.0},
        determinism={"batch_invariance": False},
    )
    layout = sequence_layout(trainer)
    settings = actor_settings(context, trainer, example)
    assert settings.tasks == (context.spec.environment,)
    assert (settings.actors, settings.steps, settings.layout) == (6, 5, layout)
    assert (settings.life_loss, settings.exploration_base) == ("reset", 0.3)
    assert settings.exploration_exponent == 5.0
    assert settings.seeds == context.seeds
    assert settings.determinism == context.spec.determinism


def test_actors_act_on_the_cpu_whatever_the_learner_computes_on():
    context, trainer, example = parts(accelerator=ANY_GPU)
    settings = actor_settings(context, trainer, example)
    assert settings.network.products is FIXED_ORDER
    assert make_network(trainer, example, context.spec.accelerator).products is LIBRARY
    assert make_network(trainer, example, CpuAccelerator()).products is FIXED_ORDER


def test_the_network_has_the_units_of_the_spec():
    context, trainer, example = parts()
    network = make_network(trainer, example, context.spec.accelerator)
    assert network.actions == 2
    assert network.state_shape == (2, 16)
    assert network.shapes["lstm.recurrent.weight"] == (4 * 16, 16)
    context, trainer, example = parts(trainer={"recurrent_units": 0, "recurrent_state": "zero"})
    network = make_network(trainer, example, context.spec.accelerator)
    assert not any(name.startswith("lstm") for name in network.shapes)


def test_the_replay_memory_keeps_what_the_spec_says():
    options = options_of(*parts(trainer={"priority_exponent": 0.5}))
    assert (options["actors"], options["capacity"]) == (6, 1_200)
    assert options["frames"] == Frames((4,), np.dtype(np.float32), 1)
    assert options["state_shape"] == (2, 16)
    assert options["priority_exponent"] == 0.5
    atari = options_of(*parts(BREAKOUT))
    assert atari["frames"] == Frames((84, 84), np.dtype(np.uint8), 4)


def test_no_states_are_kept_where_sequences_begin_with_zeros():
    options = options_of(*parts(trainer={"recurrent_state": "zero"}))
    assert np.prod(options["state_shape"]) == 0


@pytest.mark.parametrize(
    ("checkpoints", "actors", "slack"),
    [
        (300, 6, 2 * 55),  # 300 steps and an update of 30, by 6 actors
        (900, 6, 2 * 155),
        (300, 1, 2 * 305),
    ],
)
def test_the_slack_is_for_two_entries_of_each_step_until_the_next_state(checkpoints, actors, slack):
    changes = {
        "trainer": {"actors": actors, "total_steps": 900},
        "recording": {"checkpoint_interval": checkpoints},
    }
    assert options_of(*parts(**changes))["slack"] == slack


def test_if_every_step_truncates_an_episode_the_slack_suffices():
    context, trainer, example = parts(trainer={"replay_capacity": 1_200})
    options = options_of(context, trainer, example)
    replay = SequenceReplay(None, **options)
    replay.state()
    state = np.zeros((2, 16), np.float32)
    steps = (300 + 30) // 6  # of each actor until the next state is saved
    for actor in range(6):
        for _ in range(steps):
            frame = np.zeros(4, np.float32)
            replay.append(actor, frame, 0, 0.0, False, ended=False, state=state)
            replay.end_episode(actor, frame)
    with pytest.raises(RuntimeError, match="checkpoint"):
        replay.append(0, frame, 0, 0.0, False, ended=False, state=state)


def test_a_trainer_has_its_replay_memory_in_the_run_and_moves_no_stream_of_it(open_trainer):
    learner = open_trainer(TASK)
    assert any((learner.directory / "state" / "replay").iterdir())
    assert {n for n, stream in learner.streams.items() if stream.draws} == {"initialization"}
    assert learner.actions == 2
