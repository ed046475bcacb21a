"""Small environments of every suite, and the functions with which tests play them."""

import xxhash

from capsule.experiment.spec import (
    AtariEnvironment,
    GymnasiumEnvironment,
    MinAtarEnvironment,
    SeedsSpec,
)
from capsule.training.environments import make_environment
from capsule.training.state.streams import Stream, make_streams

ATARI = AtariEnvironment(
    suite="atari", game="breakout", sticky_action_probability=0.25, max_episode_frames=500
)
CARTPOLE = GymnasiumEnvironment(suite="gymnasium", id="CartPole-v1")
MINATAR = [
    MinAtarEnvironment(suite="minatar", game=game)
    for game in ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
]


def make(spec, seed=0, *, training=True, **seeds):
    streams = make_streams(SeedsSpec(root=seed, **seeds))
    return make_environment(spec, streams, training=training), streams


def play(environment, actions):
    """Step through ``actions``, beginning episodes as needed; digest everything that came out."""
    digest, running = xxhash.xxh3_128(), False
    for action in actions:
        if not running:
            digest.update(environment.reset().tobytes())
        transition = environment.step(action)
        digest.update(transition.frame.tobytes())
        digest.update(repr(transition[1:]).encode())
        running = not transition.ended
    return digest.hexdigest()


def some_actions(environment, count, seed=0):
    return Stream("test-actions", seed).integers(environment.actions, count).tolist()
