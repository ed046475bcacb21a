"""The surroundings of a re-execution in which ``capsule verify --vary`` changes one thing.

A run is executed again in surroundings of its own: the spec's variables, the engine's host name,
all processors of the machine. A :class:`Variation` is the change of one of them, made outside of
what the run itself decides. Some of them are pinned by the spec for every re-execution. They get
another value as well, which shows on what the result would depend without the pin.

A user program is given another time zone or locale by a shell that starts it, since
Capsule's own interpreter, its parent, checks that it has the variables of the spec. The randomness
that Capsule derives for a program depends on its place in the tree of processes, and the shell
changes that. A program that differs is therefore executed by the same shell with the recorded
values, too (:meth:`Variation.neutral`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from capsule.bundle.claims import records_schedule
from capsule.execution import VariedSurroundings
from capsule.experiment.canonical import canonical_json
from capsule.experiment.lock import Lock
from capsule.experiment.trainers import CommandTrainer, DqnTrainer, ImpalaTrainer
from capsule.experiment.variables import environment_variables
from capsule.host.errors import CapsuleError

VariationName = Literal["threads", "processes", "locale", "timezone", "hostname", "cpu-count"]
NAMES: tuple[VariationName, ...] = get_args(VariationName)

# Flags that state the number of threads or of processors. Runs in which these are varied have other
# ones, which is no difference of their results.
_FLAGS = frozenset(
    {
        "environment.CAPSULE_DETERMINISM",
        "environment.MKL_NUM_THREADS",
        "environment.OMP_NUM_THREADS",
        "environment.OPENBLAS_NUM_THREADS",
        "mkl.threads",
        "torch.num_threads",
    }
)

_SETTINGS = "CAPSULE_DETERMINISM"
_HOSTNAME = "varied-host"
# Not the name of a zone: an image without the zones' files would take that for UTC. POSIX counts
# the offset to the west, so -14 is 14 hours ahead.
_VARIABLES: Mapping[VariationName, Mapping[str, str]] = {
    "timezone": {"TZ": "<+14>-14"},
    "locale": {"LANG": "C", "LC_ALL": "C"},
}


@dataclass(frozen=True, kw_only=True)
class Variation:
    """A change of the surroundings of a re-execution; without one, it is the control.

    Attributes:
        determinism: Fields of the spec's ``determinism`` with other values.
        variables: Environment variables with other values.
        hostname: Another host name.
        processors: The only processors to run on, as the kernel lists them.
        learners: Processes that share the gradient of a batch.
        replicas: Processes that answer the actors.
    """

    determinism: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    hostname: str | None = None
    processors: str | None = None
    learners: int = 1
    replicas: int = 1

    @property
    def flags(self) -> frozenset[str]:
        """The flags of a run that state what is changed."""
        # Other processors change these flags, too: where the spec pins no number of threads, torch
        # takes it from the processors.
        return _FLAGS if self.determinism or self.processors else frozenset()

    def lock(self, lock: Lock) -> Lock:
        """Return the lock to execute: with other settings, or the command behind a shell."""
        changed = lock.spec.determinism.model_copy(update=dict(self.determinism))
        update: dict[str, Any] = {"determinism": changed}
        if isinstance(lock.spec.trainer, CommandTrainer):
            command = (*self._shell(lock), *lock.spec.trainer.command)
            update["trainer"] = lock.spec.trainer.model_copy(update={"command": command})
        return lock.model_copy(update={"spec": lock.spec.model_copy(update=update)})

    def surroundings(self, lock: Lock) -> VariedSurroundings:
        """Return what is not to be as usual around the run."""
        program = isinstance(lock.spec.trainer, CommandTrainer)
        return VariedSurroundings(
            hostname=self.hostname,
            processors=self.processors,
            # Capsule's interpreter starts a program only with the variables of the spec.
            variables={} if program else self.variables,
            shell=self._shell(lock) if program else (),
        )

    def neutral(self, lock: Lock) -> Variation | None:
        """Return the same change of how a program is started, with the values of its spec.

        None where a program is started as usual, and for a trainer.
        """
        if not self._shell(lock) or not isinstance(lock.spec.trainer, CommandTrainer):
            return None
        usual = environment_variables(lock.spec)
        return replace(self, variables={name: usual[name] for name in self.variables})

    def _shell(self, lock: Lock) -> tuple[str, ...]:
        """Return the words that set the variables and then become the program after them.

        The hook that waits for torch compares the variables with those in the settings.
        """
        if not self.variables:
            return ()
        variables = dict(self.variables)
        settings = environment_variables(lock.spec).get(_SETTINGS)
        if settings is not None:
            document = json.loads(settings)
            document["environment"] |= self.variables
            variables[_SETTINGS] = canonical_json(document).decode()
        # The words of the program follow as arguments of the shell and become $0 and $@, so that
        # none of them is parsed by the shell.
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        return ("sh", "-c", f'export {given}; exec "$0" "$@"')


CONTROL = Variation()


@dataclass(frozen=True)
class Inapplicable:
    """A variation that cannot be made of a run.

    Attributes:
        reason: Why not.
        elsewhere: Whether another engine could make it.
    """

    reason: str
    elsewhere: bool = False


class Wanted(NamedTuple):
    """The variations that were requested.

    Attributes:
        names: In the order of :data:`NAMES`.
        where_possible: Whether what the engine cannot vary may be left out.
    """

    names: tuple[VariationName, ...]
    where_possible: bool


def parse_names(text: str) -> Wanted:
    """Parse the names of variations with commas between them, or ``all``.

    Raises:
        CapsuleError: CAP-V066, one of them is not known, or there is none.
    """
    given = [word.strip() for word in text.split(",")]
    wanted = set(NAMES) if given == ["all"] else set(given)
    if unknown := sorted(wanted - {*NAMES}):
        raise CapsuleError(
            "CAP-V066",
            f"--vary {text!r}: {unknown[0]!r} cannot be varied",
            fix=f"Use 'all', or one or more of {', '.join(NAMES)}, with commas between them.",
        )
    return Wanted(tuple(name for name in NAMES if name in wanted), given == ["all"])


def variation_of(
    name: VariationName, lock: Lock, usable: str, *, container: bool
) -> Variation | Inapplicable:
    """Return what changes one thing of the surroundings of a run, and nothing else.

    Args:
        name: The thing to change.
        lock: The locked experiment.
        usable: Processors that the run has as usual, as the kernel lists them.
        container: Whether it is executed in one.
    """
    settings = lock.spec.determinism
    program = isinstance(lock.spec.trainer, CommandTrainer)
    if name == "threads":
        if records_schedule(lock):
            return Inapplicable(
                "a recorded schedule is valid for the spec's number of threads only"
            )
        return Variation(determinism={"threads": 2 if settings.threads == 1 else 1})
    if name == "processes":
        return _processes(lock)
    if name == "hostname":
        if not container:
            return Inapplicable(
                "without a container, the host name cannot be chosen", elsewhere=True
            )
        return Variation(hostname=_HOSTNAME)
    if name != "cpu-count":
        return Variation(variables=_VARIABLES[name])
    fewer = without_last(usable)
    # Capsule's trainers ask the kernel, and are not told another number.
    # No program can be told that there is no processor, so 1 becomes 2.
    told = {"cores": settings.cores - 1 or 2} if program and settings.cores is not None else {}
    if fewer is None and not told:
        return Inapplicable("the run has only one processor on this machine")
    return Variation(processors=fewer, determinism=told)


def _processes(lock: Lock) -> Variation | Inapplicable:
    trainer = lock.spec.trainer
    if isinstance(trainer, ImpalaTrainer):
        served = trainer.inference.mode == "server"
        return Variation(learners=2, replicas=2 if served else 1)
    if isinstance(trainer, CommandTrainer):
        return Inapplicable("the program determines the number of its processes")
    if isinstance(trainer, DqnTrainer):
        return Inapplicable("DQN trains in one process; 'cpu-count' varies its threads")
    return Inapplicable("R2D2's actors have a process for each processor, which 'cpu-count' varies")


def without_last(processors: str) -> str | None:
    """Return a list of processors without its last one; None if it has only that one.

    Args:
        processors: Numbers and ranges as the kernel writes them: ``0-2,5``.
    """
    numbers = listed(processors)[:-1]
    return ",".join(map(str, numbers)) or None


def listed(processors: str) -> list[int]:
    """Return the numbers in a list of processors as the kernel writes it: ``0-2,5``."""
    numbers: list[int] = []
    for part in processors.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def pinned(name: VariationName, lock: Lock) -> str | None:
    """Return what gives every re-execution the same value; None if the machine decides."""
    settings = lock.spec.determinism
    program = isinstance(lock.spec.trainer, CommandTrainer)
    if name in _VARIABLES:
        usual = environment_variables(lock.spec)
        return " ".join(f"{variable}={usual[variable]}" for variable in _VARIABLES[name])
    if name == "threads" and settings.threads is not None:
        return f"determinism.threads: {settings.threads}"
    if name == "cpu-count" and program and settings.cores is not None:
        return f"determinism.cores: {settings.cores}"
    return "the container's host name" if name == "hostname" else None
