"""What surrounds a trainer: processes of its actors, CUDA graphs, and the time between states."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.host.spec_file import load_spec
from capsule.training.trainer import TrainerContext, state_interval
from tests.training.conftest import ANY_GPU, CARTPOLE, make_spec

SPECS = Path(__file__).parents[2] / "specs"


def context(accelerator=None, **options):
    changes = {} if accelerator is None else {"accelerator": accelerator}
    spec = make_spec(CARTPOLE, **changes).training()
    options = {"workers": 1, **options}
    return TrainerContext(Path("/nowhere"), spec, spec.seeds, {}, None, None, **options)


@pytest.mark.parametrize(
    ("workers", "members", "processes"),
    [(1, 1, 0), (1, 8, 0), (2, 1, 2), (6, 1, 6), (8, 3, 2), (8, 8, 1), (2, 5, 1)],
)
def test_members_share_the_processes_and_one_processor_needs_none(workers, members, processes):
    assert context(workers=workers, members=members).actor_processes == processes


@pytest.mark.parametrize(
    ("accelerator", "graphed"),
    [
        ({"kind": "cpu"}, False),
        (ANY_GPU, False),
        ({**ANY_GPU, "cuda_graphs": True}, True),
    ],
)
def test_updates_are_graphs_on_a_gpu_where_the_spec_asks_for_them(accelerator, graphed):
    assert context(accelerator).graphed is graphed


@pytest.mark.parametrize(
    ("unit", "checkpoints", "expected"),
    [
        (4, 400, 400),
        (4, 50_000, 50_000),
        (4, 250_000, 50_000),
        (64, 640_000, 49_984),  # 781 intervals of 64 steps; 782 are 50,048
        (30_000, 90_000, 30_000),
        (60_000, 600_000, 60_000),  # never within an interval
    ],
)
def test_states_are_saved_at_every_checkpoint_and_between_them(unit, checkpoints, expected):
    assert state_interval(spec_of(unit, checkpoints)) == expected


def spec_of(unit, checkpoints):
    return SimpleNamespace(
        trainer=SimpleNamespace(interval_steps=unit),
        recording=SimpleNamespace(checkpoint_interval=checkpoints),
    )


def test_the_unit_of_a_real_spec_is_its_update():
    spec = make_spec(
        CARTPOLE,
        trainer={
            "update_interval": 24,
            "replay_start": 240,
            "target_interval": 240,
            "total_steps": 480_000,
        },
        evaluation={"interval": 480_000},
        recording={"trace_interval": 24, "tensor_interval": 240, "checkpoint_interval": 240_000},
    ).training()
    assert state_interval(spec) == 2_083 * 24  # 2,084 are 50,016


@pytest.mark.parametrize(("capacity", "expected"), [(400_000, 44_800), (4_000_000, 499_200)])
def test_a_state_of_r2d2_is_saved_for_each_eighth_of_its_memory(capacity, expected):
    changed = (f"trainer.replay_capacity={capacity}",)
    spec = load_spec(SPECS / "r2d2-atari.yaml", changed).training()
    assert spec.trainer.interval_steps == 256 * 25
    assert state_interval(spec) == expected


@given(st.integers(1, 200_000), st.integers(1, 1_000))
def test_a_state_comes_after_whole_intervals_and_not_after_a_checkpoint(unit, count):
    """A checkpoint comes after whole intervals, too."""
    found = state_interval(spec_of(unit, unit * count))
    assert found % unit == 0
    assert unit <= found <= unit * count
    assert found <= max(unit, 50_000)
    assert found + unit > min(unit * count, 50_000)  # as rarely as that allows
