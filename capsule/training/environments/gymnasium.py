"""Gymnasium environments with finitely many actions; a frame is a flat vector, or an image.

*Actions*. Where a space has several choices (``MultiDiscrete``, ``MultiBinary``), each combination
of them is one action, numbered in C order.

*Own and memory tasks* are made of these: ids that other packages or the source tree of the spec
register (``modules``), single entries of a
dictionary (``observation``) and numbers that the agent does not see (``hidden``). A text in a
dictionary can be the agent's ``instruction``.

*Time limits*. An episode is truncated where the environment says so, and after the steps that its
id is registered with: 200 for ``CartPole-v0``, 500 for ``CartPole-v1``, none for many others.
``max_episode_steps`` replaces the registered limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import GymnasiumEnvironment, StreamName
from capsule.training.environments.base import Environment, Frame, Transition, no_pictures
from capsule.training.state.frames import FrameLayout
from capsule.training.state.source_tree import import_module
from capsule.training.state.streams import Stream

MAX_ACTIONS = 4_096  # of a product of choices: each has an output of the network

_Space = spaces.Space[Any]
_FIX = (
    "name a registered environment, such as 'CartPole-v1', and in environment.modules the module "
    "that registers it"
)
_FINITE = (
    "use an environment with Discrete, MultiDiscrete or MultiBinary actions, register one in "
    "environment.modules that wraps this one, or run a program of your own (trainer.command)"
)


class GymnasiumTask(Environment):
    """One Gymnasium environment.

    A frame is float32 ``[numbers]``, an image, uint8 ``[channels, rows, columns]``, or both, packed
    as :mod:`capsule.training.state.frames` says.

    A flat observation is what :func:`gymnasium.spaces.flatten` returns: discrete ones are one-hot,
    entries of a dictionary come in the order of their names. An image is an observation of uint8
    ``[rows, columns, channels]`` or ``[rows, columns]``, and keeps its numbers. The numbers beside
    an image are those entries of the dictionary, flattened, in the order in which the spec names
    them.

    Streams:
        environment: one 32-bit seed per episode, for the environment's own generator.

    Raises:
        CapsuleError: CAP-T214, no such environment, or spaces of another kind; CAP-T216,
            ``observation``, ``frames``, ``numbers``, ``instruction`` or ``hidden`` does not fit
            the observations.
    """

    def __init__(self, spec: GymnasiumEnvironment, streams: Mapping[StreamName, Stream]) -> None:
        super().__init__({"environment": streams["environment"]})
        self._task = _make(spec)
        self._told = _told_entry(spec, self._task.observation_space)
        self._view = _view(spec, self._task.observation_space)
        self._choices = _choices(spec, self._task.action_space)
        self.actions = self._choices.number
        self.frame_shape, self.frame_dtype = self._view.shape, self._view.dtype
        self.frame_stack = spec.frame_stack

    @property
    def layout(self) -> FrameLayout:
        """See :class:`Environment`."""
        return self._view.layout

    @property
    def screen_rate(self) -> float:  # type: ignore[override]
        """What the environment states."""
        return float(self._task.metadata.get("render_fps") or Environment.screen_rate)

    def screen(self) -> NDArray[np.uint8]:
        """Return what the environment renders, which needs the libraries that it draws with."""
        # Set when it is needed only: making it so has some environments draw at every step.
        self._task.unwrapped.render_mode = "rgb_array"
        try:
            screen = self._task.render()
        except (gymnasium.error.Error, ImportError) as error:
            raise no_pictures(str(error)) from error
        if not (isinstance(screen, np.ndarray) and screen.dtype == np.uint8 and screen.ndim == 3):
            raise no_pictures(f"it renders {type(screen).__name__}, not an array of colours")
        return screen

    def _begin(self) -> Frame:
        # A seed for each episode: the environment's generator would otherwise continue from the
        # episode before, and this one could not be played again alone.
        observation, _ = self._task.reset(seed=self._streams["environment"].integer(2**32))
        return self._frame_of(observation)

    def _advance(self, action: int) -> Transition:
        observation, reward, terminated, truncated, _ = self._task.step(
            self._choices.decoded(action)
        )
        return Transition(
            frame=self._frame_of(observation),
            reward=float(reward),
            game_reward=float(reward),
            terminal=bool(terminated),
            ended=bool(terminated or truncated),
        )

    def _fingerprint(self) -> bytes:
        return self.instruction.encode()

    def _frame_of(self, observation: Any) -> Frame:
        if self._told is not None:
            self.instruction = observation[self._told]
        return self._view.frame(observation)


class _Choices(NamedTuple):
    """How the actions of an agent become those of an environment.

    Attributes:
        number: How many there are.
        decoded: Returns the environment's action of an index below the number.
    """

    number: int
    decoded: Callable[[int], Any]


def _choices(spec: GymnasiumEnvironment, space: _Space) -> _Choices:
    """Number the actions of a space; those of several choices in C order, the last one fastest."""
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return _Choices(int(space.n), lambda action: first + action)
    if isinstance(space, spaces.MultiDiscrete):
        sizes, start = space.nvec, space.start
    elif isinstance(space, spaces.MultiBinary):
        sizes, start = np.full(space.shape, 2), np.zeros(space.shape, np.int64)
    else:
        raise _unusable(
            spec.id, f"the trainers choose among finitely many actions, and it has {space}", _FINITE
        )
    number = math.prod(map(int, sizes.flat))
    if number > MAX_ACTIONS:
        raise _unusable(
            spec.id,
            f"its actions {space} are {number:,} combinations, and {MAX_ACTIONS:,} are supported",
            _FINITE,
        )

    def decoded(action: int) -> NDArray[Any]:
        chosen: NDArray[Any] = np.array(np.unravel_index(action, sizes.flat[:]), space.dtype)
        return np.asarray(start + chosen.reshape(sizes.shape), space.dtype)

    return _Choices(number, decoded)


class _View(NamedTuple):
    """How observations become frames.

    Attributes:
        shape: Shape of a frame.
        dtype: Data type of its elements.
        frame: Returns the frame of an observation, in memory of its own.
        layout: What a frame holds.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    frame: Callable[[Any], Frame]
    layout: FrameLayout


def _view(spec: GymnasiumEnvironment, space: _Space) -> _View:
    """Return the view of a spec: of an entry, of an image beside numbers, or of everything."""
    entry, seen = spec.observation, _seen_space(spec, space)
    view = _image_view(seen) if spec.frames == "image" else _flat_view(spec, seen)
    if entry is None:
        return view
    if spec.numbers is not None:
        return _packed_view(spec, space, entry, view)
    return view._replace(frame=lambda observation: view.frame(observation[entry]))


def _packed_view(spec: GymnasiumEnvironment, space: _Space, image: str, view: _View) -> _View:
    """Return the view of an image with the numbers of other entries behind it."""
    entries = dict(space) if isinstance(space, spaces.Dict) else {}
    parts = {}
    for name in spec.numbers or ():
        if name not in entries or not _is_numbers(entries[name]):
            usable = [each for each in sorted(entries) if _is_numbers(entries[each])]
            raise _misfit(
                f"environment.numbers: {name!r} is not an entry of numbers of {space}",
                fix=f"name some of {', '.join(usable)}" if usable else "remove it",
            )
        parts[name] = entries[name]
    layout = FrameLayout(view.shape, sum(map(spaces.flatdim, parts.values())))

    def frame(observation: Any) -> Frame:
        flat = [spaces.flatten(part, observation[name]) for name, part in parts.items()]
        numbers = np.concatenate([np.asarray(each, np.float32) for each in flat])
        return layout.pack(view.frame(observation[image]), numbers)

    return _View(layout.packed_shape, np.dtype(np.uint8), frame, layout)


def _flat_view(spec: GymnasiumEnvironment, space: _Space) -> _View:
    if not _is_numbers(space):
        raise _unusable(
            spec.id,
            f"observations {space} are not supported",
            fix="name an entry of numbers in environment.observation, or another environment",
        )
    seen = _seen_numbers(spec, spaces.flatdim(space))
    dtype = np.dtype(np.float32)

    def frame(observation: Any) -> Frame:
        flat = np.asarray(spaces.flatten(space, observation), dtype)
        # Indexing by an array copies, so that the frame shares no memory with the environment.
        numbers: Frame = flat[seen]
        return numbers

    return _View(seen.shape, dtype, frame, FrameLayout(seen.shape))


def _image_view(space: _Space) -> _View:
    """Return a view that puts the channels of an image first."""
    shape = space.shape or ()
    if not (isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(shape) in (2, 3)):
        raise _misfit(
            f"environment.frames 'image': {space} is not a Box of uint8 [rows, columns, channels]",
            fix="use frames: flat, or name the entry that is an image in environment.observation",
        )

    def frame(observation: Any) -> Frame:
        image = np.asarray(observation)
        # np.array copies in every case, so that the frame shares no memory with the environment.
        return np.array(image if image.ndim == 2 else image.transpose(2, 0, 1), order="C")

    rows, columns, *channels = shape
    first = (*channels, rows, columns)
    return _View(first, np.dtype(np.uint8), frame, FrameLayout(first))


def _make(spec: GymnasiumEnvironment) -> gymnasium.Env[Any, Any]:
    for module in spec.modules:
        try:
            import_module(module)
        except ImportError as error:
            raise _unusable(
                spec.id,
                f"environment.modules {module!r} cannot be imported: {error}",
                fix="add its package to image.packages, or its source tree as code, and lock "
                "again; or correct the name",
            ) from error
    try:
        return gymnasium.make(
            spec.id, max_episode_steps=spec.max_episode_steps, disable_env_checker=True
        )
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise _unusable(spec.id, str(error)) from error


def _seen_space(spec: GymnasiumEnvironment, space: _Space) -> _Space:
    """Return the space of what the spec shows of the observations."""
    if spec.observation is not None:
        entries = dict(space) if isinstance(space, spaces.Dict) else {}
        if spec.observation not in entries:
            raise _misfit(
                f"environment.observation {spec.observation!r} is not an entry of {space}",
                fix=f"name one of {', '.join(sorted(entries))}" if entries else "remove it",
            )
        return entries[spec.observation]
    return space


def _told_entry(spec: GymnasiumEnvironment, space: _Space) -> str | None:
    """Return which entry of ``space`` is the instruction, if any."""
    entries = dict(space) if isinstance(space, spaces.Dict) else {}
    # Gymnasium's Text spaces have the dtype str, whose kind is U.
    texts = [name for name, entry in entries.items() if entry.dtype and entry.dtype.kind == "U"]
    if spec.instruction is not None and spec.instruction not in texts:
        raise _misfit(
            f"environment.instruction {spec.instruction!r} is not a text of {space}",
            fix=f"name one of {', '.join(texts)}" if texts else "remove it",
        )
    return spec.instruction


def _is_numbers(space: _Space) -> bool:
    """Tell whether every observation of ``space`` is the same number of numbers."""
    if isinstance(space, spaces.Tuple):
        return all(map(_is_numbers, space.spaces))
    if isinstance(space, spaces.Dict):
        return all(map(_is_numbers, space.spaces.values()))
    return isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    )


def _seen_numbers(spec: GymnasiumEnvironment, size: int) -> NDArray[np.int64]:
    """Return the indices of a flat observation that are not hidden, int64 ``[numbers]``."""
    for index in spec.masked_observations:
        if index >= size:
            raise _misfit(
                f"environment.masked_observations {index}: a flat observation of {spec.id} has "
                f"{size} numbers",
                fix=f"hide indices from 0 to {size - 1}",
            )
    seen = np.setdiff1d(np.arange(size), np.array(spec.masked_observations, np.int64))
    if not len(seen):
        raise _misfit(
            f"environment.masked_observations hides all {size} numbers of the observations",
            fix="leave one to be seen",
        )
    return seen


def _unusable(identifier: str, reason: str, fix: str = _FIX) -> CapsuleError:
    return CapsuleError(
        "CAP-T214", f"environment.id {identifier!r} cannot be used: {reason}", fix=fix
    )


def _misfit(message: str, *, fix: str) -> CapsuleError:
    return CapsuleError("CAP-T216", message, fix=fix)
