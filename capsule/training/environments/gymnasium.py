"""Gymnasium environments with finitely many actions; a frame is a flat vector, or images.

*Actions*. If a space has several choices (``MultiDiscrete``, ``MultiBinary``), each combination of
them is one action, numbered in C order.

*Observations*. A spec can import packages, or modules of its source tree, that register further ids
(``modules``); use single entries of nested observations (``observation``, ``images``,
``numbers``), named by their paths (:mod:`capsule.training.environments.entries`); and hide numbers
from the agent (``masked_observations``), for tasks that need memory. A text can be the agent's
``instruction``.

*Time limits*. An episode is truncated when the environment does so, and after the number of steps
with which its id is registered: 200 for ``CartPole-v0``, 500 for ``CartPole-v1``, and no limit for
many others. ``max_episode_steps`` replaces the registered limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import GymnasiumEnvironment, StreamName
from capsule.training.environments.base import Environment, Frame, Transition, no_pictures
from capsule.training.environments.entries import (
    Entry,
    Space,
    entries_of,
    is_image,
    is_text,
    not_numbers,
)
from capsule.training.state.frames import FrameLayout
from capsule.training.state.source_tree import import_module
from capsule.training.state.streams import Stream

MAX_ACTIONS = 4_096  # combinations of choices, each of which is an output of the network

_FIX = (
    "Name a registered environment, such as 'CartPole-v1', and in environment.modules the module "
    "that registers it."
)
_FINITE = (
    "Use an environment with Discrete, MultiDiscrete or MultiBinary actions, register one in "
    "environment.modules that wraps this one, or run your own program (trainer.command)."
)


class GymnasiumTask(Environment):
    """One Gymnasium environment.

    A frame is a vector, float32 ``[numbers]``; an image, uint8 ``[channels, rows, columns]`` or
    ``[rows, columns]``; or images and numbers, packed as in :mod:`capsule.training.state.frames`.

    A vector is the result of :func:`gymnasium.spaces.flatten`: discrete observations are one-hot,
    and entries are in the order of their space, which sorts the names of a plain dictionary. An
    image is an entry of uint8 ``[rows, columns, channels]`` or ``[rows, columns]``, whose values
    are not changed. Images, and the flattened numbers beside them, are in the order in which the
    spec names them.

    Streams:
        environment: one 32-bit seed per episode, for the environment's own generator.

    Raises:
        CapsuleError: CAP-T214, there is no such environment, or its spaces are not supported;
            CAP-T216, ``observation``, ``images``, ``frames``, ``numbers``, ``instruction`` or
            ``masked_observations`` does not fit the observations.
    """

    def __init__(self, spec: GymnasiumEnvironment, streams: Mapping[StreamName, Stream]) -> None:
        super().__init__({"environment": streams["environment"]})
        self._id, self._task = spec.id, _make(spec)
        self._instruction = _instruction_entry(spec, self._task.observation_space)
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
        """The ``render_fps`` of the environment, or the default."""
        return float(self._task.metadata.get("render_fps") or Environment.screen_rate)

    def screen(self) -> NDArray[np.uint8]:
        """Return the picture that the environment renders with its own libraries."""
        # The mode is set only here, because some environments made with it draw at every step.
        self._task.unwrapped.render_mode = "rgb_array"
        try:
            screen = self._task.render()
        except (gymnasium.error.Error, ImportError) as error:
            raise no_pictures(str(error)) from error
        if not (isinstance(screen, np.ndarray) and screen.dtype == np.uint8 and screen.ndim == 3):
            raise no_pictures(f"it renders {type(screen).__name__}, not an array of colours")
        return screen

    def _begin(self) -> Frame:
        # Every episode has its own seed. Otherwise the environment's generator would continue from
        # the previous episode, and this one could not be played again alone.
        observation, _ = self._task.reset(seed=self._streams["environment"].integer(2**32))
        return self._frame_of(observation)

    def _advance(self, action: int) -> Transition:
        observation, given, terminated, truncated, _ = self._task.step(
            self._choices.decoded(action)
        )
        reward = float(given)
        # Nothing can be learned from a reward that is not finite, and JSON cannot contain one.
        if not math.isfinite(reward):
            raise CapsuleError(
                "CAP-T151",
                f"environment.id {self._id!r} gave the reward {reward} for step "
                f"{len(self._taken) + 1} of an episode",
                fix="Correct the environment, or wrap it in one whose rewards are finite numbers.",
            )
        return Transition(
            frame=self._frame_of(observation),
            reward=reward,
            game_reward=reward,
            terminal=bool(terminated),
            ended=bool(terminated or truncated),
        )

    def _fingerprint(self) -> bytes:
        return self.instruction.encode()

    def _frame_of(self, observation: Any) -> Frame:
        if self._instruction is not None:
            self.instruction = self._instruction.of(observation)
        return self._view.frame(observation)


class _Choices(NamedTuple):
    """The mapping of an agent's actions to those of an environment.

    Attributes:
        number: Number of actions.
        decoded: Returns the environment's action for an index below ``number``.
    """

    number: int
    decoded: Callable[[int], Any]


def _choices(spec: GymnasiumEnvironment, space: Space) -> _Choices:
    """Number the actions of a space; combinations are in C order, with the last choice fastest."""
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
    """The mapping of observations to frames.

    Attributes:
        shape: Shape of a frame.
        dtype: Element type of a frame.
        frame: Returns the frame of an observation, in memory of its own.
        layout: Layout of a frame.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    frame: Callable[[Any], Frame]
    layout: FrameLayout


def _view(spec: GymnasiumEnvironment, space: Space) -> _View:
    """Return the view that a spec describes: an entry, images and numbers, or all of it."""
    if spec.images is not None:
        images = {f"images.{n}": name for n, name in enumerate(spec.images)}
        return _packed_view(spec, space, images)
    if spec.observation is None:
        entry = Entry(space, ())
    elif spec.numbers is not None:
        return _packed_view(spec, space, {"observation": spec.observation})
    else:
        entry = _named(space, "observation", spec.observation)
    return _image_view(space, entry) if spec.frames == "image" else _flat_view(spec, space, entry)


def _packed_view(spec: GymnasiumEnvironment, space: Space, images: Mapping[str, str]) -> _View:
    """Return a view of images, given the fields that name them, followed by numbers."""
    seen = [_named(space, field, path) for field, path in images.items()]
    views = [_image_view(space, entry) for entry in seen]
    parts = _numbers(spec, space)
    _check_apart([*seen, *parts])
    first, *further = [view.shape for view in views]
    numbers = sum(spaces.flatdim(part.space) for part in parts)
    layout = FrameLayout(first, numbers, tuple(further))

    def frame(observation: Any) -> Frame:
        flat = [np.asarray(spaces.flatten(each.space, each.of(observation))) for each in parts]
        return layout.pack([view.frame(observation) for view in views], flat)

    return _View(layout.packed_shape, np.dtype(np.uint8), frame, layout)


def _numbers(spec: GymnasiumEnvironment, space: Space) -> list[Entry]:
    """Return the entries that the agent sees as numbers beside images."""
    entries = entries_of(space)
    usable = [path for path, entry in entries.items() if not not_numbers(entry)]
    for path in spec.numbers or ():
        if path not in usable:
            raise _misfit(
                f"environment.numbers: {path!r} is not an entry of numbers of {space}",
                fix=f"Name some of {', '.join(sorted(usable))}." if usable else "Remove it.",
            )
    return [entries[path] for path in spec.numbers or ()]


def _check_apart(entries: Sequence[Entry]) -> None:
    """Reject entries of which one contains another, which the agent would see twice."""
    for inner, outer in permutations(entries, 2):
        if outer.contains(inner):
            raise _misfit(
                f"environment names the entry {outer.path!r} and also {inner.path!r} inside of it",
                fix=f"Name the entries of {outer.path!r} that the agent should see, each once.",
            )


def _flat_view(spec: GymnasiumEnvironment, space: Space, entry: Entry) -> _View:
    """Return a view of an entry of ``space`` as one vector, without hidden numbers."""
    if obstacles := not_numbers(entry):
        part = obstacles[0]
        where = f"the entry {part.path!r}, {part.space}," if part.keys else "it"
        usable = [path for path, each in entries_of(space).items() if not not_numbers(each)]
        raise _unusable(
            spec.id,
            f"observations {space} are not supported: {where} is not a vector of a fixed length",
            fix="Name an entry of numbers in environment.observation"
            + (f" ({', '.join(usable)})" if usable else "")
            + ", or use another environment.",
        )
    seen = _seen_numbers(spec, spaces.flatdim(entry.space))
    dtype = np.dtype(np.float32)

    def frame(observation: Any) -> Frame:
        flat = np.asarray(spaces.flatten(entry.space, entry.of(observation)), dtype)
        # Indexing by an array copies, so the frame does not share memory with the environment.
        numbers: Frame = flat[seen]
        return numbers

    return _View(seen.shape, dtype, frame, FrameLayout(seen.shape))


def _image_view(space: Space, entry: Entry) -> _View:
    """Return a view of an entry of ``space`` that puts the channels of an image first."""
    if not is_image(entry.space):
        found = [path for path, each in entries_of(space).items() if is_image(each.space)]
        raise _misfit(
            f"environment.frames 'image': {f'the entry {entry.path!r}, ' if entry.keys else ''}"
            f"{entry.space}, is not a Box of uint8 [rows, columns, channels]",
            fix="Use frames: flat, or name the entry that is an image in environment.observation, "
            "or several in environment.images" + (f": {', '.join(found)}." if found else "."),
        )

    def frame(observation: Any) -> Frame:
        image = np.asarray(entry.of(observation))
        # np.array always copies, so the frame does not share memory with the environment.
        return np.array(image if image.ndim == 2 else image.transpose(2, 0, 1), order="C")

    rows, columns, *channels = entry.space.shape or ()
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
                fix="Add its package to image.packages, or its source tree as code, and lock "
                "again; or correct the name.",
            ) from error
    try:
        return gymnasium.make(
            spec.id, max_episode_steps=spec.max_episode_steps, disable_env_checker=True
        )
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise _unusable(spec.id, str(error)) from error


def _named(space: Space, field: str, path: str) -> Entry:
    """Return the entry of ``space`` that a field of the spec names by its path."""
    entries = entries_of(space)
    if path not in entries:
        raise _misfit(
            f"environment.{field} {path!r} is not an entry of {space}",
            fix=f"Name one of {', '.join(sorted(entries))}." if entries else "Remove it.",
        )
    return entries[path]


def _instruction_entry(spec: GymnasiumEnvironment, space: Space) -> Entry | None:
    """Return the entry of ``space`` that is the instruction, if there is one."""
    if spec.instruction is None:
        return None
    texts = {path: entry for path, entry in entries_of(space).items() if is_text(entry.space)}
    if spec.instruction not in texts:
        raise _misfit(
            f"environment.instruction {spec.instruction!r} is not a text of {space}",
            fix=f"Name one of {', '.join(texts)}." if texts else "Remove it.",
        )
    return texts[spec.instruction]


def _seen_numbers(spec: GymnasiumEnvironment, size: int) -> NDArray[np.int64]:
    """Return the indices of a flat observation that are not hidden, int64 ``[numbers]``."""
    for index in spec.masked_observations:
        if index >= size:
            raise _misfit(
                f"environment.masked_observations {index}: a flat observation of {spec.id} has "
                f"{size} numbers",
                fix=f"Hide indices from 0 to {size - 1}.",
            )
    seen = np.setdiff1d(np.arange(size), np.array(spec.masked_observations, np.int64))
    if not len(seen):
        raise _misfit(
            f"environment.masked_observations hides all {size} numbers of the observations",
            fix="Remove at least one index, so that the agent sees a number.",
        )
    return seen


def _unusable(identifier: str, reason: str, fix: str = _FIX) -> CapsuleError:
    return CapsuleError(
        "CAP-T214", f"environment.id {identifier!r} cannot be used: {reason}", fix=fix
    )


def _misfit(message: str, *, fix: str) -> CapsuleError:
    return CapsuleError("CAP-T216", message, fix=fix)
