"""The findings of ``capsule diagnose``: codes, causes, mitigations (``docs/diagnose.md``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from capsule.experiment.fields import Model
from capsule.training.instruments import Location

Level = Literal["error", "warning", "note"]
Setting = str | int | bool


@dataclass(frozen=True)
class Entry:
    """One kind of finding.

    Attributes:
        level: An error makes the command fail; a warning is a risk; a note is for information.
        title: What it is, in a few words.
        fix: What to do about it.
        patch: Fields of the spec, dotted, that ``--apply`` would set.
    """

    level: Level
    title: str
    fix: str
    patch: dict[str, Setting] = field(default_factory=dict)


CATALOGUE: dict[str, Entry] = {
    "CAP-D101": Entry(
        "error",
        "the two runs differ",
        "Follow the other findings; without any, trace more densely (recording.trace_interval).",
    ),
    "CAP-D102": Entry(
        "error",
        "a seed is taken from the clock",
        "Use the seed of the spec: '{seed}' in trainer.command, or the variable CAPSULE_SEED. "
        "entropy.clock: fixed stops the clock for programs that cannot be changed.",
        {"entropy.clock": "fixed"},
    ),
    "CAP-D103": Entry(
        "error",
        "randomness that nothing seeds",
        "Seed this generator, or let Capsule answer for the operating system: "
        "entropy.mode: virtual.",
        {"entropy.mode": "virtual"},
    ),
    "CAP-D104": Entry(
        "error",
        "a result depends on memory addresses",
        "Sort by something that is the same in every run, or give the objects __hash__ and "
        "__eq__. entropy.address_randomization: false keeps addresses as they are.",
        {"entropy.address_randomization": False},
    ),
    "CAP-D105": Entry(
        "error",
        "a result depends on the interpreter's hash seed",
        "Sort the elements before their order counts; never seed from hash(). "
        "determinism.hash_seed: 0 fixes the order.",
        {"determinism.hash_seed": 0},
    ),
    "CAP-D106": Entry(
        "error",
        "a result depends on the order in which a folder is listed",
        "Write sorted(os.listdir(...)), sorted(path.glob(...)).",
    ),
    "CAP-D107": Entry(
        "error",
        "a result depends on a process or thread number",
        "Number the workers yourself; derive seeds from that and from the seed of the spec.",
    ),
    "CAP-D108": Entry(
        "warning",
        "a time is computed with",
        "Keep times out of files that are claimed (trainer.outputs), and print them on standard "
        "error.",
    ),
    "CAP-D109": Entry(
        "error",
        "a value differs, and no source is known for it",
        "Look at what this line calls: threads, sockets, other processes, compiled extensions.",
    ),
    "CAP-D201": Entry(
        "error",
        "an operator gives other bits when it is executed again",
        "determinism.algorithms: error makes torch choose a deterministic algorithm, or say that "
        "there is none. If it is on already, use one maths thread or another operator.",
        {"determinism.algorithms": "error"},
    ),
    "CAP-D202": Entry(
        "warning",
        "an operator is deterministic only under a flag that is off",
        "Switch it on: determinism.algorithms: error.",
        {"determinism.algorithms": "error"},
    ),
    "CAP-D203": Entry(
        "warning",
        "an operator has no deterministic implementation on this device",
        "Use another operator, or compute this step on the CPU.",
    ),
    "CAP-D204": Entry(
        "note",
        "an operator that is not torch's own",
        "Read its documentation; that it gave equal bits here is all that is known.",
    ),
    "CAP-D301": Entry(
        "warning",
        "fresh randomness of the operating system reaches the program",
        "entropy.mode: virtual makes it repeatable; recorded keeps it for verify.",
        {"entropy.mode": "virtual"},
    ),
    "CAP-D302": Entry(
        "warning",
        "requests for randomness bypass the preloaded library",
        "entropy.supervised: true answers them; a processor instruction it cannot.",
        {"entropy.supervised": True},
    ),
    "CAP-D303": Entry(
        "warning",
        "the kernel was asked for randomness that the report does not know",
        "Do not rely on the report of this run; see strace.txt in the run directory.",
    ),
    "CAP-D304": Entry(
        "note",
        "an instrument reached its limit",
        "What came later was not watched; diagnose fewer steps.",
    ),
}


class Finding(Model):
    """Something that makes, or could make, two runs differ."""

    code: str
    level: Level
    message: str = Field(description="What was seen.")
    where: Location | None = Field(None, description="Line of the program, if one is known.")
    text: str = Field("", description="Text of that line.")
    operator: str | None = None
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
) -> Finding:
    """Make a finding of the catalogue.

    Args:
        code: Its entry.
        message: What was seen.
        where: Line of the program.
        text: Text of that line.
        operator: The torch operator it is about.
        level: Instead of the catalogue's.
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
        patch=entry.patch,
    )


def shortened(where: Location) -> Location:
    """Return a location without the folders that only this run knows."""
    file = where.file
    for folder in ("/workspace/", "-packages/"):
        _, separator, rest = file.partition(folder)
        file = rest if separator else file
    return where.model_copy(update={"file": file})
