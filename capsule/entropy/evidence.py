"""The evidence by which the rows of the ledger are judged.

There is no spec here, on purpose: what was asked for is no evidence of what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from capsule.entropy.journal import ToldReport
from capsule.entropy.report import EntropyReport, ProgramReport, RequestTally
from capsule.experiment.arrival_log import ArrivalLog
from capsule.experiment.contract import DataRead, Runtime, StreamProfiles
from capsule.experiment.mechanisms import Mechanisms, TorchProcesses
from capsule.host.wording import counted

Treatment = Literal[
    "eliminated",  # cannot occur in this run
    "seeded",  # derived from a seed in the lock
    "ordered",  # happens in a fixed order
    "recorded",  # written down, and replayed by verify
    "assumed",  # not controlled, or not read back; believed to be the same elsewhere
    "unsupported",  # not controlled, and able to change the result
]
Judged = tuple[Treatment, str]  # with the evidence
Judgement = Judged | None  # None: it does not apply to the run


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Documents of one finished run.

    Attributes:
        runtime: Flags and libraries, as read back before the training or the program began.
        mechanisms: What the run says that it used.
        report: What the launcher, its supervisor and the interposer counted; None if the run was
            not started by the launcher.
        streams: What the trainer's random streams gave out; None for a user program.
        arrivals: In which order a program took results and messages, if it recorded that.
        data: The data sets as they were before and after the run; None if it has none.
        engine: What the engine says of itself.
        image: Identity of the image whose container ran, as the engine reports it after the start;
            None without a container.
    """

    runtime: Runtime
    mechanisms: Mechanisms
    report: EntropyReport | None
    streams: StreamProfiles | None
    arrivals: ArrivalLog | None
    data: DataRead | None = None
    engine: Mapping[str, str]
    image: str | None

    @property
    def is_program(self) -> bool:
        """Whether a user program ran."""
        return self.mechanisms.trainer is None

    @property
    def programs(self) -> tuple[ProgramReport, ...]:
        """The executed programs, without Capsule's own interpreter beside a program."""
        if self.report is None:
            return ()
        return tuple(each for each in self.report.programs if self._counts(each.process))

    @property
    def told(self) -> tuple[ToldReport, ...]:
        """Answers to processes about the machine, without Capsule's own beside a program."""
        if self.report is None:
            return ()
        return tuple(each for each in self.report.told if self._counts(each.process))

    @property
    def requests(self) -> RequestTally:
        """Requests for entropy that were answered, without those of :attr:`own_requests`."""
        return self._requests(counted=True)

    @property
    def own_requests(self) -> RequestTally:
        """Requests of Capsule's own interpreter beside a program."""
        return self._requests(counted=False)

    @property
    def torch(self) -> tuple[TorchProcesses, ...]:
        """The processes that imported torch."""
        told = self.mechanisms.interpreters
        return () if told is None else told.torch

    @property
    def untold(self) -> str | None:
        """Why it is not known what every Python process of the run had; None if it is known."""
        told = self.mechanisms.interpreters
        if told is None:
            return "the records of the run's Python processes were changed or removed"
        if self.is_program and not (self.report and self.report.supervised):
            return "the run was not supervised, so Python processes may have run unrecorded"
        # The supervisor saw every execution. An interpreter that restarts itself is executed twice
        # and reports its hash seed once.
        executed = sum(1 for each in self.programs if each.executed and each.is_python)
        silent = executed - told.started - told.restarted
        if silent > 0:
            return f"{silent:,} of {counted(executed, 'Python program')} left no record"
        return None

    def _requests(self, *, counted: bool) -> RequestTally:
        if self.report is None:
            return RequestTally()
        return self.report.requests(lambda process: self._counts(process) == counted)

    def _counts(self, process: str) -> bool:
        return not self.is_program or not is_own(process)


def is_own(process: str) -> bool:
    """Tell whether a process beside a user program is Capsule's.

    Capsule's interpreter is the first process and starts the program by executing it; what it only
    forks is its own. Executing a program appends ``x`` to the path, and paths too long are digests
    (``docs/random-profiles.md``).
    """
    return not ("x" in process or process.startswith("#"))


@dataclass(frozen=True)
class LedgerSource:
    """A source of nondeterminism.

    Attributes:
        name: What the row is called.
        judge: Says from a run's evidence what became of it; None where it does not apply.
        weakened_by: What would make the treatment fail.
    """

    name: str
    judge: Callable[[Evidence], Judgement]
    weakened_by: str
