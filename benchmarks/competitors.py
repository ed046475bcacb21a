"""The competitors of IMPALA's benchmark: EnvPool with a learner in torch, and Sample Factory.

Both play the game of ``impala.py`` with its network, unrolls and batches, in a virtual environment
without Capsule. A contender's settings are the keyword arguments of its function; each is tried
with all of ``ENVPOOL_SETTINGS`` or ``SAMPLE_FACTORY_SETTINGS``, for two processors.

EnvPool (Weng et al. 2022, arXiv:2206.10558) plays in threads of C++. The learner is plain torch, of
``plain_impala.py``. Sample Factory (Petrenko et al. 2020, arXiv:2006.11751) runs its APPO with one
epoch and generalised advantages, because the learner of version 2.1.1 fails with V-trace. Its Atari
example has different preprocessing (it resizes in colour) and does not find the games of ale-py
0.12, so the game is registered as a custom environment: either the game with Gymnasium's wrappers,
or EnvPool's games in batches.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plain_impala import (
    BATCH,
    FRAMES,
    GAME,
    UNROLL,
    WARM_UP,
    Pauses,
    make_torch_learner,
    make_torch_network,
    shallow_torso,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENVPOOL_SETTINGS: Sequence[dict[str, Any]] = (
    {"num_envs": 32, "batch_size": 32, "learner_threads": 1, "overlapped": True},
    {"num_envs": 32, "batch_size": 32, "learner_threads": 2, "overlapped": True},
    {"num_envs": 64, "batch_size": 32, "learner_threads": 1, "overlapped": True},
    {"num_envs": 32, "batch_size": 32, "learner_threads": 2, "overlapped": False},
    {"num_envs": 32, "batch_size": 16, "learner_threads": 2, "overlapped": False},
    {"num_envs": 64, "batch_size": 32, "learner_threads": 2, "overlapped": False},
)
SAMPLE_FACTORY_SETTINGS: Sequence[dict[str, Any]] = (
    {"env": "gymnasium", "num_workers": 2, "num_envs_per_worker": 8, "worker_num_splits": 2},
    {"env": "gymnasium", "num_workers": 2, "num_envs_per_worker": 16, "worker_num_splits": 2},
    {"env": "gymnasium", "num_workers": 4, "num_envs_per_worker": 8, "worker_num_splits": 2},
    {"env": "envpool", "num_workers": 1, "env_agents": 32},
    {"env": "envpool", "num_workers": 2, "env_agents": 16},
    {"env": "envpool", "num_workers": 2, "env_agents": 32},
    {"env": "envpool", "num_workers": 1, "env_agents": 16, "serial_mode": True, "async_rl": False},
)


# EnvPool


def make_pool(num_envs: int, batch_size: int, num_threads: int = 2, seed: int = 0) -> Any:
    """Return EnvPool's games, with the preprocessing of Capsule's."""
    import envpool

    return envpool.make(
        f"{GAME.capitalize()}-v5",
        env_type="gymnasium",
        num_envs=num_envs,
        batch_size=batch_size,
        num_threads=num_threads,
        seed=seed,
        frame_skip=FRAMES,
        episodic_life=True,
        reward_clip=True,
        use_fire_reset=False,
    )


def envpool_alone(segment: int, *, num_envs: int) -> Iterator[int]:
    """Play EnvPool's games at random; yield the number of steps of each segment."""
    import numpy as np

    games, noise = make_pool(num_envs, num_envs), np.random.default_rng(0)
    games.reset()
    while True:
        for _ in range(segment // num_envs):
            games.step(noise.integers(games.action_space.n, size=num_envs, dtype=np.int32))
        yield segment // num_envs * num_envs


def envpool(
    segment: int, *, num_envs: int, batch_size: int, learner_threads: int, overlapped: bool
) -> Iterator[int]:
    """Learn from EnvPool's games; yield the number of steps of each segment.

    Args:
        segment: Steps of each segment after the first.
        num_envs: Number of games.
        batch_size: Number of games whose observations are evaluated together, as soon as they are
            ready.
        learner_threads: Threads that learn and, if play and learning do not overlap, also act.
        overlapped: Whether another thread plays the next batch while this thread learns.
    """
    import torch

    torch.set_num_threads(learner_threads)
    acting, learning = make_torch_network(), make_torch_network()
    acting.load_state_dict(learning.state_dict())
    learn = make_torch_learner(learning)
    batches = play(acting, make_pool(num_envs, batch_size), num_envs)
    # OpenMP keeps the count of threads per thread.
    player = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    ready = next(batches)
    for steps in chain([WARM_UP * BATCH * UNROLL], repeat(segment)):
        for _ in range(steps // (BATCH * UNROLL)):
            coming = player.submit(next, batches) if overlapped else None
            learn(ready)
            # No batch is being played when a segment ends and another contender has its turn.
            ready = coming.result() if coming else next(batches)
            acting.load_state_dict(learning.state_dict())
        yield steps


def play(network: Any, games: Any, num_envs: int) -> Iterator[dict[str, Any]]:
    """Yield batches of unrolls, in the order in which games finish them."""
    import numpy as np
    import torch

    rows = UNROLL + 1
    unrolls: dict[str, NDArray[Any]] = {
        "observations": np.zeros((num_envs, rows, 4, 84, 84), np.uint8),
        "rewards": np.zeros((num_envs, rows), np.float32),
        "ended": np.zeros((num_envs, rows), np.bool_),
        "actions": np.zeros((num_envs, rows), np.int64),
        "log_behaviour": np.zeros((num_envs, rows), np.float32),
    }
    row_of = np.zeros(num_envs, np.int64)
    finished: list[dict[str, Any]] = []
    games.async_reset()
    while True:
        observations, rewards, terminated, truncated, info = games.recv()
        envs = info["env_id"]
        at = row_of[envs]
        unrolls["observations"][envs, at] = observations
        unrolls["rewards"][envs, at] = rewards
        unrolls["ended"][envs, at] = terminated | truncated
        done = envs[at == UNROLL]
        finished += [{name: array[env].copy() for name, array in unrolls.items()} for env in done]
        for array in unrolls.values():
            array[done, 0] = array[done, UNROLL]
        at[at == UNROLL] = 0
        with torch.inference_mode():
            logits, _ = network(torch.from_numpy(observations))
            policy = torch.distributions.Categorical(logits=logits)
            actions = policy.sample()
            unrolls["log_behaviour"][envs, at] = policy.log_prob(actions).numpy()
        unrolls["actions"][envs, at] = actions.numpy()
        row_of[envs] = at + 1
        games.send(actions.numpy().astype(np.int32), envs)
        while len(finished) >= BATCH:
            batch, finished = finished[:BATCH], finished[BATCH:]
            yield {
                name: torch.from_numpy(np.stack([unroll[name] for unroll in batch], 1))
                for name in unrolls
            }


# Sample Factory


def sample_factory(segment: int, **settings: Any) -> Iterator[int]:
    """Run Sample Factory in another thread, and yield the number of steps of each segment.

    Args:
        segment: Steps of each segment after the first.
        settings: Options of Sample Factory.
    """
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.train import make_runner

    directory = Path(tempfile.mkdtemp(prefix="capsule-benchmark-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    log = directory / "log"
    errors = os.dup(2)
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)  # of all its processes, which write a line for every event
    pauses = Pauses(segment)

    class Segments(AlgoObserver):  # type: ignore[misc]
        def on_training_step(self, _runner: Any, updates: int) -> None:
            pauses.reached(updates * BATCH * UNROLL)

    _, runner = make_runner(sample_factory_config(directory, settings))
    runner.register_observer(Segments())
    runner.init()
    # None in its serial mode.
    processes = [*getattr(runner, "processes", ()), *getattr(runner.sampler, "processes", ())]
    try:
        # The runner would wait forever for a process that has failed.
        yield from pauses.segments(runner.run, lambda: any(each.exitcode for each in processes))
    except RuntimeError as error:
        os.dup2(errors, 2)
        raise RuntimeError(f"Sample Factory has stopped:\n{log.read_text()[-5_000:]}") from error


def sample_factory_config(directory: Path, settings: dict[str, Any]) -> Any:
    """Return Sample Factory's configuration, with the game and the network registered."""
    from sample_factory.algo.utils.context import global_model_factory
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env

    register_env("gymnasium", make_single_game)
    register_env("envpool", make_batched_games)
    global_model_factory().register_encoder_factory(make_encoder)
    batched = settings["env"] == "envpool"
    options = {
        "algo": "APPO",
        "experiment": "benchmark",
        "train_dir": directory,
        "device": "cpu",
        "seed": 0,
        "async_rl": True,
        "batched_sampling": batched,
        "worker_num_splits": 1,
        "num_envs_per_worker": 1,
        "rollout": UNROLL,
        "batch_size": BATCH * UNROLL,
        "num_batches_per_epoch": 1,
        "num_epochs": 1,
        "with_vtrace": False,  # its summaries fail with V-trace: they read GAE's advantages
        "use_rnn": False,
        "nonlinearity": "relu",
        "normalize_input": False,
        "normalize_returns": False,
        "obs_scale": 255.0,
        "reward_clip": 1.0,
        "gamma": 0.99,
        "exploration_loss_coeff": 0.01,
        "value_loss_coeff": 0.5,
        "learning_rate": 0.0006,
        "max_grad_norm": 40.0,
        "env_frameskip": FRAMES,
        "env_framestack": 4,
        # Nothing is saved, and a process that waits for its turn does not count as lost.
        "save_every_sec": 10**6,
        "save_best_every_sec": 10**6,
        "heartbeat_reporting_interval": 10**6,
        **settings,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    parser, _ = parse_sf_args(arguments)
    parser.add_argument("--env_agents", type=int, default=1)
    return parse_full_cfg(parser, arguments)


def make_single_game(_name: str, _config: Any, _place: Any, _render_mode: str | None) -> Any:
    """Return the game with wrappers of Gymnasium 0.29 that give it Capsule's preprocessing."""
    import ale_py.registration
    import gymnasium
    import numpy as np
    from gymnasium.wrappers import AtariPreprocessing, FrameStack, TransformObservation

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale_py.registration.register_v0_v4_envs()  # ale-py itself does so from Gymnasium 1.0 on
    game = gymnasium.make(f"{GAME.capitalize()}NoFrameskip-v4")
    stacked = FrameStack(AtariPreprocessing(game, terminal_on_life_loss=True), 4)
    return TransformObservation(stacked, np.asarray)  # type: ignore[call-arg]  # of version 1


def make_batched_games(_name: str, config: Any, place: Any, _render_mode: str | None) -> Any:
    """Return EnvPool's games as one environment of many agents."""
    from sf_examples.envpool.envpool_wrappers import EnvPoolResetFixWrapper

    agents, threads = config.env_agents, max(1, 2 // config.num_workers)
    seed = place.env_id if place else 0  # it has no place where only its spaces are read
    pool = make_pool(agents, agents, threads, seed)
    pool.closed = True  # there is nothing to close, and Gymnasium 0.29 would look for a viewer
    games = EnvPoolResetFixWrapper(pool)
    games.num_agents = agents
    return games


def make_encoder(config: Any, _observations: Any) -> Any:
    """Return the shallow network up to its dense layer, as Sample Factory asks for it."""
    from sample_factory.model.encoder import Encoder

    class Shallow(Encoder):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config)
            self.layers = shallow_torso()

        def forward(self, observations: Any) -> Any:
            return self.layers(observations["obs"])

        def get_out_size(self) -> int:
            return 256

    return Shallow()
