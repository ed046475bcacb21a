"""Population-based training in IMPALA (Espeholt et al. 2018, arXiv:1802.01561, appendix F).

Several members train separately, each with its own hyper-parameters. From time to time a member
*evolves*: it compares itself with another member, copies that one if it is better (*exploit*), and
changes its own hyper-parameters a little (*explore*; Jaderberg et al. 2017, arXiv:1711.09846). The
constants are those of appendix F:

* When: 'we used a "burn-in" period of 20 million frames where no evolution is done'. After that, a
  member evolves "after collecting 5,000 episode rewards in total".
* Fitness: the mean over the tasks of ``min(1, (return - random) / (human - random))``, table G.1.
* Exploit: a random other member is selected; "if the score of the selected instance is more than an
  absolute 5% higher", its weights and hyper-parameters are copied.
* Explore: "No matter if a copy happened or not, each parameter [...] is permuted with 33%
  probability by multiplying with either 1.2 or 1/1.2."
* The initial values are drawn as in table D.1.

The paper leaves these choices open:

* Frames and returns are counted for each member, and returns for all its tasks together.
* Returns of the burn-in do not count. A fitness is computed from the returns since the last one,
  and requires a return of every task.
* A fitness belongs to the weights: a member that copies weights takes over their fitness. A member
  without a fitness is never copied.
* The count of frames is not copied, and hyper-parameters have no bounds.

All random numbers come from one stream: first the initial values, by member and by name; then for
each evolution one word for the other member and one for each hyper-parameter, by name. A population
is therefore a pure function of its seed and of the order of returns and evolutions.
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
"""Draws an initial value from one word of a stream."""


def log_uniform(low: float, high: float) -> Prior:
    """Return the log-uniform distribution between two positive bounds.

    Its values are rounded to float32, because the powers of different libraries differ in the last
    bits of a float64.
    """
    return lambda stream: float(np.float32(low * (high / low) ** stream.uniform()))


def choice(*values: float) -> Prior:
    """Return the uniform distribution over some values."""
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
        references: Task to the scores of random play ``r`` and of a human ``h``; the same tasks.
    """
    capped = [
        min(1.0, (means[task] - random) / (human - random))
        for task, (random, human) in sorted(references.items())
    ]
    return fsum(capped) / len(capped)


def is_fitter(other: float | None, own: float, margin: float) -> bool:
    """Return whether ``other``, None if not known, exceeds ``own`` by more than ``margin``."""
    return other is not None and other > own + margin


def explore(values: Hyperparameters, rules: PopulationSpec, stream: Stream) -> Hyperparameters:
    """Return ``values``, each changed with the probability of the rules.

    One word of the stream is drawn for each, in the order of the names.
    """
    return {
        name: _changed(value, rules, stream.uniform()) for name, value in sorted(values.items())
    }


def _changed(value: float, rules: PopulationSpec, uniform: float) -> float:
    if uniform >= rules.probability:
        return value
    # The same draw decides the direction: each half of the range below ``probability`` is one.
    grows = uniform < rules.probability / 2
    return value * rules.factor if grows else value / rules.factor


# --- the population -------------------------------------------------------------------------------


@dataclass
class _Progress:
    """The progress of a member.

    Attributes:
        steps: Agent steps of its training so far.
        current: Number of its generation.
        counts: Task to the number of returns since the last fitness.
        sums: Task to the sum of these returns, added in the order of their arrival.
    """

    steps: int
    current: int
    counts: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)


class Population:
    """The members, their hyper-parameters and their ancestry. The caller trains them.

    Attributes:
        generations: All generations so far, which are the ancestry; the first ones of the members
            come first.
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
            rules: The rules of its evolution.
            references: Task to the scores by which returns are normalised; ``human`` is higher.
            stream: The stream ``population``, at its beginning.
            priors: Name of a hyper-parameter to the distribution of its initial values.
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
        """Return the current generation of ``member``."""
        return self.generations[self._progress[member].current]

    def collect(self, member: int, steps: int, returns: Iterable[tuple[str, float]]) -> None:
        """Count the returns of a member since the last call.

        Args:
            member: Number of the member.
            steps: Agent steps of its training so far.
            returns: Task and return of each episode that ended, in order.

        Raises:
            KeyError: A task has no reference scores.
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
        """Return whether ``member`` has enough returns for a fitness."""
        counts = self._progress[member].counts
        enough = sum(counts.values()) >= self._rules.episodes
        return enough and counts.keys() == self._references.keys()

    def evolve(self, member: int) -> Generation:
        """Compare ``member`` with another one and begin its next generation.

        If the generation is ``copied``, the caller gives ``member`` the trained tensors of its
        ``rival``.

        Raises:
            ValueError: The member is not ready.
        """
        if not self.ready(member):
            raise ValueError(f"member {member} has too few returns for a fitness")
        progress = self._progress[member]
        score = self._score(progress)
        rival = self._stream.integer(self._rules.members - 1)
        # The draw is among the other members, so the member itself is skipped.
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
        """Continue from a snapshot of a population with the same rules.

        Raises:
            CapsuleError: CAP-T201, the snapshot is of another seed.
        """
        self._stream.restore(state["stream"])
        self.generations = [Generation(**generation) for generation in state["generations"]]
        self._progress = [_Progress(**progress) for progress in state["members"]]

    def _score(self, progress: _Progress) -> float:
        means = {task: progress.sums[task] / count for task, count in progress.counts.items()}
        return mean_capped_score(means, self._references)
