"""A population of IMPALA trainers (Espeholt et al. 2018, arXiv:1802.01561, appendix F).

The rules are those of :mod:`capsule.training.impala.population`; frames are counted as agent steps.
The members are complete trainers, each with its own actors, seeds, schedule and replay memory, and
take turns in one process. In an *interval* of the population, each of these comes once, in the
order of the members:

1. Every member with enough returns evolves.
2. Every member gives its actors its parameters.
3. Every member trains on one batch.

An evolution therefore comes after the returns that decide it and before the first batch that is
trained on with its result, also in the trace. All members have made the same number of steps, which
is the number of steps of the run.

The root seed of member ``i`` is the first integer below 2^53 that is drawn from the stream
``population`` with index ``1 + i`` of the run's root seed. The seeds of streams that the spec seeds
separately are derived in the same way. Until it first evolves, a member is therefore, bit for bit,
the plain trainer with its seed and hyper-parameters. The population itself draws from the stream
``population`` with index 0.

The paper leaves these choices open:

* A copy consists of the parameters and of RMSProp's running means. A member keeps its environments,
  recurrent states and replay memory. It also keeps the unrolls that it began with its old policy,
  which the correction treats like any other lag.
* ``max_gradient_norm``, for which tables D.1 and G.1 give a value and no range, begins with the
  value of the spec.
* Learning rates decrease only by evolution: figure F.1 compares the schedule that a population
  discovers with a linear one. With ``annealing: true`` the member's current rate is multiplied by
  the remaining share of the training.
* The network of the run, which is evaluated, is that of the fittest member; among equals, and as
  long as no member has a fitness, that of the first.
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
        CapsuleError: CAP-T371, the actors would run on a cluster; or as
            :func:`capsule.training.impala.factory.make_impala`.
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
    """Return the context of a member, with its own folder, seeds and streams.

    Args:
        context: The run.
        number: Number of the member.
        members: Number of all members.
    """
    directory = context.directory / f"member-{number}"
    directory.mkdir(exist_ok=True)
    seeds = member_seeds(context.seeds, number)
    return replace(
        context, directory=directory, seeds=seeds, streams=make_streams(seeds), members=members
    )


def member_seeds(seeds: SeedsSpec, number: int) -> SeedsSpec:
    """Return the seeds of a member, each derived from the run's, as the module describes."""

    def derived(seed: int) -> int:
        return Stream(_STREAM, seed, 1 + number).integer(_SEEDS)

    streams = {name: derived(seed) for name, seed in seeds.streams.items()}
    return seeds.model_copy(update={"root": derived(seeds.root), "streams": streams})


class ImpalaPopulation:
    """A trainer of several members, which train in turn and copy fitter ones.

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
        """Take over the members, before their first step.

        Args:
            context: The run.
            members: The members, with their initial hyper-parameters.
            population: The rules, and the ancestry.
            stream: The stream from which ``population`` draws.
            streams: The streams of each member, by name.
            tasks: Names of the tasks; actor ``i`` of each member plays task ``i`` modulo their
                number.
        """
        self._recording, self._trace = context.spec.recording, context.trace
        self._members, self._population, self._tasks = members, population, tasks
        self._shared = context.streams
        self._own = {_STREAM: stream} | _named_by_member(
            [dict(sorted(each.items())) for each in streams]
        )
        self._recorded = 0  # generations that are in the trace
        self.actions = members[0].actions
        self._sum_up()

    @property
    def mean_return(self) -> float | None:
        """Mean episode return of the fittest member's last 100 episodes, None before the first."""
        return self._fittest().mean_return

    # The algorithm

    def train_step(self) -> None:
        """Let every member that is ready evolve; then train every member on one batch."""
        self._evolve()
        # All members publish before any member learns, so that all actors play meanwhile.
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
        """Return None: the policies themselves are stochastic."""

    def policy(self, parameters: Parameters) -> EvaluatedPolicy:
        """Return the policy of ``parameters``, for evaluations, which choose by its logits."""
        return self._members[0].policy(parameters)

    def _evolve(self) -> None:
        for number, member in enumerate(self._members):
            # The order matters: a later member may be compared with the new generation of an
            # earlier one.
            if self._population.ready(number):
                generation = self._population.evolve(number)
                member.adopt(generation.values, self._copied(generation))

    def _copied(self, generation: contract.Generation) -> dict[str, NDArray[np.float32]] | None:
        """Return the trained tensors that a generation copies from its rival, if it copies any."""
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
        """Write one trace record for all members, which have added their data in turn."""
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
            CapsuleError: As :meth:`BaseTrainer.restore`; CAP-T201, it is of another seed.
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
            # The members were made with their initial values, and continue with those of their
            # current generations.
            member.adopt(self._population.current(number).values)
        self._sum_up()

    def stream_profiles(self) -> list[StreamProfile]:
        """Return profiles of the population's stream, and of members' as ``member N/stream``."""
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
        """Return what all members used together; their schedules are of the same kind."""
        uses = [member.use() for member in self._members]
        inference = added([use.inference for use in uses if use.inference is not None])
        actors = sum(use.actors for use in uses)
        return uses[0].model_copy(update={"actors": actors, "inference": inference})

    def artifacts(self) -> dict[str, bytes]:
        """Return the document of the ancestry."""
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
    """Return the values of all members in one mapping, with the member in each name."""
    return {
        _name(number, name, form): value
        for number, part in enumerate(parts)
        for name, value in part.items()
    }


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Add the member to the message of an error that is raised in the block."""
    try:
        yield
    except CapsuleError as error:
        raise error.within(f"member {number}") from error
