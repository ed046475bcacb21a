"""From the first difference of two runs to its cause: plain rules, each with its evidence.

A rule looks at the facts and names its class of causes, or none. A cause is *shown* if no other
class can have the same evidence, *likely* if something that differs explains it, and *possible*
if nothing contradicts it. ``docs/diff.md`` has the rules in words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from capsule.experiment.trace import Difference
from capsule.host.wording import agreeing, counted
from capsule.verification.analysis.pin_differences import OWN_ORDER, Change, Family, Kind
from capsule.verification.analysis.trace_alignment import TraceAlignment
from capsule.verification.component_words import (
    component_agreeing,
    component_differs,
    component_words,
)
from capsule.verification.content.parts import HARMLESS, Nature, Part
from capsule.verification.content.ulp import Distance
from capsule.verification.verdict import (
    Bisection,
    Cause,
    CauseName,
    Certainty,
    ComponentDifference,
    OutputComparison,
    OutputDifference,
)

ROUNDING = 1e-3  # relative difference of a loss up to which rounding may have grown within a record
GIVEN = ("observations", "rewards", "terminals")  # by the environment
RESULTS = ("streams", "checkpoints", "parameters", "evaluation", "steps", "episodes")
COMPUTED = ("loss", "gradient", "parameters", "target", "optimizer")
CAUSES_SHOWN = 2
_EVIDENCE = 3  # changes named for one cause
_DURATION = (
    r"(?<![a-z])(times?|timers?|seconds?|secs?|duration|elapsed|took|fps|sps|speed|throughput|latency"
    r"|(it|steps?|frames?)(/|_per_)s(ec(ond)?)?)(?![a-z])"
)
_DURATION_NAME = re.compile(_DURATION, re.IGNORECASE)
# What follows a number, unless it is the name of the next one.
_DURATION_UNIT = re.compile(rf" ?{_DURATION}(?![\s:=]*[-+.\d])", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(\d[\d_,]*\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
# What follows, in a progress bar of tqdm, on a digit of its count or of the time that has passed.
_REST_OF_BAR = re.compile(r"([\d.kMGT% |#/\u2588-\u258f]*\[)?[\d:]*<[\d:?]+, ")
_DISTANCE = re.compile(r", [\d,]+ ulp away$")  # what content/values.py adds to a number
_OF_ONE_RUN = (
    "the files of one run agree with each other: these were changed or damaged, or come from "
    "several runs"
)
_UNKNOWN_REASON = (
    "no difference between the locks or the machines is known, so the results were changed, a "
    "machine made an error, or the run does not repeat itself, which 'capsule diagnose' finds out"
)


CalendarClock = Literal["system", "virtual", "fixed"]
_CLOCK_FIXES: dict[CalendarClock, str] = {
    "system": "Set entropy.clock: virtual, whose calendar starts at the same date in every run; or "
    "exclude the file with trainer.outputs.",
    "virtual": "Under entropy.clock: virtual, dates differ if a thread reads the clock, sleeps or "
    "waits until a time-out another number of times. Times of files, and dates of programs that do "
    "not use the C library (such as those in Go), are the machine's. Exclude the file with "
    "trainer.outputs, or set trainer.standard_output: false; or, for a thread's dates, set "
    "entropy.clock: fixed, whose date never advances.",
    "fixed": "Under entropy.clock: fixed, times of files still differ, and so do dates that a "
    "program reads without the C library. Exclude the file with trainer.outputs.",
}
_OTHER_PATH = (
    "If threads or processes of the program race, exchange results through "
    "capsule.training.arrivals, or use one process. Exclude files with durations, or with dates of "
    "programs that do not use the C library (such as those in Go), with trainer.outputs."
)
_NOT_REPEATED = (
    "Durations that the program measures differ in every run: keep them out of its outputs, or "
    "exclude these with trainer.outputs or trainer.standard_output. If threads or processes of the "
    "program race, as those that share a model do, its results depend on the speed of the machine: "
    "exchange results through capsule.training.arrivals, which records their order, or use one "
    "process."
)


@dataclass(frozen=True)
class Facts:
    """The known facts about two runs that are not equal.

    Attributes:
        alignment: The alignment of their traces; None for your own programs.
        results: What differs beside the trace.
        changes: What differs in pins and machines.
        circumstances: Why two honest runs may differ even if no change is known.
        contradictions: Statements of a side that contradict each other.
        loss: How far apart the losses are where they first differ.
        bisection: What dense records of both sides showed.
        outputs: The outputs of a program that differ, compared by content.
        clock: The calendar clock that the program read.
        drawn: The processes of the program that asked for other amounts of randomness.
    """

    alignment: TraceAlignment | None
    results: tuple[ComponentDifference, ...]
    changes: tuple[Change, ...]
    circumstances: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    loss: Distance | None = None
    bisection: Bisection | None = None
    outputs: OutputComparison | None = None
    clock: CalendarClock = "system"
    drawn: tuple[str, ...] = ()

    @property
    def first(self) -> Difference | None:
        """The first record that differs."""
        return None if self.alignment is None else self.alignment.first

    @property
    def parts(self) -> tuple[str, ...]:
        """Components of the first difference, causes before effects; as fine as is known."""
        if self.bisection is not None:
            return self.bisection.component, *self.bisection.also
        return () if self.first is None else (self.first.component, *self.first.also)

    @property
    def place(self) -> str:
        """The place of the first difference."""
        if self.bisection is not None:
            return f"the update that ends at step {self.bisection.step}"
        return f"the record of step {0 if self.first is None else self.first.step}"

    def of(self, *kinds: Kind) -> list[Change]:
        """Return the changes of some kinds."""
        return [change for change in self.changes if change.kind in kinds]

    @property
    def may_differ(self) -> bool:
        """Whether two honest runs may differ: for a change, or for what is not known of them."""
        changed = any(change.kind != "recording" for change in self.changes)
        return changed or bool(self.circumstances)

    def family(self) -> Family:
        """Return the kind of what differs first."""
        if not self.parts:
            return "results"
        if self.parts[0] == "schedule":
            return "schedule"
        if self.of("seed") and "streams" in self.parts:
            return "seed"
        return "environment" if any(part in self.parts for part in GIVEN) else "numbers"


def explain(facts: Facts) -> tuple[Cause, ...]:
    """Name the classes that the evidence allows, the most likely first, at most two."""
    found = [cause for rule in _RULES if (cause := rule(facts)) is not None]
    order = get_args(Certainty)
    # A stable sort: among causes of one certainty, the order of the rules decides.
    found.sort(key=lambda cause: order.index(cause.certainty or "possible"))
    return tuple(found[:CAUSES_SHOWN]) or (_unexplained(facts),)


def _tampering(facts: Facts) -> Cause | None:
    if facts.contradictions:
        return _cause("tampering", "shown", *facts.contradictions, _OF_ONE_RUN)
    # Whatever makes honest runs differ explains the rest, too. What is computed after the last
    # record with tensors is in no trace, and rounding may make a state equal again.
    if facts.alignment is None or facts.may_differ:
        return None
    found = _other_results(facts) if facts.first is None else _lone_records(facts.alignment)
    return None if found is None else _cause("tampering", "possible", found, _UNKNOWN_REASON)


def _lone_records(alignment: TraceAlignment) -> str | None:
    """Describe records that differ before others that are equal again, tensors included."""
    if not (alignment.reconverged and alignment.intervals):
        return None
    return (
        f"{alignment.differing} of {counted(alignment.records, 'record')} "
        f"{agreeing(alignment.differing, 'differs', 'differ')}, in "
        f"{_listed(list(alignment.intervals))}; after step {alignment.last_differing} all records "
        "are equal again, down to every parameter"
    )


def _other_results(facts: Facts) -> str | None:
    """Describe the results that differ although the traces are equal."""
    names = [item.component for item in facts.results if item.component.startswith(RESULTS)]
    if not names or facts.alignment is None or not facts.alignment.records:
        return None
    count = facts.alignment.records
    records = "the only trace record is" if count == 1 else f"all {count} trace records are"
    return f"{records} equal, but {_listed(names)} {agreeing(len(names), 'is', 'are')} not"


def _other_seed(facts: Facts) -> Cause | None:
    seeds = facts.of("seed")
    if not seeds or facts.alignment is None or facts.alignment.first is None:
        return None
    first = facts.alignment.at_once
    # A seed takes effect with the first draw from its stream, or with the initial parameters.
    begins = "streams" in facts.parts or (first and "parameters" in facts.parts)
    return _cause(
        "other-seed",
        "shown" if begins else "possible",
        *_named(seeds),
        f"{component_differs(facts.parts[0])} in {facts.place}"
        + (", the first of all" if first else ", and not before"),
    )


def _actor_order(facts: Facts) -> Cause | None:
    if facts.parts[:1] != ("schedule",):
        return None
    return _cause(
        "actor-order",
        "shown",
        f"in {facts.place} another actor's unroll, or one of another policy version, is trained "
        "on; streams are equal until there",
        *(
            []
            if "unrolls" in facts.parts
            else ["the same unrolls are trained on, in another order"]
        ),
        *_named(facts.of("schedule")),
        *(each for each in facts.circumstances if each == OWN_ORDER),
    )


def _environment(facts: Facts) -> Cause | None:
    given = [part for part in facts.parts if part in GIVEN]
    upstream = [part for part in facts.parts if part in ("schedule", "generations", "actions")]
    if not given or facts.of("seed") or "schedule" in upstream or _is_computed(facts):
        return None
    changed = facts.of("environment")
    equal = "actions" not in upstream
    return _cause(
        "environment-dynamics",
        "shown" if equal else "likely" if changed else "possible",
        f"in {facts.place} the environment gave other {_listed(given)}"
        + (" to equal actions" if equal else "; actions differ in the same record"),
        "losses, and all tensors as far as they were recorded, are equal until there",
        *_named(changed),
    )


def _arithmetic(facts: Facts) -> Cause | None:
    operator = None if facts.bisection is None else facts.bisection.operator
    pins = facts.of("numerics", "machine")
    same_call = operator is not None and operator.a == operator.b and operator.same_inputs
    computed = _computed(facts)
    if not computed or not (pins or same_call):
        return None
    small = facts.loss is not None and facts.loss.relative <= ROUNDING
    alone = not facts.of("settings", "code", "library")
    # Rounding does not grow to this size within one record.
    if facts.loss is not None and not small and not same_call:
        return None
    return _cause(
        "arithmetic",
        "shown" if same_call else "likely" if alone and _is_computed(facts) else "possible",
        *computed,
        *_named(pins),
        *(["one operator gave other bits to equal inputs and arguments"] if same_call else []),
    )


def _changed_program(facts: Facts) -> Cause | None:
    changed = facts.of("code", "library")
    evidence = _computed(facts) or ([_first(facts)] if facts.parts else [])
    if not changed or not evidence:
        return None
    large = facts.loss is not None and facts.loss.relative > ROUNDING
    alone = not facts.of("settings", "numerics", "machine")
    certainty: Certainty = "likely" if _is_computed(facts) and (alone or large) else "possible"
    return _cause("changed-code-or-library", certainty, *evidence, *_named(changed))


def _other_settings(facts: Facts) -> Cause | None:
    changed = facts.of("settings") if facts.parts else facts.of("evaluation")
    if not changed or not (facts.parts or facts.results):
        return None
    return _cause("other-settings", "likely", _first(facts), *_named(changed))


def _unexplained(facts: Facts) -> Cause:
    if facts.circumstances:
        hint = (
            f"two honest runs may differ: {'; '.join(facts.circumstances)}; 'capsule diagnose' "
            "says whether the run repeats at all"
        )
    elif facts.changes:
        hint = "what differs in locks and machines is listed; the evidence does not decide"
    else:
        hint = (
            "locks and machines, as far as they are known, are the same: 'capsule diagnose' shows "
            "whether the run repeats at all"
        )
    of_program = facts.alignment is None
    return Cause(
        name="unexplained",
        certainty=None,
        evidence=(_first(facts), hint),
        fix=_NOT_REPEATED if of_program and not facts.changes else None,
    )


def _clock(facts: Facts) -> Cause | None:
    """The outputs contain the dates of their runs."""
    dated = _of_nature(facts, "date")
    if not dated or facts.outputs is None:
        return None
    fix = _CLOCK_FIXES[facts.clock]
    certainty: Certainty = "likely"
    rest = "what else differs may follow from it"
    if facts.outputs.nature in HARMLESS:
        certainty, rest = "shown", "nothing else differs"
    elif facts.clock != "system":
        # A clock that starts at the same date in every run shows that the program took another
        # path, and rarely why.
        certainty, rest = "possible", "what made them differ may have changed the rest, too"
        fix = _OTHER_PATH
    return Cause(
        name="clock",
        certainty=certainty,
        evidence=(
            *(f"{place}: {part.claimed} / {part.found}" for place, part in dated[:_EVIDENCE]),
            "each is a date by its format, or falls within the time of the run that wrote it; "
            + rest,
        ),
        fix=fix,
    )


def _durations(facts: Facts) -> Cause | None:
    """The outputs contain numbers that are named like durations."""
    return _measured(
        facts,
        _is_named_like_a_duration,
        "the name of each is that of a duration or a speed, which differ if a monotonic clock "
        "measured them",
        "Exclude the file with trainer.outputs, or set trainer.standard_output: false if it is "
        "the standard output; or do not write durations to it.",
    )


def _progress_bars(facts: Facts) -> Cause | None:
    """The outputs contain progress bars that were drawn at other moments."""
    return _measured(
        facts,
        _differs_within_a_bar,
        "these are progress bars of tqdm, which its monitor draws once more when the machine has "
        "taken ten seconds",
        "Set trainer.standard_output: false if it is the standard output, or exclude the file "
        "with trainer.outputs. Under entropy.clock: virtual, the bars are drawn at the same "
        "moments in every run if the program starts with the variable TQDM_MAXINTERVAL=1e9.",
    )


def _measured(
    facts: Facts, applies: Callable[[Part | OutputDifference], bool], said: str, fix: str
) -> Cause | None:
    """The outputs contain what depends on how long something took.

    Args:
        facts: What is known of the two runs.
        applies: Tells whether this is so of a part that differs.
        said: What is said of such parts.
        fix: What prevents the difference.
    """
    parts = _of_nature(facts, "content")
    found = [(place, part) for place, part in parts if applies(part)]
    if not found:
        return None
    only = len(found) == len(parts) and _all_kept(facts.outputs)
    return Cause(
        name="durations",
        certainty="likely" if only else "possible",
        evidence=(
            *(f"{place}: {part.claimed} / {part.found}" for place, part in found[:_EVIDENCE]),
            said + ("" if only else "; what else differs may have another cause"),
        ),
        fix=fix,
    )


def _is_named_like_a_duration(part: Part | OutputDifference) -> bool:
    """Tell whether two texts differ in numbers alone, each with such a name or unit."""
    if not isinstance(part, Part):
        return False
    claimed, found = part.claimed, _DISTANCE.sub("", part.found)
    if _NUMBER.sub("0", claimed) != _NUMBER.sub("0", found):
        return False
    if _DURATION_NAME.search(part.where):
        return True
    end = 0
    for number, other in zip(_NUMBER.finditer(claimed), _NUMBER.finditer(found), strict=True):
        name = claimed[end : number.start()]
        unit = _DURATION_UNIT.match(claimed, number.end())
        if number[0] != other[0] and not (unit or _DURATION_NAME.search(name)):
            return False
        end = (unit or number).end()
    return True


def _differs_within_a_bar(part: Part | OutputDifference) -> bool:
    """Tell whether two texts first differ in the count or the time of a bar, not in its words."""
    pairs = enumerate(zip(part.claimed, part.found, strict=False))
    first = next((at for at, (a, b) in pairs if a != b), 0)
    return all(_REST_OF_BAR.match(text, first) for text in (part.claimed, part.found))


def _all_kept(outputs: OutputComparison | None) -> bool:
    """Tell whether a comparison contains every part that differs."""
    if outputs is None or outputs.count > len(outputs.files):
        return False
    contents = [file.content for file in outputs.files]
    return all(each is not None and each.count == len(each.parts) for each in contents)


def _packaging(facts: Facts) -> Cause | None:
    if facts.outputs is None or facts.outputs.nature != "packaging":
        return None
    places = [place for place, _ in _of_nature(facts, "packaging")]
    return _cause(
        "packaging", "shown", f"the same content is stored differently: {_listed(places)}"
    )


def _order_of_lines(facts: Facts) -> Cause | None:
    reordered = _of_nature(facts, "order")
    if not reordered:
        return None
    return Cause(
        name="order-of-lines",
        certainty="shown",
        evidence=(f"the same lines are in another order from {reordered[0][0]} on",),
        fix="Let one thread or process write the file, or sort its lines; "
        "trainer.standard_output: false if it is the standard output.",
    )


def _addresses(facts: Facts) -> Cause | None:
    """The outputs name objects by their addresses."""
    addressed = _of_nature(facts, "address")
    if not addressed or facts.outputs is None:
        return None
    only = facts.outputs.nature == "address"
    return Cause(
        name="addresses",
        certainty="shown" if only else "possible",
        evidence=(
            *(f"{place}: {part.claimed} / {part.found}" for place, part in addressed[:_EVIDENCE]),
            "these texts are equal except for addresses of memory, which differ if threads or "
            "processes take memory in another order"
            + ("" if only else "; what else differs may have another cause"),
        ),
        fix="Do not write objects that are shown by their address (<function f at 0x…>). If a "
        "library does, write the results, such as the parameters of a network, to another file, "
        "and exclude this one with trainer.outputs, or trainer.standard_output: false if it is "
        "the standard output.",
    )


def _other_names(facts: Facts) -> Cause | None:
    files = () if facts.outputs is None else facts.outputs.files
    renamed = [f for f in files if f.found_path is not None and f.content is None]
    if not renamed or all(file.nature == "date" for file in renamed):
        return None
    pairs = [file.name for file in renamed]
    return Cause(
        name="other-names",
        certainty="shown",
        evidence=(f"equal content has other names: {_listed(pairs)}",),
        fix="Derive names of files from the seed or the step, not from a time, a process id or a "
        "random number.",
    )


def _other_draws(facts: Facts) -> Cause | None:
    """The processes of a program did not do the same work."""
    # Another program, or other settings, do other work in any case.
    if not facts.drawn or facts.changes or facts.outputs is None:
        return None
    if facts.outputs.nature in HARMLESS:
        return None
    return Cause(
        name="other-draws",
        certainty="possible",
        evidence=(
            *_shortened(facts.drawn),
            "so they did different work: which process does what may depend on their speed",
        ),
        fix="Let the random numbers of a piece of work not depend on the process that does it: "
        "seed its generators ('{seed}' in trainer.command, or the variable CAPSULE_SEED), or use "
        "capsule.training.arrivals. Or use one process.",
    )


def _of_nature(facts: Facts, nature: Nature) -> list[tuple[str, Part | OutputDifference]]:
    """Return the parts of outputs that differ in one way, each with its place."""
    files = () if facts.outputs is None else facts.outputs.files
    found: list[tuple[str, Part | OutputDifference]] = [
        (file.path, file) for file in files if file.content is None and file.nature == nature
    ]
    for file in files:
        parts = () if file.content is None else file.content.parts
        found += [(f"{file.path}, {part.where}", part) for part in parts if part.nature == nature]
    return found


_RULES: tuple[Callable[[Facts], Cause | None], ...] = (
    _tampering,
    _other_seed,
    _actor_order,
    _environment,
    _other_settings,
    _arithmetic,
    _changed_program,
    _clock,
    _durations,
    _progress_bars,
    _packaging,
    _order_of_lines,
    _addresses,
    _other_names,
    _other_draws,
)


def _cause(name: CauseName, certainty: Certainty, *evidence: str) -> Cause:
    return Cause(name=name, certainty=certainty, evidence=evidence)


def _is_computed(facts: Facts) -> bool:
    """Tell whether what differs first was computed by networks, from equal data."""
    # The first component decides, as components are in data-flow order and earlier ones were equal.
    return facts.parts[:1] in [(part,) for part in (*COMPUTED, "actions")]


def _computed(facts: Facts) -> list[str]:
    """Return the evidence that a network computed something else; empty if there is none."""
    if not facts.parts:
        # What follows the last record with tensors, such as the evaluation, is in no trace.
        other = _other_results(facts)
        return [] if other is None else [other]
    if not _is_computed(facts):
        if "actions" not in facts.parts or "schedule" in facts.parts:
            return []
        found = ["actions differ in the first differing record, maybe before what they led to"]
    else:
        part = facts.parts[0]
        inputs = component_agreeing(part, "its", "their")
        found = [f"in {facts.place} {component_differs(part)}, but {inputs} inputs do not"]
    if facts.loss is not None:
        size = f"{facts.loss.ulp:,} ulp" if facts.loss.ulp else "less than an ulp"
        word = "rounding" if facts.loss.relative <= ROUNDING else "more than rounding"
        found.append(f"the first losses that differ are {size} apart: {word}")
    return found


def _first(facts: Facts) -> str:
    if facts.parts:
        return f"the first difference is in {component_words(facts.parts[0])}, in {facts.place}"
    names = [item.component for item in facts.results]
    if not names:
        return "nothing differs in the results"
    return f"{_listed(names)} {agreeing(len(names), 'differs', 'differ')}"


def _named(found: Sequence[Change]) -> list[str]:
    return _shortened([str(change) for change in found])


def _shortened(evidence: Sequence[str]) -> list[str]:
    more = [f"and {len(evidence) - _EVIDENCE} more"] if len(evidence) > _EVIDENCE else []
    return [*evidence[:_EVIDENCE], *more]


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:3]) + ([f"{len(names) - 3} more"] if len(names) > 3 else [])
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1]))) if shown else "nothing"
