"""Population-based training as IMPALA has it (Espeholt et al. 2018, arXiv:1802.01561, appendix F).

Several members train apart, each with hyper-parameters of its own. Time and again one of them asks
whether another does better (Jaderberg et al. 2017, arXiv:1711.09846: *exploit*) and changes its own
a little
(*explore*)::

    after 20 million frames without, and 5,000 returns each time:                         ready
    fitness: mean over the tasks of min(1, (return - random) / (human - random))    table G.1
    a random other member; if its fitness is more than 0.05 higher: its weights and parameters
    each parameter, copied or not, by a chance of 33 %: times 1.2 or 1/1.2            unbiased

The constants are sentences of appendix F: 'a "burn-in" period of 20 million frames where no
evolution is done'; "after collecting 5,000 episode rewards in total"; "if the score of the selected
instance is more than an absolute 5% higher"; "no matter if a copy happened or not, each parameter
[...] is permuted with 33% probability by multiplying with either 1.2 or 1/1.2". Initial values are
those of table D.1.

Left open there, and here so: frames and returns are a member's own, the returns those of all its
tasks together. Returns of the burn-in do not count, and a fitness is of those since the last one.
It needs a return of every task. It belongs to the weights: with them a member takes it over. A
member that has none yet is never copied. Frames are never copied, and no value has bounds.

All draws are of one stream: the initial values, by member and by name; then for each question one
word for the other member and one for each parameter, by name. A population is therefore a pure
function of its seed and of the order in which returns arrive and questions are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import fsum
from typing import Any

import numpy as np

from capsule.experiment.contract import Generation
from capsule.experiment.scores import ReferenceScores
from capsule.experiment.trainers import PopulationSpec
from capsule.training.state.streams import Stream

Hyperparameters = dict[str, float]

# --- initial values -------------------------------------------------------------------------------


Prior = Callable[[Stream], float]
"""Draws an initial value, of one word of a stream."""


def log_uniform(low: float, high: float) -> Prior:
    """Return the prior of a uniform logarithm, between two positive bounds.

    Its values are rounded to float32: libraries' powers differ in the last bits.
    """
    return lambda stream: float(np.float32(low * (high / low) ** stream.uniform()))


def choice(*values: float) -> Prior:
    """Return the prior of some values, each as likely."""
    return lambda stream: values[stream.integer(len(values))]


DMLAB_PRIORS: dict[str, Prior] = {  # table D.1
    "entropy_cost": log_uniform(5e-5, 1e-2),
    "learning_rate": log_uniform(5e-6, 5e-3),
    "rmsprop_epsilon": choice(1e-1, 1e-3, 1e-5, 1e-7),
}

# --- rules ----------------------------------------------------------------------------------------


def mean_capped_score(
    means: Mapping[str, float], references: Mapping[str, ReferenceScores]
) -> float:
    """Return ``sum_l min(1, (s_l - r_l) / (h_l - r_l)) / N`` (table G.1).

    Args:
        means: Task to its mean return ``s``.
        references: Task to ``r`` and ``h``, for the same tasks.
    """
    capped = [
        min(1.0, (means[task] - random) / (human - random))
        for task, (random, human) in sorted(references.items())
    ]
    return fsum(capped) / len(capped)


def is_fitter(other: float | None, own: float, margin: float) -> bool:
    """Tell whether fitness ``own`` gives way to ``other``, None for one not known yet."""
    return other is not None and other > own + margin


def explore(values: Hyperparameters, rules: PopulationSpec, stream: Stream) -> Hyperparameters:
    """Return ``values``, each changed by a chance; one word each, in the order of the names."""
    return {
        name: _changed(value, rules, stream.uniform()) for name, value in sorted(values.items())
    }


def _changed(value: float, rules: PopulationSpec, uniform: float) -> float:
    if uniform >= rules.probability:
        return value
    # The same draw decides the direction: each half of the range below `probability` is one.
    grows = uniform < rules.probability / 2
    return value * rules.factor if grows else value / rules.factor


# --- the population -------------------------------------------------------------------------------


@dataclass
class _Progress:
    """The progress of a member so far.

    Attributes:
        steps: Number of steps of its training.
        current: Number of its generation.
        counts: Task to how many returns there are since the last fitness.
        sums: Task to their sum, added up as they arrived.
    """

    steps: int
    current: int
    counts: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)


class Population:
    """Members, their hyper-parameters and where these come from; training is the caller's.

    Attributes:
        generations: All so far, the first of every member at the beginning. With what
            :meth:`state` adds, that is the state; alone, it is the ancestry.
    """

    def __init__(
        self,
        rules: PopulationSpec,
        references: Mapping[str, ReferenceScores],
        stream: Stream,
        priors: Mapping[str, Prior] = DMLAB_PRIORS,
    ) -> None:
        """Draw the initial hyper-parameters.

        Args:
            rules: How it evolves.
            references: Task to the scores that returns are normalised by; ``human`` is higher.
            stream: ``population``, from its beginning.
            priors: Name of a hyper-parameter to how its initial values are drawn.
        """
        self._rules, self._references, self._stream = rules, references, stream
        self.generations = [
            Generation(
                number=member,
                member=member,
                parent=None,
                step=0,
                parent_step=None,
                hyperparameters={name: priors[name](stream).hex() for name in sorted(priors)},
                score=None,
                rival=None,
                rival_score=None,
                copied=False,
            )
            for member in range(rules.members)
        ]
        self._progress = [_Progress(0, member) for member in range(rules.members)]

    def current(self, member: int) -> Generation:
        """Return the generation that ``member`` is in."""
        return self.generations[self._progress[member].current]

    def collect(self, member: int, steps: int, returns: Iterable[tuple[str, float]]) -> None:
        """Note what a member did since the last time.

        Args:
            member: Which.
            steps: Number of steps of its training so far, in all.
            returns: Task and return of each episode that ended, in order.

        Raises:
            KeyError: A task that has no reference.
        """
        progress = self._progress[member]
        progress.steps = steps
        if steps < self._rules.burn_in:
            return
        for task, value in returns:
            if task not in self._references:
                raise KeyError(task)
            progress.counts[task] = progress.counts.get(task, 0) + 1
            progress.sums[task] = progress.sums.get(task, 0.0) + value

    def ready(self, member: int) -> bool:
        """Tell whether enough returns of ``member`` are there for a fitness."""
        counts = self._progress[member].counts
        enough = sum(counts.values()) >= self._rules.episodes
        return enough and counts.keys() == self._references.keys()

    def evolve(self, member: int) -> Generation:
        """Compare ``member`` with another one and begin its next generation.

        If it is ``copied``, the caller gives ``member`` the trained tensors of its ``rival``.

        Raises:
            ValueError: The member is not ready.
        """
        if not self.ready(member):
            raise ValueError(f"member {member} has too few returns for a fitness")
        progress = self._progress[member]
        score = self._score(progress)
        rival = self._stream.integer(self._rules.members - 1)
        # One draw among the others only, by stepping over the member itself.
        rival += rival >= member
        rival_score = self.current(rival).fitness
        copied = is_fitter(rival_score, score, self._rules.margin)
        parent = self.current(rival if copied else member)
        values = explore(parent.values, self._rules, self._stream)
        generation = Generation(
            number=len(self.generations),
            member=member,
            parent=parent.number,
            step=progress.steps,
            parent_step=self._progress[parent.member].steps,
            hyperparameters={name: value.hex() for name, value in values.items()},
            score=score.hex(),
            rival=rival,
            rival_score=None if rival_score is None else rival_score.hex(),
            copied=copied,
        )
        self.generations.append(generation)
        self._progress[member] = _Progress(progress.steps, generation.number)
        return generation

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot from which :meth:`restore` continues."""
        return {
            "stream": self._stream.state(),
            "generations": [each.facts() for each in self.generations],
            "members": [asdict(progress) for progress in self._progress],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot of a population of the same kind.

        Raises:
            CapsuleError: CAP-T201, the snapshot is of another seed.
        """
        self._stream.restore(state["stream"])
        self.generations = [Generation(**generation) for generation in state["generations"]]
        self._progress = [_Progress(**progress) for progress in state["members"]]

    def _score(self, progress: _Progress) -> float:
        means = {task: progress.sums[task] / count for task, count in progress.counts.items()}
        return mean_capped_score(means, self._references)
