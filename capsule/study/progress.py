"""How far a study is: one row per group, and the failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from capsule.host.wording import counted
from capsule.report.progress import duration, seconds_left
from capsule.report.text import print_line, printable
from capsule.study.directory import MemberState, Outcome, State, StudyDirectory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Agent steps per second of a member. A program that reports more has absurd numbers in its events.
MOST_STEPS_PER_SECOND = 1e9
STATES: tuple[State, ...] = ("done", "running", "failed", "stopped", "waiting")


class GroupProgress(NamedTuple):
    """How far a group is.

    Attributes:
        name: The group; "all" for the whole study.
        counts: Number of members in each state.
        steps_per_second: Agent steps per second of the running members together.
        seconds_left: Seconds left at this speed; None if nothing runs, or a total is unknown.
    """

    name: str
    counts: Mapping[State, int]
    steps_per_second: float
    seconds_left: float | None

    def speed(self) -> dict[str, float | None]:
        """Return the last two as JSON values."""
        return {"steps_per_second": self.steps_per_second, "seconds_left": self.seconds_left}


class StudyProgress(NamedTuple):
    """How far a study is."""

    groups: tuple[GroupProgress, ...]
    whole: GroupProgress
    failures: Mapping[str, Outcome]  # by member

    def document(self) -> dict[str, Any]:
        """Return the progress as JSON values."""
        return {
            "schema": "capsule/study-progress/v1",
            "groups": {group.name: dict(group.counts) for group in self.groups},
            "speeds": {group.name: group.speed() for group in self.groups},
            "all": {**self.whole.counts, **self.whole.speed()},
            "failures": {
                name: outcome.model_dump(mode="json", by_alias=True)
                for name, outcome in self.failures.items()
            },
        }


def progress_of(study: StudyDirectory) -> StudyProgress:
    """Read how far a study is from its folder."""
    groups: dict[str, list[MemberState]] = {}
    for member in study.lock.members:
        group = study.lock.planned[member.name].group
        groups.setdefault(group, []).append(study.state(member.name))
    states = [state for members in groups.values() for state in members]
    return StudyProgress(
        groups=tuple(_progress(name, members) for name, members in groups.items()),
        whole=_progress("all", states),
        failures={
            state.name: state.outcome
            for state in states
            if state.outcome is not None and state.state == "failed"
        },
    )


def _progress(name: str, states: Sequence[MemberState]) -> GroupProgress:
    counted = Counter(state.state for state in states)
    running = [state for state in states if state.state == "running"]
    speeds = [state.steps_per_second or 0.0 for state in running]
    # NaN is excluded, too: it is neither larger nor smaller than any number.
    speed = sum(each for each in speeds if 0 < each <= MOST_STEPS_PER_SECOND)
    steps = _steps_left(states)
    left = seconds_left(steps, speed) if speed and steps is not None else None
    return GroupProgress(name, {state: counted[state] for state in STATES}, speed, left)


def _steps_left(states: Iterable[MemberState]) -> int | None:
    """Return the agent steps that are left, members that have not begun counting as the others."""
    totals = [state.total_steps for state in states if state.total_steps is not None]
    if not totals:
        return None
    left = 0
    for state in states:
        if state.state not in ("done", "failed"):
            # A member that has not begun has reported no total: the longest of the others is
            # assumed.
            total = max(totals) if state.total_steps is None else state.total_steps
            left += max(0, total - (state.step or 0))
    return left


class MemberChanges:
    """Says which members have begun and ended, for output that is not a terminal."""

    def __init__(self, study: StudyDirectory, names: Sequence[str]) -> None:
        """Read where the members ``names`` stand now."""
        self._study = study
        self._states = {name: study.state(name).state for name in names}

    def lines(self) -> Iterator[str]:
        """Yield a line for each member whose state is another one than at the last call."""
        for name, before in self._states.items():
            now = self._study.state(name)
            if now.state == before or now.state == "waiting":
                continue
            self._states[name] = now.state
            if now.outcome is not None and now.outcome.code:
                yield f"{name} failed: {now.outcome.code}: {now.outcome.message}"
            elif now.state == "done":
                done = list(self._states.values()).count("done")
                yield f"{name} is done ({done} of {counted(len(self._states), 'member')})"
            else:
                yield f"{name} {_BEGUN[now.state]}"


_BEGUN = {"running": "is running", "stopped": "was stopped"}


def show(progress: StudyProgress, console: Console) -> None:
    """Print how far a study is."""
    console.print(table(progress))
    for name, outcome in progress.failures.items():
        lines = f"{name} failed: {outcome.code}: {outcome.message}\nfix: {outcome.fix}"
        for line in lines.splitlines():
            print_line(console, printable(line))


def table(progress: StudyProgress) -> Table:
    """Return the table of :func:`show`."""
    from rich.table import Table

    # Without padding, the table fits into 80 columns.
    shown = Table("group", *STATES, "steps/s", "left", padding=(0, 0))
    shown.columns[0].overflow = "fold"  # long names are broken, since numbers must stay whole
    for column in shown.columns[1:]:
        column.no_wrap = True
        column.justify = "right"
    for group in progress.groups:
        shown.add_row(*_cells(group))
    shown.add_section()
    shown.add_row(*_cells(progress.whole))
    return shown


def _cells(group: GroupProgress) -> list[str]:
    speed = f"{group.steps_per_second:,.0f}" if group.steps_per_second else "-"
    left = "-" if group.seconds_left is None else duration(group.seconds_left)
    return [group.name, *(str(group.counts[state]) for state in STATES), speed, left]
