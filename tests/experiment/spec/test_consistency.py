"""Sections that do not fit one another are rejected, with the field, its value and the remedy."""

import pytest

from capsule.experiment.spec import MAX_UNROLLS_OF_A_RECORD
from tests.experiment.specs import (
    ATARI,
    CARTPOLE,
    CUDA,
    DQN,
    IMAGES,
    IMPALA,
    MINATAR,
    PROGRAM,
    R2D2,
    TRAINERS,
    make_spec,
    refusal,
)

each_algorithm = pytest.mark.parametrize("algorithm", TRAINERS)
NATIVE = {"numerics": "native"}
OWN = {"network": {"module": "mine:Net"}}
TOLD = {"instruction": "order"}
SCORES = {"random": 20.0, "human": 400.0}
WORDS = {"language": {"vocabulary": ["left", "right"], "longest": 3}}


def atari(algorithm, network="nature", **changes):
    """Return a spec's document in which an algorithm plays an Atari game."""
    document = TRAINERS[algorithm]
    trainer = {**document["trainer"], "network": network}
    return {**document, "environment": ATARI, "trainer": trainer, **changes}


# ---- programs ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": ATARI}, "environment does not apply to trainer.command: remove it"),
        ({"evaluation": {"starts": 3}}, "evaluation does not apply to trainer.command: remove it"),
        ({"recording": {"trace_interval": 8}}, "recording does not apply to trainer.command"),
        (
            {"seeds": {"streams": {"minibatch": 1}}},
            "seeds.streams does not apply to trainer.command: give it seeds as arguments",
        ),
        (
            {"accelerator": {**CUDA, "cuda_graphs": True}},
            "accelerator.cuda_graphs does not apply to trainer.command",
        ),
    ],
)
def test_what_only_algorithms_use_is_rejected_for_a_program(changes, message):
    assert message in refusal(PROGRAM, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation": {"starts": 100}},
        {"recording": {"trace_interval": 4}},
        {"seeds": {"root": 3}},
        {"accelerator": CUDA},
    ],
)
def test_defaults_and_what_programs_use_are_accepted(changes):
    make_spec(PROGRAM, **changes)


# ---- intervals ----

INTERVALS = [
    ("recording", "trace_interval"),
    ("recording", "tensor_interval"),
    ("recording", "checkpoint_interval"),
    ("evaluation", "interval"),
]


@pytest.mark.parametrize(("section", "name"), INTERVALS)
@pytest.mark.parametrize(("algorithm", "unit"), [("dqn", 4), ("r2d2", 160), ("impala", 160)])
def test_intervals_are_multiples_of_the_steps_between_updates(algorithm, unit, section, name):
    wrong = 10 * unit + 1
    message = refusal(TRAINERS[algorithm], **{section: {name: wrong}})
    said = f"{section}.{name} {wrong} is not a multiple of the {unit} steps between parameter"
    assert said in message


def test_the_unit_of_dqn_is_the_update_interval_of_the_spec():
    every = {"update_interval": 8, "target_interval": 8_000}
    make_spec(trainer=every, recording={"trace_interval": 8, "tensor_interval": 800})
    assert "trace_interval 4 is not a multiple of the 8 steps" in refusal(trainer=every)


def test_tensors_are_recorded_with_a_trace_record():
    message = refusal(recording={"trace_interval": 12, "tensor_interval": 1_000})
    assert "recording.tensor_interval 1000 is not a multiple of recording.trace_interval 12" in (
        message
    )
    make_spec(recording={"trace_interval": 12, "tensor_interval": 12})


def test_states_are_kept_at_the_end_of_a_trace_record():
    recording = {"trace_interval": 8, "tensor_interval": 80, "checkpoint_interval": 100}
    make_spec(recording=recording)
    message = refusal(recording={**recording, "segment_states": True})
    assert (
        "recording.segment_states: recording.checkpoint_interval 100 is not a multiple of "
        "recording.trace_interval 8"
    ) in message
    make_spec(recording={**recording, "checkpoint_interval": 104, "segment_states": True})


def recording_every(steps):
    return {"trace_interval": steps, "tensor_interval": steps, "checkpoint_interval": steps}


def test_a_trace_record_names_only_so_many_unrolls():
    room = MAX_UNROLLS_OF_A_RECORD * 20 // 160 * 160
    make_spec(IMPALA, recording=recording_every(room))
    message = refusal(IMPALA, recording=recording_every(room + 160))
    assert (
        f"recording.trace_interval {room + 160} covers {(room + 160) // 20} unrolls, but a trace "
        f"record can name {MAX_UNROLLS_OF_A_RECORD} at most"
    ) in message


def test_a_trace_record_has_room_for_the_unrolls_of_all_members():
    members = {"population": {"members": 64, "references": {"CartPole-v1": SCORES}}}
    room = MAX_UNROLLS_OF_A_RECORD // 64 * 20 // 160 * 160
    make_spec(IMPALA, trainer=members, recording=recording_every(room))
    message = refusal(IMPALA, trainer=members, recording=recording_every(room + 160))
    assert f"can name {MAX_UNROLLS_OF_A_RECORD} at most" in message


# ---- networks ----

FITTING = {  # of environments, by algorithm
    ("dqn", "atari"): {"nature", "shallow"},
    ("r2d2", "atari"): {"nature", "residual"},
    ("impala", "atari"): {"nature", "shallow", "residual"},
    ("dqn", "images"): {"nature", "shallow", "small-conv"},
    ("r2d2", "images"): {"nature", "residual", "small-conv"},
    ("impala", "images"): {"nature", "shallow", "residual", "small-conv"},
    **{(algorithm, "flat"): {"mlp"} for algorithm in TRAINERS},
    **{(algorithm, "minatar"): {"small-conv"} for algorithm in TRAINERS},
}
ENVIRONMENTS = {"atari": ATARI, "flat": CARTPOLE, "images": IMAGES, "minatar": MINATAR}
SAID = {
    "atari": "environment.suite 'atari'",
    "flat": "environment.frames 'flat'",
    "images": "environment.frames 'image'",
    "minatar": "environment.suite 'minatar'",
}


@pytest.mark.parametrize("network", ["nature", "shallow", "residual", "small-conv", "mlp"])
@pytest.mark.parametrize("kind", ENVIRONMENTS)
@each_algorithm
def test_a_named_network_reads_the_frames_of_its_environment(algorithm, kind, network):
    document = {**TRAINERS[algorithm], "environment": ENVIRONMENTS[kind]}
    trainer = {"network": network}
    if network in FITTING[algorithm, kind]:
        assert make_spec(document, trainer=trainer).trainer.network == network
        return
    message = refusal(document, trainer=trainer)
    if (algorithm, network) in {("dqn", "residual"), ("r2d2", "shallow")}:  # it has no such network
        assert f"trainer.of an algorithm.{algorithm}.network" in message
        return
    assert f"trainer.network '{network}' does not fit {SAID[kind]}; use '" in message
    suggested = message.partition("; use '")[2].partition("'")[0]
    assert suggested in FITTING[algorithm, kind]
    make_spec(document, trainer={"network": suggested})


@pytest.mark.parametrize(
    ("environment", "network", "message"),
    [
        (IMAGES, {"dense": [64]}, "environment.frames 'image', whose frames are images: declare"),
        (MINATAR, {"dense": [64]}, "environment.suite 'minatar', whose frames are images: declare"),
        (
            CARTPOLE,
            {"convolutions": [{"filters": 4, "kernel": 2}]},
            "environment.frames 'flat', whose frames are vectors: remove it",
        ),
    ],
)
def test_declared_layers_read_the_frames_of_their_environment(environment, network, message):
    found = refusal({**DQN, "environment": environment}, trainer={"network": network})
    assert f"trainer.network.convolutions does not fit {message}" in found


@pytest.mark.parametrize(
    ("environment", "network"),
    [
        (CARTPOLE, {"dense": [64]}),
        (ATARI, {"convolutions": [{"filters": 4, "kernel": 2}], "dense": [8]}),
    ],
)
def test_declared_layers_that_fit_are_accepted(environment, network):
    make_spec({**DQN, "environment": environment}, trainer={"network": network})


@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_a_user_module_reads_any_frames(environment):
    make_spec({**DQN, "environment": environment}, trainer=OWN, accelerator=NATIVE)


@pytest.mark.parametrize(
    ("accelerator", "numerics"),
    [
        ({}, "portable-v3"),
        ({"numerics": "portable-v3-strict"}, "portable-v3-strict"),
        (CUDA, "portable-v3"),
    ],
)
def test_no_profile_is_promised_of_a_user_module(accelerator, numerics):
    message = refusal(trainer=OWN, accelerator=accelerator)
    assert "trainer.network.module 'mine:Net' requires accelerator.numerics 'native'" in message
    assert f"'{numerics}' promises the same bits on other processors" in message


# ---- CUDA graphs ----


@pytest.mark.parametrize("algorithm", ["dqn", "r2d2"])
def test_graphs_are_supported_for_learners_of_q_values(algorithm):
    make_spec(TRAINERS[algorithm], accelerator={**CUDA, "cuda_graphs": True})


@pytest.mark.parametrize(
    ("document", "trainer", "message"),
    [
        (IMPALA, {}, "by trainer.algorithm 'impala': remove it"),
        (DQN, OWN, "with trainer.network.module 'mine:Net', which may wait for the device: remove"),
    ],
)
def test_graphs_are_rejected_where_they_are_not_supported(document, trainer, message):
    accelerator = {**CUDA, **NATIVE, "cuda_graphs": True}
    found = refusal(document, trainer=trainer, accelerator=accelerator)
    assert f"accelerator.cuda_graphs is not supported {message}" in found
    make_spec(document, trainer=trainer, accelerator={**CUDA, **NATIVE})


# ---- evaluation ----


@pytest.mark.parametrize("algorithm", ["dqn", "r2d2"])
def test_q_values_are_not_sampled_from(algorithm):
    assert (
        f"evaluation.actions 'sampled' does not apply to trainer.algorithm {algorithm!r}, whose "
        "Q-values are not probabilities: use 'greedy'"
    ) in refusal(TRAINERS[algorithm], evaluation={"actions": "sampled"})


def test_a_policy_is_sampled_from():
    assert make_spec(IMPALA, evaluation={"actions": "sampled"}).evaluation.actions == "sampled"


@pytest.mark.parametrize("suite", ["gymnasium", "minatar"])
def test_an_action_sweep_needs_lives(suite):
    assert make_spec(atari("dqn"), evaluation={"action_sweep": True}).evaluation.action_sweep
    document = DQN if suite == "gymnasium" else atari("dqn", "small-conv", environment=MINATAR)
    message = refusal(document, evaluation={"action_sweep": True})
    assert f"evaluation.action_sweep does not apply to environment.suite {suite!r}" in message
    assert "remove it" in message


def pinned(task, *, full_action_set=False):
    """Return an evaluation from a start set that was made with another run."""
    counts = {"candidates": 3, "shortlist": 2, "min_actions": 0, "max_actions": 5}
    start_set = {
        "schema": "capsule/starts/v1",
        "run": "a" * 64,
        "task": task,
        "full_action_set": full_action_set,
        "starts": [[0, 1], []],
        **counts,
    }
    return {"starts": 2, "start_set": start_set, **counts}


@pytest.mark.parametrize(
    ("document", "task"), [(atari("dqn"), "breakout"), (DQN, "CartPole-v1"), (R2D2, "CartPole-v1")]
)
def test_a_start_set_of_the_same_task_is_accepted(document, task):
    assert make_spec(document, evaluation=pinned(task)).evaluation.start_set.task == task


@pytest.mark.parametrize(
    ("document", "evaluation", "message"),
    [
        (atari("dqn"), pinned("pong"), "the task is 'pong', but in this spec it is 'breakout'"),
        (DQN, pinned("breakout"), "the task is 'breakout', but in this spec it is 'CartPole-v1'"),
        (
            atari("dqn", environment={**ATARI, "full_action_set": True}),
            pinned("breakout"),
            "full_action_set is False, but in this spec it is True",
        ),
        (
            DQN,
            pinned("CartPole-v1", full_action_set=True),
            "full_action_set is True, but in this spec it is False",
        ),
    ],
)
def test_pinned_starts_of_another_task_are_rejected(document, evaluation, message):
    found = refusal(document, evaluation=evaluation)
    assert f"evaluation.start_set was made in an environment where {message}: make" in found


# ---- several games ----

GAMES = atari(
    "impala",
    environment={**ATARI, "further_games": ["pong"], "full_action_set": True},
    evaluation={"interval": 1_600, "noop_max": 30},
)


def test_several_games_are_accepted_with_impala():
    make_spec(GAMES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"environment": {"further_games": ["breakout"]}},
            "environment.further_games: a game is named twice in breakout, breakout",
        ),
        (
            {"environment": {"further_games": ["pong", "alien", "pong"]}},
            "a game is named twice in breakout, pong, alien, pong",
        ),
        ({"environment": {"full_action_set": False}}, "requires environment.full_action_set: true"),
        ({"evaluation": {"noop_max": 0}}, "requires evaluation.noop_max greater than 0"),
        ({"trainer": {"actors": 17}}, "trainer.actors 17 is not a multiple of the 2 games"),
        ({"evaluation": {"starts": 3}}, "evaluation.starts 3 is not a multiple of the 2 games"),
    ],
)
def test_games_that_do_not_fit_are_rejected(changes, message):
    lag = {"schedule": {"mode": "lockstep", "policy_lag": 9}}
    trainer = {**lag, **changes.get("trainer", {})}
    assert message in refusal(GAMES, **{**changes, "trainer": trainer})


@pytest.mark.parametrize("algorithm", ["dqn", "r2d2"])
def test_only_impala_plays_several_games(algorithm):
    document = atari(algorithm, environment=GAMES["environment"])
    assert (
        f"environment.further_games does not apply to trainer.algorithm '{algorithm}': remove it, "
        "or use 'impala'"
    ) in refusal(document)


# ---- instructions ----


def test_an_instruction_and_its_reader_are_accepted_together():
    make_spec(IMPALA, environment=TOLD, trainer=WORDS)


@pytest.mark.parametrize(
    ("document", "changes", "message"),
    [
        (DQN, {"environment": TOLD}, "'order' is not read by trainer.algorithm 'dqn': remove it"),
        (R2D2, {"environment": TOLD}, "'order' is not read by trainer.algorithm 'r2d2': remove it"),
        (IMPALA, {"environment": TOLD}, "'order' is not read: list its words in trainer.language"),
        (IMPALA, {"trainer": WORDS}, "trainer.language requires environment.instruction"),
        (
            atari("impala", "small-conv", environment=MINATAR),
            {"trainer": WORDS},
            "trainer.language requires environment.instruction, the entry",
        ),
    ],
)
def test_an_instruction_needs_a_reader_and_a_reader_an_instruction(document, changes, message):
    assert message in refusal(document, **changes)


# ---- populations ----


def test_the_references_of_a_population_are_those_of_the_tasks():
    assert "trainer.population.references lacks 'CartPole-v1'" in refusal(
        IMPALA, trainer={"population": {}}
    )
    scores = {"references": {"CartPole-v1": SCORES}}
    make_spec(IMPALA, trainer={"population": scores})
