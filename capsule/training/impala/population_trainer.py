"""A population of IMPALA trainers (Espeholt et al. 2018, arXiv:1802.01561, appendix F).

The rules are those of :mod:`capsule.training.impala.population`, whose frames are agent steps here.
Its members are whole trainers, with actors, seeds, a schedule and a replay memory of their own,
which take turns in one process. An *interval* of the population is one of each::

    every member with enough returns evolves                    member 0, 1, …
    every member gives its actors the parameters
    every member learns a batch                                 member 0, 1, …

So an evolution follows the returns that it is decided by, and comes before the first batch that is
trained on with it: in the trace, too. Steps are those of one member, as all have made the same.

Member ``i`` has the root seed that stream ``population`` of index ``1 + i`` draws first, below
2^53, from the run's; so has each stream that the spec seeds alone. Until a member first evolves it
therefore is, bit for bit, the plain trainer of its seed and hyper-parameters. The population's own
draws are stream ``population`` of index 0.

Left open by the paper, and here so:

* A copy is of the parameters and of RMSProp's running means. Environments, recurrent states and the
  replay memory stay the member's own. So do unrolls that were begun before, with its old policy,
  which the correction treats like any other lag.
* ``max_gradient_norm``, which tables D.1 and G.1 give a value and no range, begins with the spec's.
* Learning rates do not fall but by evolution: figure F.1 shows the schedule that a population
  discovers beside a linear one. With ``annealing: true`` the member's present rate is multiplied by
  what is left of the training.
* The run's network, which is evaluated, is the fittest member's; of equals, and while there is no
  fitness, the first one's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capsule.experiment import contract
from capsule.experiment.contract import StreamProfile
from capsule.experiment.errors import CapsuleError
from capsule.experiment.inference import added
from capsule.experiment.mechanisms import TrainerUse
from capsule.experiment.spec import SeedsSpec, references_of
from capsule.experiment.trainers import ImpalaTrainer, PopulationSpec
from capsule.training.evaluation.protocol import EvaluatedPolicy
from capsule.training.impala.factory import make_impala
from capsule.training.impala.learner import Impala
from capsule.training.impala.population import DMLAB_PRIORS, Population, choice
from capsule.training.networks.feedforward import Parameters
from capsule.training.state.streams import Stream, make_streams
from capsule.training.trainer import TrainerContext

_STREAM = "population"
_SEEDS = 2**53


def make_population(
    context: TrainerContext, trainer: ImpalaTrainer, population: PopulationSpec
) -> ImpalaPopulation:
    """Make the trainer with all its members.

    Raises:
        CapsuleError: CAP-T371, actors are to play on a cluster.
    """
    if cluster := os.environ.get(contract.CLUSTER_VARIABLE):
        raise CapsuleError(
            "CAP-T371",
            f"the members of a population cannot share the Ray cluster at {cluster}",
            fix="Run it without a cluster, or remove trainer.population.",
        )
    references = references_of(context.spec.environment, population)
    stream = Stream(_STREAM, context.seeds.root)
    norm = trainer.max_gradient_norm
    priors = DMLAB_PRIORS if norm is None else DMLAB_PRIORS | {"max_gradient_norm": choice(norm)}
    rules = Population(population, references, stream, priors)
    count = population.members
    settings = [member_setting(context, number, count) for number in range(count)]
    members = []
    for number, each in enumerate(settings):
        with _named(number):
            values = rules.current(number).values
            members.append(make_impala(each, trainer.model_copy(update=values)))
    streams = [each.streams for each in settings]
    return ImpalaPopulation(context, members, rules, stream, streams, list(references))


def member_setting(context: TrainerContext, number: int, members: int) -> TrainerContext:
    """Return what a member is given: a folder, seeds and streams of its own."""
    directory = context.directory / f"member-{number}"
    directory.mkdir(exist_ok=True)
    seeds = member_seeds(context.seeds, number)
    return replace(
        context, directory=directory, seeds=seeds, streams=make_streams(seeds), members=members
    )


def member_seeds(seeds: SeedsSpec, number: int) -> SeedsSpec:
    """Return the seeds of a member, each derived from the run's."""

    def derived(seed: int) -> int:
        return Stream(_STREAM, seed, 1 + number).integer(_SEEDS)

    streams = {name: derived(seed) for name, seed in seeds.streams.items()}
    return seeds.model_copy(update={"root": derived(seeds.root), "streams": streams})


class ImpalaPopulation:
    """Members that train in turn, of which the fitter replace others.

    Attributes:
        step: Agent steps of each member.
        episodes: Episodes finished, of all members.
        loss: Loss of the fittest member's last batch, None before the first.
        actions: Number of actions.
        online: Parameters theta of the fittest member.
    """

    def __init__(
        self,
        context: TrainerContext,
        members: Sequence[Impala],
        population: Population,
        stream: Stream,
        streams: Sequence[Mapping[Any, Stream]],
        tasks: Sequence[str],
    ) -> None:
        """Begin.

        Args:
            context: The run.
            members: Each with the hyper-parameters that it begins with.
            population: The rules.
            stream: What they draw from.
            streams: Those of each member, by name.
            tasks: Names; actor ``i`` of each member plays number ``i`` modulo how many there are.
        """
        self._recording, self._trace = context.spec.recording, context.trace
        self._members, self._population, self._tasks = members, population, tasks
        self._shared = context.streams
        self._own = {_STREAM: stream} | _named_by_member(
            [dict(sorted(each.items())) for each in streams]
        )
        self._recorded = 0  # generations that the trace has
        self.actions = members[0].actions
        self._sum_up()

    @property
    def mean_return(self) -> float | None:
        """Mean episode return of the fittest member's last 100 episodes, None before the first."""
        return self._fittest().mean_return

    # The algorithm

    def train_step(self) -> None:
        """Let every member that is ready evolve; then have every member learn one batch."""
        self._evolve()
        # Before any member learns, so that the actors of all members play meanwhile.
        for member in self._members:
            member.publish()
        for number, member in enumerate(self._members):
            with _named(number):
                ended = member.learn()
            returns = [(self._tasks[actor % len(self._tasks)], each) for actor, each in ended]
            self._population.collect(number, member.step, returns)
        self._sum_up()
        if self.step % self._recording.trace_interval == 0:
            self.record()

    def exploration(self) -> None:
        """Return None: policies are random by themselves."""

    def policy(self, parameters: Parameters) -> EvaluatedPolicy:
        """Return the policy of ``parameters``, for evaluations, which choose by its logits."""
        return self._members[0].policy(parameters)

    def _evolve(self) -> None:
        for number, member in enumerate(self._members):
            # In the order of the members: one that evolves later is compared with what an earlier
            # one has just become.
            if self._population.ready(number):
                generation = self._population.evolve(number)
                member.adopt(generation.values, self._copied(generation))

    def _copied(self, generation: contract.Generation) -> dict[str, NDArray[np.float32]] | None:
        """Return what a generation begins with, if that is its rival's."""
        if generation.rival is None or not generation.copied:
            return None
        return self._members[generation.rival].tensors()

    def _fittest(self) -> Impala:
        def fitness(number: int) -> float:
            found = self._population.current(number).fitness
            return -np.inf if found is None else found

        return self._members[max(range(len(self._members)), key=fitness)]  # the first of equals

    def _sum_up(self) -> None:
        fittest = self._fittest()
        self.step, self.loss, self.online = fittest.step, fittest.loss, fittest.online
        self.episodes = sum(member.episodes for member in self._members)

    # Recording

    def record(self, *, complete: bool = False) -> None:
        """Write one trace record for all members, whose data were folded in their turns."""
        complete = complete or self._trace.wants_tensors(self.step, self._recording)
        begun = self._population.generations[self._recorded :]
        unrolls = [member.take_unrolls() for member in self._members]
        self._trace.record(
            self.step,
            {**self._shared, **self._own},
            loss=self.loss,
            generations={each.name: each.facts() for each in begun} or None,
            unrolls=_named_by_member(unrolls, "member {}, {}"),
            tensors=self._digests() if complete else None,
        )
        self._recorded += len(begun)

    def _digests(self) -> dict[str, dict[str, str]]:
        digests = [member.digests() for member in self._members]
        return {
            component: _named_by_member([each[component] for each in digests])
            for component in digests[0]
        }

    def tensor_names(self) -> list[str]:
        """See :meth:`BaseTrainer.tensor_names`."""
        return [*_named_by_member([dict.fromkeys(each.tensor_names()) for each in self._members])]

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Return copies of all trained tensors, as ``member N/group/name``."""
        return _named_by_member([member.tensors() for member in self._members])

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot of everything but the tensors, run's streams and trace."""
        return {
            "population": self._population.state(),
            "recorded": self._recorded,
            "streams": {name: stream.state() for name, stream in self._own.items()},
            "members": [member.state() for member in self._members],
        }

    def restore(
        self, step: int, state: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
    ) -> None:
        """Continue from a snapshot; the run's streams and trace are restored already.

        Raises:
            CapsuleError: An environment does not return to it; CAP-T201, it is of another seed.
        """
        self._population.restore(state["population"])
        self._recorded = state["recorded"]
        for name, stream in self._own.items():
            stream.restore(state["streams"][name])
        for number, member in enumerate(self._members):
            prefix = _name(number, "")
            own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            with _named(number):
                member.restore(step, state["members"][number], own)
            # The members were made with their initial values. Those of their generations apply now.
            member.adopt(self._population.current(number).values)
        self._sum_up()

    def stream_profiles(self) -> list[StreamProfile]:
        """Return the population's stream, and those of members as ``member N/stream``."""
        profiles = [
            stream.profile().model_copy(update={"name": name}) for name, stream in self._own.items()
        ]
        for number, member in enumerate(self._members):
            profiles += [
                each.model_copy(update={"name": _name(number, each.name)})
                for each in member.stream_profiles()
            ]
        return profiles

    def use(self) -> TrainerUse:
        """Say what the members used, who all have the same schedule."""
        uses = [member.use() for member in self._members]
        inference = added([use.inference for use in uses if use.inference is not None])
        actors = sum(use.actors for use in uses)
        return uses[0].model_copy(update={"actors": actors, "inference": inference})

    def artifacts(self) -> dict[str, bytes]:
        """Return the ancestry."""
        ancestry = contract.Ancestry(generations=tuple(self._population.generations))
        return {contract.POPULATION: ancestry.document()}

    def close(self) -> None:
        """End every thread and process."""
        for member in self._members:
            member.close()


def _name(number: int, what: str, form: str = "member {}/{}") -> str:
    return form.format(number, what)


def _named_by_member(
    parts: Sequence[Mapping[str, Any]], form: str = "member {}/{}"
) -> dict[str, Any]:
    """Put what members have under one another, named by whose it is."""
    return {
        _name(number, name, form): value
        for number, part in enumerate(parts)
        for name, value in part.items()
    }


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Name the member in errors."""
    try:
        yield
    except CapsuleError as error:
        raise error.within(f"member {number}") from error
