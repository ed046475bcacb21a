"""The findings of ``capsule diagnose``: codes, causes, mitigations (``docs/diagnose.md``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from capsule.experiment.fields import Model
from capsule.training.instruments.report import Location

Level = Literal["error", "warning", "note"]
Setting = str | int | bool


@dataclass(frozen=True)
class Remedy:
    """A setting that may cure a finding.

    Attributes:
        field: Field of the spec, dotted.
        value: What to set it to.
        effect: What it does, in a sentence that names both.
    """

    field: str
    value: Setting
    effect: str


@dataclass(frozen=True)
class FindingKind:
    """One kind of finding.

    Attributes:
        level: An error makes the command fail; a warning is a risk; a note is for information.
        title: What it is, in a few words.
        fix: What to do about it in the program.
        remedies: Settings that help. Only those that are not in force are shown and tried.
    """

    level: Level
    title: str
    fix: str
    remedies: tuple[Remedy, ...] = ()


_VIRTUAL_CLOCK = Remedy(
    "entropy.clock",
    "virtual",
    "entropy.clock: virtual gives the program a calendar clock that advances with its work.",
)
_VIRTUAL_ENTROPY = Remedy(
    "entropy.mode",
    "virtual",
    "entropy.mode: virtual derives the randomness of the operating system from the seed.",
)
_ALGORITHMS = Remedy(
    "determinism.algorithms",
    "error",
    "determinism.algorithms: error makes torch choose a deterministic algorithm, or fail if "
    "there is none.",
)

CATALOGUE: dict[str, FindingKind] = {
    "CAP-D101": FindingKind(
        "error",
        "the two runs differ",
        "Follow the other findings.",
    ),
    "CAP-D102": FindingKind(
        "error",
        "a seed is taken from the clock",
        "Use the seed of the spec: '{seed}' in trainer.command, or the variable CAPSULE_SEED.",
        (_VIRTUAL_CLOCK,),
    ),
    "CAP-D103": FindingKind(
        "error",
        "a value comes from an unseeded source of randomness",
        "Seed this generator.",
        (_VIRTUAL_ENTROPY,),
    ),
    "CAP-D104": FindingKind(
        "error",
        "a result depends on memory addresses",
        "Sort by a key that is equal in every run, or define __hash__ and __eq__ for the objects.",
        (
            Remedy(
                "entropy.address_randomization",
                False,
                "entropy.address_randomization: false gives equal addresses in every run.",
            ),
        ),
    ),
    "CAP-D105": FindingKind(
        "error",
        "a result depends on the interpreter's hash seed",
        "Sort the elements before their order matters, and never seed from hash().",
        (Remedy("determinism.hash_seed", 0, "determinism.hash_seed: 0 fixes the order of sets."),),
    ),
    "CAP-D106": FindingKind(
        "error",
        "a result depends on the order in which a folder is listed",
        "Sort the listing, as in sorted(os.listdir(...)) or sorted(path.glob(...)).",
        (
            Remedy(
                "determinism.sorted_listings",
                True,
                "determinism.sorted_listings: true lists folders in the order of names.",
            ),
        ),
    ),
    "CAP-D107": FindingKind(
        "error",
        "a result depends on a process or thread number",
        "Number the workers yourself, and derive seeds from this number and the seed of the spec. "
        "In a container, process numbers depend only on what the program starts.",
    ),
    "CAP-D108": FindingKind(
        "warning",
        "a result depends on a time",
        "Keep times out of files that are claimed (trainer.outputs), and print them on standard "
        "error.",
        (_VIRTUAL_CLOCK,),
    ),
    "CAP-D109": FindingKind(
        "error",
        "a value differs for an unknown reason",
        "Look at what this line calls: sockets, other processes, compiled extensions.",
    ),
    "CAP-D110": FindingKind(
        "warning",
        "the spec gives up guarantees, one of which may be the cause",
        "Use the defaults. With --apply, Capsule tests whether they help.",
    ),
    "CAP-D111": FindingKind(
        "error",
        "the order of threads, processes or tasks varies",
        "Submit tasks and wait for their results with capsule.training.arrivals, which records the "
        "order of arrival and gives each task its own randomness (docs/own-program.md).",
    ),
    "CAP-D112": FindingKind(
        "warning",
        "programs ignore the preloaded library",
        "Link them with the C library dynamically, or exclude their random values from the "
        "results. Their clock is the machine's. The processor instructions RDRAND and RDSEED "
        "cannot be observed in any program.",
    ),
    "CAP-D201": FindingKind(
        "error",
        "an operator gives other bits when it is executed again",
        "Use one maths thread, or another operator.",
        (_ALGORITHMS,),
    ),
    "CAP-D202": FindingKind(
        "warning",
        "an operator is deterministic only under a flag that is off",
        "Switch the flag on.",
        (_ALGORITHMS,),
    ),
    "CAP-D203": FindingKind(
        "warning",
        "an operator has no deterministic implementation on this device",
        "Use another operator, or compute this step on the CPU.",
    ),
    "CAP-D204": FindingKind(
        "note",
        "the program uses an operator that is not part of torch",
        "Read its documentation; Capsule only checked that it gave equal bits here.",
    ),
    "CAP-D301": FindingKind(
        "warning",
        "the program uses fresh randomness of the operating system",
        "Let Capsule answer requests for randomness.",
        (_VIRTUAL_ENTROPY,),
    ),
    "CAP-D302": FindingKind(
        "warning",
        "requests for randomness bypass the preloaded library",
        "Read /dev/urandom instead of files in /proc, whose randomness Capsule does not replace.",
        (Remedy("entropy.supervised", True, "entropy.supervised: true answers system calls."),),
    ),
    "CAP-D303": FindingKind(
        "warning",
        "the kernel answered requests for randomness that the report does not contain",
        "Do not rely on the report of this run; see strace.txt in the run directory.",
    ),
    "CAP-D304": FindingKind(
        "note",
        "an instrument reached its limit",
        "Later events were not watched. Diagnose fewer steps.",
    ),
}


class Finding(Model):
    """A cause, or possible cause, of a difference between two runs."""

    code: str
    level: Level
    message: str = Field(description="Description of what was found.")
    where: Location | None = Field(
        None, description="Line of the program; null if it is not known."
    )
    text: str = Field("", description="Text of that line.")
    operator: str | None = Field(
        None, description="The torch operator; null if the finding names no operator."
    )
    mitigation: str
    patch: dict[str, Setting] = Field(description="Fields of the spec that --apply sets.")


def finding(
    code: str,
    message: str,
    *,
    where: Location | None = None,
    text: str = "",
    operator: str | None = None,
    level: Level | None = None,
    curable: bool = True,
) -> Finding:
    """Make a finding of the catalogue.

    Args:
        code: Its entry.
        message: What was seen.
        where: Line of the program.
        text: Text of that line.
        operator: The torch operator it is about.
        level: Instead of the catalogue's.
        curable: Whether the catalogue's settings help here.
    """
    entry = CATALOGUE[code]
    return Finding(
        code=code,
        level=level or entry.level,
        message=message,
        where=where and shortened(where),
        text=text,
        operator=operator,
        mitigation=entry.fix,
        patch={each.field: each.value for each in entry.remedies} if curable else {},
    )


def shortened(where: Location) -> Location:
    """Return a location without the folders that only this run knows."""
    file = where.file
    # Without a container, the working folder has another path in each run. Packages lie in
    # site-packages or in Debian's dist-packages.
    for folder in ("/workspace/", "-packages/"):
        _, separator, rest = file.partition(folder)
        file = rest if separator else file
    return where.model_copy(update={"file": file})
