"""CartPole on other planets: a module of ``environment.modules``.

``capsule-tests/CartPole-v0`` is Gymnasium's, with the gravity of the environment variable
``PHYSICS_GRAVITY``, which no spec knows of: it stands for another version of the package.
"""

import os

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

NAME = "capsule-tests/CartPole-v0"


class OtherCartPole(CartPoleEnv):
    """See the module."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gravity = float(os.environ.get("PHYSICS_GRAVITY", "9.8"))


gymnasium.register(NAME, OtherCartPole)
