"""Atari 2600 games in the Arcade Learning Environment (Bellemare et al. 2013, arXiv:1207.4708).

Preprocessing follows Mnih et al. 2015, doi:10.1038/nature14236, Methods: an action is repeated for
``frame_skip`` frames; the newest two screens are converted to grey, combined by their maximum and
resized to 84x84; a lost life ends the return in training; an episode begins with a random number of
no-ops. Sticky actions follow Machado et al. 2018, arXiv:1709.06009, section 5.3. Both kinds of
random numbers are drawn here, from named streams; the emulator itself draws none.

Deviations from Mnih et al.: they take the maximum of each colour before the conversion, which gives
other greys if two colours alternate. :class:`AtariGame` describes a second one.

Copies of the emulator are not complete. Those of ALE 0.12 lack the screen, whether a frame is half
drawn, and the horizontal positions of the objects. A game sets each of these anew in the following
frames. A snapshot therefore contains a *save state* from some steps before it. The actions since
then are played again, which restores what the copy lacks, and the result is compared with the
recorded one. If it differs, the whole episode is played instead. Restoring usually takes
milliseconds, however long the episode is.
"""

from __future__ import annotations

import base64
import difflib
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import ale_py
import numpy as np
from ale_py import roms
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import AtariEnvironment, StreamName
from capsule.training.environments.base import Environment, Frame, Transition
from capsule.training.environments.preprocessing import SIDE, AreaResize
from capsule.training.state.streams import Stream

# Games whose copies lose counters permanently: the clocks of Pitfall II's cartridge are rounded,
# and Miniature Golf's strokes and par become booleans (ale-py 0.12; Arcade-Learning-Environment
# issue 732).
_UNCOPYABLE = {"miniature_golf", "pitfall2"}
FRAME_RATE = 60  # frames of the console per second
_EMULATOR_SEED = 0  # fills the emulated RAM at power-on; constant, so not a hidden input
SAVE_STATE_STEPS = 16  # between save states; that of a snapshot is 16 to 31 steps old


class SaveState(NamedTuple):
    """A copy of the emulator and of the environment's own state, between two steps.

    Attributes:
        steps: Number of actions of the episode before it.
        streams: States of the streams.
        counters: The environment's own state: emulator frames, the action held last, and lives.
        emulator: The serialised copy of the emulator.
    """

    steps: int
    streams: dict[StreamName, Any]
    counters: dict[str, int]
    emulator: bytes


class AtariGame(Environment):
    """One Atari game.

    A frame combines the last two screens of a step. If a lost life, the end of the game or the cap
    on the episode cuts a step short, its last screen is combined with the newest one that was
    fetched before. If the step has had two or three emulator frames, this is the last screen of the
    previous step, while Mnih et al. 2015 combine the last two screens of the step.

    Streams:
        environment: ``frame_skip`` uniforms per agent step, one for each emulator frame, also if
            the step ends early; one for an action that is held for a single frame; none if
            ``sticky_action_probability`` is 0. As in ALE, a frame repeats the action of the frame
            before it if its uniform is below the probability.
        no-op: one integer per episode, uniform over 1 to ``noop_max`` emulator frames, as in the
            original DQN and Gymnasium's wrapper; none if ``noop_max`` is 0.

    Raises:
        CapsuleError: CAP-T212, there is no such game.
    """

    def __init__(
        self, spec: AtariEnvironment, streams: Mapping[StreamName, Stream], *, training: bool
    ) -> None:
        self._sticky = spec.sticky_action_probability
        self._noop_max = spec.noop_max if training else 0
        used: tuple[StreamName, ...] = (
            *(("environment",) if self._sticky else ()),
            *(("no-op",) if self._noop_max else ()),
        )
        self._save_states: deque[SaveState] = deque(maxlen=2)
        super().__init__({name: streams[name] for name in used})
        self._clips = training and spec.clip_rewards
        self._life_loss = training and spec.terminal_on_life_loss
        self._max_frames = spec.max_episode_frames
        self._copyable = spec.game not in _UNCOPYABLE
        self._ale = _load(spec.game)
        self._powered_on = self._ale.cloneState(include_rng=True)
        self._codes = list(
            self._ale.getLegalActionSet()
            if spec.full_action_set
            else self._ale.getMinimalActionSet()
        )
        self.actions = len(self._codes)
        self.frame_shape = (SIDE, SIDE)
        self.frame_dtype = np.dtype(np.uint8)
        self.frame_stack = spec.frame_stack
        self.frame_skip = spec.frame_skip
        self.screen_rate = FRAME_RATE / spec.frame_skip
        height, width = self._ale.getScreenDims()
        self._resize = AreaResize(height, width)
        self._screens = np.zeros((2, height, width), np.uint8)  # grey, the newest two seen
        self._newest = 0

    def step(self, action: int) -> Transition:
        """See :meth:`Environment.step`."""
        transition = super().step(action)
        steps = len(self._taken)
        if self._copyable and steps % SAVE_STATE_STEPS == 0:
            saved = SaveState(steps, self._stream_states(), self._counters(), self._emulator())
            self._save_states.append(saved)
        return transition

    def screen(self) -> NDArray[np.uint8]:
        """Return the emulator's last screen in colour."""
        screen: NDArray[np.uint8] = self._ale.getScreenRGB()
        return screen

    def _begin(self) -> Frame:
        self._save_states.clear()
        self._power_on()
        self._frames = 0
        self._held = ale_py.Action.NOOP
        # There is no screen before the first one, which is therefore combined with itself.
        self._screens[:] = self._ale.getScreenGrayscale()
        if self._noop_max:
            self._idle(1 + self._streams["no-op"].integer(self._noop_max))
        self.lives = self._ale.lives()
        return self._newest_frame()

    def _power_on(self) -> None:
        """Restore the emulator's initial state; in some games a reset alone does not suffice."""
        self._ale.restoreState(self._powered_on)
        self._ale.reset_game()

    def _idle(self, noops: int) -> None:
        for _ in range(noops):
            self._ale.act(ale_py.Action.NOOP)
            self._frames += 1
            self._see()
            if self._ale.game_over(with_truncation=False) or self._frames >= self._max_frames:
                raise CapsuleError(
                    "CAP-T213",
                    f"environment.noop_max {self._noop_max}: the episode ended after "
                    f"{self._frames} no-ops",
                    fix="Lower environment.noop_max, or raise environment.max_episode_frames.",
                )

    def _advance(self, action: int) -> Transition:
        return self._hold(action, self.frame_skip)

    def _advance_frame(self, action: int) -> Transition:
        return self._hold(action, 1)

    def _hold(self, action: int, frames: int) -> Transition:
        ale = self._ale
        code = self._codes[action]
        game_reward, terminal, ended = 0, False, False
        for index, repeats in enumerate(self._repeats(frames)):
            if not repeats:
                self._held = code
            game_reward += ale.act(self._held)
            self._frames += 1
            over = ale.game_over(with_truncation=False)
            # _lost_life() is called first, because it must update the lives even if the game is
            # over.
            terminal = self._lost_life() or over
            ended = over or self._frames >= self._max_frames
            cut_short = terminal or ended
            # Other screens are not part of the frame, and are not fetched.
            if cut_short or index >= frames - 2:
                self._see()
            if cut_short:
                break
        return Transition(
            frame=self._newest_frame(),
            reward=float((game_reward > 0) - (game_reward < 0) if self._clips else game_reward),
            game_reward=float(game_reward),
            terminal=terminal,
            ended=ended,
        )

    def _repeats(self, frames: int) -> list[bool]:
        """Return for each of some emulator frames whether it repeats the previous action."""
        if not self._sticky:
            return [False] * frames
        # All are drawn at once, so that a step that ends early draws as many.
        uniforms = self._streams["environment"].uniforms(frames)
        return [uniform < self._sticky for uniform in uniforms.tolist()]

    def _lost_life(self) -> bool:
        before, self.lives = self.lives, self._ale.lives()
        return self._life_loss and self.lives < before

    def _see(self) -> None:
        self._newest ^= 1
        self._ale.getScreenGrayscale(self._screens[self._newest])

    def _counters(self) -> dict[str, int]:
        return {"frames": self._frames, "held": self._held.value, "lives": self.lives}

    def _emulator(self) -> bytes:
        copy: bytes = self._ale.cloneState(include_rng=True).serialize()
        return copy

    def _return_to(self, counters: Mapping[str, int], emulator: bytes) -> bool:
        """Return to a copy, except for the screens; return False if this ALE cannot read it."""
        try:
            copy = ale_py.ALEState(emulator)
        except SystemError:  # raised by ale-py if the bytes are not in its format
            return False
        self._power_on()
        self._ale.act(ale_py.Action.NOOP)  # completes the frame that some games leave half drawn
        self._ale.restoreState(copy)
        # The two screens are not restored, because the steps that follow the copy fetch both anew.
        self._frames = counters["frames"]
        self._held = ale_py.Action(counters["held"])
        self.lives = counters["lives"]  # a copy may lack them until the next frame
        return True

    def _last_save_state(self) -> dict[str, Any] | None:
        if len(self._save_states) < 2:
            return None
        # The older of the two, which is followed by enough steps to restore what the copy lacks.
        saved = self._save_states[0]
        return {**saved._asdict(), "emulator": base64.b64encode(saved.emulator).decode()}

    def _play_from_save_state(self, episode: Mapping[str, Any], actions: array[int]) -> bool:
        document = episode["mark"]
        if document is None:
            return False
        emulator = base64.b64decode(document["emulator"])
        saved = SaveState(**{**document, "emulator": emulator})
        if not self._return_to(saved.counters, saved.emulator):
            return False
        self._set_streams(saved.streams)
        self._start, self._taken, self._ended = episode["start"], actions[: saved.steps], False
        # Kept as if it had been made here, because _is_at() also compares the save states.
        self._save_states.append(saved)
        self._play(actions[saved.steps :])
        return True

    def _fingerprint(self) -> bytes:
        # A frame shows only a part of the emulator's state.
        return repr(self._counters()).encode() + self._emulator()

    def _forget(self) -> None:
        super()._forget()
        self._save_states.clear()

    def _newest_frame(self) -> Frame:
        return self._resize(np.maximum(self._screens[0], self._screens[1]))


def _load(game: str) -> Any:
    """Return an emulator with ``game`` loaded, without randomness or limits of its own."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    known = roms.get_all_rom_ids()
    path = str(roms.get_rom_path(game)) if game in known else None
    if path is None or not ale_py.ALEInterface.isSupportedROM(path):
        near = difflib.get_close_matches(game, known, n=1)
        hint = f"Did you mean {near[0]!r}? " if near and near[0] != game else ""
        raise CapsuleError(
            "CAP-T212",
            f"environment.game {game!r} is not a one-player game of this ale-py",
            fix=f"{hint}Use a ROM name as ale-py spells it, such as 'breakout'.",
        )
    ale = ale_py.ALEInterface()
    # ALE applies settings when it loads a game, so they come first.
    ale.setInt("random_seed", _EMULATOR_SEED)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.setInt("frame_skip", 1)
    ale.setInt("max_num_frames_per_episode", 0)
    ale.loadROM(path)
    return ale
