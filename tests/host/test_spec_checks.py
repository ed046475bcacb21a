"""Settings without an effect are rejected in new specs, and remain readable in locks."""

import json

import pytest

from capsule.experiment.spec import Spec
from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.spec_file import load_spec, parse_spec

ATARI = {"suite": "atari", "game": "breakout"}
CARTPOLE = {"suite": "gymnasium", "id": "CartPole-v1"}
MISSIONS = {"suite": "gymnasium", "id": "x", "frames": "image", "observation": "image"}
DQN = {"algorithm": "dqn", "network": "mlp"}
SMALL_BATCH = {"batch_size": 2, "micro_batches": [2], "update_interval": 1}
IMPALA = {"algorithm": "impala", "network": "mlp"}
INTERVALS = {
    "recording": {"trace_interval": 640, "tensor_interval": 6400, "checkpoint_interval": 64000},
    "evaluation": {"interval": 64000},
}
R2D2 = {"algorithm": "r2d2", "network": "mlp", "total_steps": 6_400_000}
STEPS = {
    "recording": {"trace_interval": 6400, "tensor_interval": 6400, "checkpoint_interval": 64000},
    "evaluation": {"interval": 64000},
}
THREADS = "determinism.threads"
CUDA = {"kind": "cuda", "cuda": ">=12", "cudnn": ">=9", "driver": ">=1"}
PROGRAM = {"trainer": {"command": ["python", "train.py", "{seed}"]}}


def of(environment, trainer, **sections):
    intervals = INTERVALS if trainer["algorithm"] == "impala" else {}
    return {"environment": environment, "trainer": trainer, **intervals, **sections}


def kernels(environment, *convolutions):
    layers = [
        {"filters": 4, **dict(zip(("kernel", "stride"), it, strict=False))} for it in convolutions
    ]
    network = {"convolutions": layers, "dense": [4]}
    return of(environment, {"algorithm": "dqn", "network": network})


def mission(words, **environment):
    task = {**MISSIONS, "instruction": "mission", **environment}
    language = {"vocabulary": words}
    return of(task, {**IMPALA, "network": "shallow", "language": language})


def write(tmp_path, sections):
    path = tmp_path / "capsule.yaml"
    path.write_text(json.dumps({"schema": "capsule/spec/v1", "name": "x", **sections}))
    return path


REJECTED = [
    ({**PROGRAM, "seeds": {"random": True}}, "seeds.random"),
    (
        {
            "trainer": {"command": ["true"], "resumable": True, "standard_output": False},
            "entropy": {"mode": "recorded"},
        },
        "trainer.resumable",
    ),
    ({**PROGRAM, "determinism": {"request_seeds": False}}, "determinism.request_seeds"),
    (of(CARTPOLE, DQN, determinism={"batch_invariance": False}), "determinism.batch_invariance"),
    (
        of(CARTPOLE, DQN, determinism={"deterministic_routing": False}),
        "determinism.deterministic_routing",
    ),
    (of(CARTPOLE, DQN, entropy={"mode": "system", "seed": 3}), "entropy.seed"),
    (of(CARTPOLE, DQN, entropy={"on_exhaustion": "virtual"}), "entropy.on_exhaustion"),
    (of(CARTPOLE, DQN, seeds={"streams": {"no-op": 3}}), "seeds.streams.no-op"),
    (
        of(ATARI, {"algorithm": "impala", "network": "residual", "hidden_units": 512}),
        "trainer.hidden_units",
    ),
    (of(CARTPOLE, {**IMPALA, "correction_epsilon": 0.5}), "trainer.correction_epsilon"),
    (
        of(
            CARTPOLE,
            {**IMPALA, "replay": {"unrolls": 16, "capacity": 15}},
            recording={"trace_interval": 320, "tensor_interval": 320, "checkpoint_interval": 320},
            evaluation={"interval": 320},
        ),
        "trainer.replay.capacity",
    ),
    (kernels(ATARI, (100,)), "trainer.network.convolutions.0"),
    (kernels({**ATARI, "suite": "minatar"}, (3, 2), (5, 1)), "trainer.network.convolutions.1"),
    (
        of(CARTPOLE, R2D2, **STEPS, determinism={"request_seeds": False}),
        "determinism.request_seeds",
    ),
    (
        of(CARTPOLE, R2D2, **STEPS, determinism={"deterministic_routing": False}),
        "determinism.deterministic_routing",
    ),
    (of(CARTPOLE, R2D2 | {"life_loss": "reset"}, **STEPS), "trainer.life_loss"),
    (
        of(
            ATARI | {"terminal_on_life_loss": False},
            R2D2 | {"life_loss": "reset", "network": "nature"},
            **STEPS,
        ),
        "trainer.life_loss",
    ),
    (of(CARTPOLE, DQN, entropy={"mode": "recorded", "seed": 3}), "entropy.seed"),
    (
        of(CARTPOLE, DQN, entropy={"mode": "recorded"}, recording={"segment_states": True}),
        "recording.segment_states",
    ),
    (of(CARTPOLE, IMPALA | {"correction": "none", "rho_bar": 2.0}), "trainer.rho_bar"),
    (
        of(CARTPOLE, IMPALA | {"correction": "epsilon", "rho_bar": 0.5, "c_bar": 0.5}),
        "trainer.rho_bar",
    ),
    (of(CARTPOLE, IMPALA | {"correction": "one-step", "c_bar": 0.5}), "trainer.c_bar"),
    (of(ATARI, {"algorithm": "impala", "reward_clipping": "none"}), "trainer.reward_clipping"),
    (of(CARTPOLE, IMPALA, seeds={"streams": {"minibatch": 3}}), "seeds.streams.minibatch"),
    (
        of(ATARI, {"algorithm": "dqn"}, seeds={"streams": {"environment": 3}}),
        "seeds.streams.environment",
    ),
    (of(ATARI, {"algorithm": "dqn"}, evaluation={"max_minutes": 0.001}), "evaluation.max_minutes"),
    (of(ATARI, {"algorithm": "dqn"}, evaluation={"max_minutes": 30.01}), "evaluation.max_minutes"),
    (of(ATARI | {"max_episode_frames": 55}, {"algorithm": "dqn"}), "evaluation.min_actions"),
    (of(CARTPOLE | {"max_episode_steps": 55}, DQN), "evaluation.min_actions"),
    *(
        (of(task, trainer, evaluation={"noop_max": 30}), "evaluation.noop_max")
        for task, trainer in (
            (ATARI | {"max_episode_frames": 30, "noop_max": 0}, {"algorithm": "dqn"}),
            (CARTPOLE | {"max_episode_steps": 30}, DQN),
        )
    ),
    (
        of(ATARI | {"noop_max": 500, "max_episode_frames": 500}, {"algorithm": "dqn"}),
        "environment.noop_max",
    ),
    (
        of(CARTPOLE, DQN | {"replay_capacity": 2, "replay_start": 2, **SMALL_BATCH}),
        "trainer.replay_start",
    ),
    (of(CARTPOLE, R2D2 | {"replay_capacity": 256 * 205 - 1}, **STEPS), "trainer.replay_capacity"),
    (
        of(CARTPOLE, {"algorithm": "dqn", "network": {"activation": "tanh"}}),
        "trainer.network.activation",
    ),
    (
        of(
            CARTPOLE,
            {"algorithm": "dqn", "network": {"module": "a:b", "activation": "tanh"}},
            accelerator={"numerics": "native"},
        ),
        "trainer.network.activation",
    ),
    (
        of(
            CARTPOLE,
            DQN | {"total_steps": 400_100},
            recording={"trace_interval": 100, "tensor_interval": 100, "checkpoint_interval": 100},
        ),
        "recording.checkpoint_interval",
    ),
    (
        of(CARTPOLE, DQN | {"total_steps": 500_100}, evaluation={"interval": 100}),
        "evaluation.interval",
    ),
    *(
        (of(CARTPOLE, trainer, **STEPS, accelerator=each, determinism={"threads": 2}), THREADS)
        for trainer, each in (
            (IMPALA, {"numerics": "portable-v2"}),
            (IMPALA, CUDA),
            (IMPALA | {"network": {"module": "a:b"}}, {"numerics": "native"}),
            (R2D2, {"numerics": "portable-v2"}),
            (R2D2, CUDA),
            (R2D2 | {"network": {"module": "a:b"}}, {"numerics": "native"}),
        )
    ),
    (mission(["go", "Go"]), "trainer.language.vocabulary.1"),
    (mission(["to the"]), "trainer.language.vocabulary.0"),
    (mission(["go"], observation="mission"), "environment.observation"),
    # A resolver takes it for the package requirements-txt, which anyone may publish.
    ({**PROGRAM, "image": {"packages": ["numpy", "requirements.txt"]}}, "image.packages.1"),
]


@pytest.mark.parametrize(("sections", "field"), REJECTED, ids=[field for _, field in REJECTED])
def test_a_setting_without_an_effect_is_rejected_in_a_new_spec_only(tmp_path, sections, field):
    path = write(tmp_path, sections)
    with pytest.raises(CapsuleError) as caught:
        load_spec(path)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-S003", ExitCode.USAGE)
    assert caught.value.message.startswith(f"{path}:1:")
    assert f": {field}" in caught.value.message
    # An earlier lock or bundle may have it, and the spec that it was made from.
    spec = load_spec(path, for_lock=False)
    assert parse_spec(path.read_bytes(), "spec") == spec
    assert Spec.parse(spec.document()) == spec


@pytest.mark.parametrize(
    "sections",
    [
        {**PROGRAM, "entropy": {"mode": "recorded", "on_exhaustion": "virtual", "seed": 1}},
        of(ATARI, {"algorithm": "dqn"}, seeds={"streams": {"no-op": 3}}),
        of(CARTPOLE, {**IMPALA, "correction": "epsilon", "correction_epsilon": 0.5}),
        of(CARTPOLE, IMPALA, determinism={"request_seeds": False}),
        of(CARTPOLE, DQN, seeds={"random": True}),
        of(CARTPOLE, R2D2, **STEPS, determinism={"batch_invariance": False}),
        of(ATARI, R2D2 | {"life_loss": "reset", "network": "nature"}, **STEPS),
        of(CARTPOLE, IMPALA | {"correction": "one-step", "rho_bar": 0.5, "c_bar": 0.5}),
        of(ATARI | {"clip_rewards": False}, {"algorithm": "impala", "reward_clipping": "none"}),
        of(CARTPOLE, DQN, seeds={"streams": {"environment": 3, "minibatch": 4}}),
        of(
            ATARI | {"sticky_action_probability": 0.25},
            {"algorithm": "dqn"},
            seeds={"streams": {"environment": 3}},
        ),
        of(ATARI, {"algorithm": "dqn"}, evaluation={"max_minutes": 0.0012}),
        of(ATARI, {"algorithm": "dqn"}, evaluation={"max_minutes": 30}),
        of(ATARI | {"max_episode_frames": 1_000}, {"algorithm": "dqn"}),
        of(
            ATARI | {"max_episode_frames": 100},
            {"algorithm": "dqn"},
            evaluation={"max_minutes": 100 / 3_600},
        ),
        of(ATARI | {"max_episode_frames": 56}, {"algorithm": "dqn"}),
        of(CARTPOLE | {"max_episode_steps": 56}, DQN),
        of(CARTPOLE | {"max_episode_steps": 31}, DQN, evaluation={"noop_max": 30}),
        of(ATARI | {"noop_max": 499, "max_episode_frames": 500}, {"algorithm": "dqn"}),
        of(CARTPOLE, DQN | {"replay_capacity": 3, "replay_start": 3, **SMALL_BATCH}),
        of(CARTPOLE, R2D2 | {"replay_capacity": 256 * 205}, **STEPS),
        # Only the no-ops count, but --set must be able to choose them for a spec that ranks starts.
        of(CARTPOLE, DQN, evaluation={"noop_max": 30, "candidates": 2000, "min_actions": 5}),
        of(CARTPOLE, {"algorithm": "dqn", "network": {"dense": [8], "activation": "tanh"}}),
        of(ATARI, {"algorithm": "impala", "network": "residual", "hidden_units": 256}),
        kernels(ATARI, (8, 4), (4, 2), (9, 1)),
        mission(["go", "to"]),
        of(CARTPOLE, DQN, accelerator={"numerics": "portable-v2"}, determinism={"threads": 2}),
        of(CARTPOLE, IMPALA, determinism={"threads": 2}),
        of(CARTPOLE, R2D2, **STEPS, determinism={"threads": 2}),
        *(
            of(
                CARTPOLE,
                IMPALA,
                accelerator={"numerics": "portable-v2"},
                determinism={"threads": n},
            )
            for n in (1, None)
        ),
        of(
            CARTPOLE,
            DQN | {"total_steps": 400_000},
            recording={"trace_interval": 100, "tensor_interval": 100, "checkpoint_interval": 100},
            evaluation={"interval": 100},
        ),
    ],
)
def test_settings_with_an_effect_are_accepted(tmp_path, sections):
    assert load_spec(write(tmp_path, sections)).name == "x"


@pytest.mark.parametrize("minutes", [0.0002, 0.0005, 0.01])
def test_where_no_length_of_play_would_do_removing_it_does(tmp_path, minutes):
    """An episode has fewer frames than a step: shorter plays have no step, longer no effect."""
    task = ATARI | {"noop_max": 0, "max_episode_frames": 2}
    starts = {"min_actions": 0, "max_actions": 0}
    spec = of(task, {"algorithm": "dqn"}, evaluation=starts | {"max_minutes": minutes})
    with pytest.raises(CapsuleError) as caught:
        load_spec(write(tmp_path, spec))
    assert f"evaluation.max_minutes {minutes}" in caught.value.message
    assert "remove evaluation.max_minutes" in caught.value.fix.lower()
    assert load_spec(write(tmp_path, spec | {"evaluation": starts})).name == "x"


@pytest.mark.parametrize(
    "package",
    [
        "requirements.txt",
        "requirements/base.in",
        "-r requirements.txt",
        "--index-url https://example.org/simple",
        "./alpha",
        "/wheels/alpha-1.0-py3-none-any.whl",
        "alpha-1.0-py3-none-any.whl",
        "alpha-1.0.tar.gz",
        "https://example.org/alpha-1.0-py3-none-any.whl",
        "git+https://example.org/alpha.git",
    ],
)
def test_a_file_an_address_or_an_option_is_not_a_package(tmp_path, package):
    path = write(tmp_path, {**PROGRAM, "image": {"packages": ["numpy", package]}})
    with pytest.raises(CapsuleError) as caught:
        load_spec(path)
    assert caught.value.code == "CAP-S003"
    assert ": image.packages.1: " in caught.value.message
    assert repr(package) in caught.value.message
    assert "numpy==2.4.6" in caught.value.fix
    assert "no field takes a requirements file" in caught.value.fix
    assert "image.sources.find_links" in caught.value.fix


@pytest.mark.parametrize(
    "package",
    ["zope.interface", "ruamel.yaml>=0.18", "a.txt2==1", "a>=1; sys_platform == 'a/b'"],
)
def test_a_package_may_have_a_dot_in_its_name(tmp_path, package):
    spec = load_spec(write(tmp_path, {**PROGRAM, "image": {"packages": [package]}}))
    assert spec.image.packages == (package,)
