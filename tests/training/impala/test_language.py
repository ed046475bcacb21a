"""IMPALA told what to do: from a BabyAI mission to the learner, runs, refusals, and that it reads.

``capsule-tests/Orders-v0`` says in every step which of two actions earns a point; nothing else
tells. So an agent that does not read earns half of the points, and one that reads too late as well.
"""

import json
from itertools import chain

import gymnasium
import numpy as np
import pytest
import torch
import xxhash
from gymnasium import spaces
from minigrid.envs.babyai.core import verifier
from pydantic import ValidationError

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import CpuAccelerator, GymnasiumEnvironment, SeedsSpec
from capsule.experiment.trainers import LanguageSpec
from capsule.training.acting.actor_worker import ActorRequest
from capsule.training.environments import make_environment
from capsule.training.evaluation.protocol import evaluate, evaluation_environments, generate_starts
from capsule.training.impala.actors.actor_worker import UnrollSettings, UnrollWorker
from capsule.training.impala.actors.unrolls import Unroll
from capsule.training.impala.factory import make_network
from capsule.training.networks.actor_critic import ActorCriticNetwork
from capsule.training.networks.feedforward import Parameters, initialize
from capsule.training.networks.language import BABYAI_WORDS, NO_WORD, make_vocabulary
from capsule.training.state.streams import Stream, make_streams
from tests.conftest import one_processor
from tests.training.conftest import (
    claimed,
    finish_run,
    kill_when_traced,
    make_spec,
    merge,
    new_run,
)

pytestmark = pytest.mark.usefixtures("deterministic")

BABYAI = {
    "schema": "capsule/spec/v1",
    "name": "impala-babyai",
    "environment": {
        "suite": "gymnasium",
        "id": "BabyAI-GoToLocalS5N2-v0",
        "modules": ["minigrid"],
        "observation": "image",
        "instruction": "mission",
        "max_episode_steps": 7,
    },
    "trainer": {
        "algorithm": "impala",
        "network": "mlp",
        "hidden_units": 16,
        "recurrent_units": 8,
        "language": {"longest": 9},
        "actors": 6,
        "unroll_length": 5,
        "batch_size": 4,
        "micro_batches": [3, 1],
        "total_steps": 320,
    },
    "evaluation": {
        "interval": 160,
        "starts": 3,
        "candidates": 6,
        "shortlist": 4,
        "min_actions": 0,
        "max_actions": 3,
        "max_minutes": 0.01,
        "actions": "sampled",
    },
    "recording": {"trace_interval": 20, "tensor_interval": 80, "checkpoint_interval": 80},
}
NAME = "capsule-tests/Orders-v0"
STEPS = 12  # of an episode
ORDERS = merge(
    BABYAI,
    {
        "environment": {
            "id": NAME,
            "modules": [],
            "observation": "sight",
            "instruction": "order",
            "max_episode_steps": STEPS,
        },
        "trainer": {
            "language": {"vocabulary": ["left", "right", "go"], "longest": 3},
            "recurrent_units": 0,
            "actors": 8,
            "batch_size": 8,
            "micro_batches": [8],
            "discount": 0.0,
            "learning_rate": 0.02,
            "total_steps": 4_000,
        },
        "evaluation": {"interval": 4_000},
        "recording": {
            "trace_interval": 400,
            "tensor_interval": 4_000,
            "checkpoint_interval": 4_000,
        },
    },
)
BOTH = pytest.mark.parametrize(
    "numerics", ["portable-v3", "portable-v2"], ids=["chained", "library"]
)


class Orders(gymnasium.Env):
    """See the module."""

    observation_space = spaces.Dict(
        {"sight": spaces.Box(0, 1, (1,), np.float32), "order": spaces.Text(20)}
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        del options
        self.count = 0
        return self._next(), {}

    def step(self, action):
        reward = float(action == self.wanted)
        self.count += 1
        return self._next(), reward, self.count == STEPS, False, {}

    def _next(self):
        self.wanted = int(self.np_random.integers(2))
        order = ("Go left!", "go, right")[self.wanted]
        return {"sight": np.ones(1, np.float32), "order": order}


gymnasium.register(NAME, Orders)


@pytest.fixture
def make(open_trainer):
    """A function that makes a trainer of BABYAI, or of another task."""
    return lambda document=BABYAI, *arguments, **options: open_trainer(
        document, *arguments, **options
    )


def settings_of(document=BABYAI, numerics="native", **changes):
    """Return what makes the actors of a spec, and parameters of its network, drawn at random."""
    spec = make_spec(document, **changes).training()
    example = make_environment(spec.environment, make_streams(spec.seeds), training=True)
    network = make_network(spec.trainer, example, CpuAccelerator(numerics=numerics))
    parameters = Parameters(network.shapes, torch.device("cpu"))
    initialize(parameters, Stream("initialization", 1))
    settings = UnrollSettings(
        tasks=(spec.environment,),
        seeds=spec.seeds,
        network=network,
        steps=spec.trainer.unroll_length,
        vocabulary=make_vocabulary(spec.trainer.language),
    )
    return settings, parameters.flat.numpy()


def unrolls(worker, parameters, actors, times):
    """Let actors unroll again and again; return for each time what they did, and came to be."""
    return [
        worker.play([ActorRequest(actor, 0) for actor in actors], {0: parameters}, 0)
        for _ in range(times)
    ]


def text_of(row, words=BABYAI_WORDS):
    return " ".join(words[number] for number in row if number != NO_WORD)


def missions_of(actor, actions):
    """Play actions in minigrid itself; return the mission of each row of the unrolls, in order.

    The last frame of a truncated episode has a row of its own.
    """
    task = gymnasium.make("BabyAI-GoToLocalS5N2-v0", max_episode_steps=7, disable_env_checker=True)
    seeds = Stream("environment", 0, actor)
    observation, _ = task.reset(seed=seeds.integer(2**32))
    missions = [observation["mission"]]
    for action in actions:
        observation, _, terminated, truncated, _ = task.step(action)
        if truncated and not terminated:
            missions.append(observation["mission"])
        if terminated or truncated:
            observation, _ = task.reset(seed=seeds.integer(2**32))
        missions.append(observation["mission"])
    return missions


# --- from the mission to the learner --------------------------------------------------------------


@pytest.mark.slow
def test_every_row_of_an_unroll_has_the_mission_of_its_episode():
    settings, parameters = settings_of()
    worker = UnrollWorker(settings, range(2))
    times = unrolls(worker, parameters, range(2), 4)
    for actor in range(2):
        played = [each[actor].experience for each in times]
        actions = np.concatenate([unroll.actions[unroll.acted] for unroll in played])
        missions = missions_of(actor, actions.tolist())
        assert len(set(missions)) > 2
        for number, unroll in enumerate(played):
            assert unroll.instructions.dtype == np.int64
            assert unroll.instructions.shape == (6, 9)
            told = [text_of(row) for row in unroll.instructions]
            assert told == missions[5 * number : 5 * number + 6]


def test_an_instruction_that_changes_within_an_episode_is_heard_at_once():
    settings, parameters = settings_of(ORDERS)
    [[played]] = unrolls(UnrollWorker(settings, [3]), parameters, [3], 1)
    task = gymnasium.make(NAME, disable_env_checker=True)
    observation, _ = task.reset(seed=Stream("environment", 0, 3).integer(2**32))
    orders = [observation["order"]]
    orders += [task.step(action)[0]["order"] for action in played.experience.actions]
    found = [text_of(row, ("go", "left", "right")) for row in played.experience.instructions]
    assert found == [{"Go left!": "go left", "go, right": "go right"}[order] for order in orders]
    assert len(set(found)) == 2


def test_the_learner_reads_what_the_actors_were_told(make, monkeypatch):
    learner, read, batches = make(), [], []
    unroll, learn = ActorCriticNetwork.unroll, learner._learners.differentiate

    def spied(self, parameters, seen):
        if len(seen.observations) > 1:  # more than a step of acting
            read.append(seen.instructions)
        return unroll(self, parameters, seen)

    monkeypatch.setattr(ActorCriticNetwork, "unroll", spied)
    learner._learners.differentiate = lambda shards: (
        batches.append(list(chain(*shards))) or learn(shards)
    )
    learner.train_step()
    told = np.stack([unroll.instructions for unroll in batches[0]], 1)
    first, second = sorted(read, key=lambda each: -each.shape[1])
    np.testing.assert_array_equal(np.concatenate((first, second), 1), told)
    assert len(np.unique(told.reshape(-1, 9), axis=0)) > 2


def test_one_update_moves_the_embeddings_of_the_words_that_were_told_and_of_no_other(make):
    learner = make(trainer={"learning_rate": 0.05})
    table = learner.online.views["language.embedding.weight"]
    others = {
        name: view.clone()
        for name, view in learner.online.views.items()
        if name.startswith("language.lstm.")
    }
    before, told = table.clone(), []
    learn = learner._learners.differentiate
    learner._learners.differentiate = lambda shards: told.extend(chain(*shards)) or learn(shards)
    learner.train_step()
    moved = [number for number in range(32) if not torch.equal(before[number], table[number])]
    numbers = np.unique(np.concatenate([unroll.instructions.ravel() for unroll in told]))
    assert moved == [number for number in numbers.tolist() if number != NO_WORD]
    for name, view in others.items():
        assert not torch.equal(view, learner.online.views[name])


def test_a_digest_covers_what_was_told():
    settings, parameters = settings_of()
    [[played]] = unrolls(UnrollWorker(settings, [0]), parameters, [0], 1)
    other = played.experience.instructions.copy()
    other[-1, 0] ^= 1
    assert played.experience._replace(instructions=other).digest() != played.experience.digest()


def test_without_instructions_an_unroll_has_none_and_its_digest_is_of_all_the_rest():
    changes = {"environment": {"instruction": None}, "trainer": {"language": None}}
    settings, parameters = settings_of(**changes)
    assert not any("language" in name for name in settings.network.shapes)
    [[played]] = unrolls(UnrollWorker(settings, [0]), parameters, [0], 1)
    assert played.experience.instructions.shape == (6, 0)
    digest = xxhash.xxh3_64()
    for name in Unroll._fields:
        if name != "instructions":
            digest.update(np.ascontiguousarray(getattr(played.experience, name)).data)
    assert digest.hexdigest() == played.experience.digest()


# --- the same bits --------------------------------------------------------------------------------


@BOTH
def test_actors_do_the_same_alone_and_together(numerics):
    settings, parameters = settings_of(numerics=numerics)
    together = unrolls(UnrollWorker(settings, range(5)), parameters, range(5), 3)
    for actor in (0, 3):
        alone = unrolls(UnrollWorker(settings, [actor]), parameters, [actor], 3)
        for [mine], everyone in zip(alone, together, strict=True):
            assert mine.experience.digest() == everyone[actor].experience.digest()


def test_what_an_actor_is_told_reaches_what_it_does():
    settings, parameters = settings_of()
    [[told]] = unrolls(UnrollWorker(settings, [0]), parameters, [0], 1)
    words = settings.vocabulary.words
    settings.vocabulary._numbers = {word: 31 - number for number, word in enumerate(words)}
    [[otherwise]] = unrolls(UnrollWorker(settings, [0]), parameters, [0], 1)
    assert not np.array_equal(told.experience.log_behaviour, otherwise.experience.log_behaviour)


def test_an_actor_goes_on_elsewhere_from_its_snapshot_with_its_mission():
    settings, parameters = settings_of()
    whole, other = UnrollWorker(settings, [1, 4]), UnrollWorker(settings, [1, 4])
    first, second = unrolls(whole, parameters, [1, 4], 2)
    unrolls(other, parameters, [1, 4], 5)  # so that it has heard something else by now
    snapshots = {
        each.actor: each.after._replace(document=json.loads(json.dumps(each.after.document)))
        for each in first
    }
    other.restore(snapshots)
    [again] = unrolls(other, parameters, [1, 4], 1)
    for mine, theirs in zip(again, second, strict=True):
        assert text_of(mine.experience.instructions[0]).startswith("go to ")
        assert mine.experience.digest() == theirs.experience.digest()


def test_an_environment_returns_to_its_instruction_or_says_that_it_does_not():
    spec = GymnasiumEnvironment.model_validate_json(json.dumps(ORDERS["environment"]))
    environment = make_environment(spec, make_streams(SeedsSpec()), training=True)
    assert environment.instruction == ""
    environment.reset()
    state, instruction = environment.state(), environment.instruction
    while environment.instruction == instruction:
        environment.step(0)
    environment.restore(state)
    assert environment.instruction == instruction
    environment.instruction = "go back"
    assert environment.state() != state  # the sight is the same


@pytest.mark.slow
def test_a_learner_goes_on_from_its_state(make):
    whole, resumed = make(), make()
    while whole.step < 100:
        whole.train_step()
    state, tensors = json.loads(json.dumps(whole.state())), whole.tensors()
    resumed.restore(whole.step, state, tensors)
    for learner in (whole, resumed):
        while learner.step < 200:
            learner.train_step()
    assert whole.loss == resumed.loss
    assert torch.equal(whole.online.flat, resumed.online.flat)


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def babyai_run(tmp_path_factory):
    """A finished run in one process; not to be changed."""
    directory = new_run(tmp_path_factory.mktemp("language") / "one", make_spec(BABYAI))
    with one_processor():
        status, errors = finish_run(directory, warm=False)
    assert status == 0, errors
    return directory


@pytest.mark.slow
def test_a_run_is_evaluated(babyai_run):
    result, files = claimed(babyai_run)
    assert result["complete"]
    points = json.loads(files[contract.EVALUATION])["points"]
    assert [point["step"] for point in points] == [0, 160, 320]
    assert all(1 <= length <= 7 for point in points for length in point["lengths"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["actor", "server"])
def test_a_run_is_equal_in_several_processes_whoever_evaluates_the_policy(
    babyai_run, tmp_path, mode
):
    again = new_run(tmp_path / mode, make_spec(BABYAI, trainer={"inference": {"mode": mode}}))
    status, errors = finish_run(again)
    assert status == 0, errors
    assert claimed(again) == claimed(babyai_run)


@pytest.mark.soak
@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bytes(babyai_run, tmp_path):
    directory = new_run(tmp_path / "killed", make_spec(BABYAI))
    kill_when_traced(directory, (babyai_run / contract.TRACE).stat().st_size * 0.6)
    assert not (directory / contract.RESULT).exists()
    status, errors = finish_run(directory)
    assert status == 0, errors
    assert "resume" in (directory / contract.EVENTS).read_text()
    assert claimed(directory) == claimed(babyai_run)


# --- it reads -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_to_follow_orders(make):
    learner = make(ORDERS)
    while learner.step < 4_000:
        learner.train_step()
    assert learner.mean_return > 0.9 * STEPS  # half of them, if it did not read
    spec = learner._spec
    make_env = evaluation_environments(spec.environment, spec.seeds, 3)
    policy = learner.policy(learner.online)
    starts = generate_starts(make_env, 2, spec.evaluation, Stream("evaluation", 0), policy)
    point = evaluate(make_env, starts, spec.evaluation, policy, 4_000)
    for start, score in zip(starts, point.returns, strict=True):
        assert float.fromhex(score) == STEPS - len(start)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "message"),
    [
        ({"longest": 0}, "greater than 0"),
        ({"vocabulary": []}, "at least 1 item"),
        ({"vocabulary": "dmlab"}, "'babyai'"),
    ],
)
def test_a_reader_that_cannot_be_made_is_refused(language, message):
    with pytest.raises(ValidationError, match=message):
        make_spec(BABYAI, trainer={"language": language})


@pytest.mark.parametrize(
    ("changes", "message", "fix"),
    [
        ({"instruction": "image"}, "'image' is not a text of Dict", "Name one of mission."),
        ({"instruction": "task"}, "'task' is not a text of Dict", "Name one of mission."),
        (
            {"id": "CartPole-v1", "observation": None},
            r"'mission' is not a text of Box",
            "Remove it.",
        ),
    ],
)
def test_an_instruction_is_a_text_of_the_observation(make, changes, message, fix):
    with pytest.raises(CapsuleError, match=f"CAP-T216 environment.instruction {message}") as failed:
        make(environment=changes)
    assert failed.value.fix == fix


@pytest.mark.parametrize(
    ("language", "message", "fix"),
    [
        ({"vocabulary": ["go", "to"]}, "CAP-T242 .* which is not among the 2", "language.vocabul"),
        ({"longest": 4}, "CAP-T242 .* has 5 words; there is room for 4", "longest to 5 or more"),
        ({"vocabulary": ["go to"]}, "CAP-T241 .*'go to', which is not one word", "at spaces"),
    ],
)
def test_a_mission_that_the_vocabulary_cannot_say_is_refused(make, language, message, fix):
    with pytest.raises(CapsuleError, match=message) as failed:
        make(trainer={"language": language})
    assert fix in failed.value.fix


class Described(verifier.ObjDesc):
    """One of two equal things, whatever the grid."""

    def find_matching_objs(self, env, use_location=True):
        del env, use_location
        self.obj_set = [None, None]
        return self.obj_set, []


def test_by_default_there_is_room_for_the_longest_mission_of_babyais_grammar():
    """Of the verifier's sequences, one "after" the other has most words, each of two actions."""
    thing = Described("ball", "purple", "front")
    action = verifier.PutNextInstr(thing, thing)
    both = verifier.AndInstr(action, action)
    mission = verifier.AfterInstr(both, both).surface(None)
    row = make_vocabulary(LanguageSpec()).encode(mission)
    assert (len(row), NO_WORD in row) == (72, False)
