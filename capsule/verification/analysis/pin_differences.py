"""Differences in the pins and machines of two runs, which could explain other results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from capsule.experiment.canonical import sha256_file
from capsule.experiment.lock import Lock
from capsule.experiment.trainers import CommandTrainer
from capsule.host.wording import shown_value
from capsule.machine.compare import compare
from capsule.verification.analysis.comparison import MAX_DIFFERENCES, compare_documents
from capsule.verification.analysis.runs import ComparedRun
from capsule.verification.verdict import Explanation

Kind = Literal[
    "seed",  # a random stream begins elsewhere
    "environment",  # other dynamics
    "schedule",  # another order of actors
    "numerics",  # another code path of the same mathematics
    "machine",  # another processor or GPU, where bits depend on it
    "settings",  # another experiment
    "code",  # Capsule's training code, or the user's program
    "library",  # another version of what is imported
    "evaluation",  # another protocol
    "system",  # Debian packages, the interpreter, where it ran
    "recording",  # how it was written down, or limited: no result depends on it
]
_WHY: Mapping[Kind, str] = {
    "seed": "every draw of the stream differs",
    "environment": "other dynamics give other observations and rewards to equal actions",
    "schedule": "it determines when each unroll is trained on, and the age of its policy",
    "numerics": "sums are taken in another order, or functions rounded otherwise",
    "machine": "maths libraries choose their code by it",
    "settings": "it is another experiment",
    "code": "it is another program",
    "library": "another version may compute other results",
    "evaluation": "the trained networks are judged by another protocol",
    "system": "it contains other binaries",
    "recording": "it should not change a result",
}
_OTHER_DATA = "the runs read other data"
_IMPORT_UNKNOWN = "it matters if the runs imported it, which their bundles do not record"
_UNUSED = "both runs were plain processes, which do not use it"
OWN_ORDER = "each run recorded its own order of actors"
_OTHER_ENTROPY = "programs get other randomness, or another time"
_ENVIRONMENTS = frozenset({"ale-py", "gymnasium", "minatar"})
_SECTIONS: Mapping[str, Kind] = {
    "accelerator": "numerics",
    "code": "code",
    "determinism": "numerics",
    "entropy": "system",
    "environment": "environment",
    "evaluation": "evaluation",
    "image": "system",
    "limits": "recording",
    "name": "recording",
    "recording": "recording",
    "seeds": "seed",
}

Family = Literal["seed", "environment", "schedule", "numbers", "results"]
_RANKS: Mapping[Family, tuple[Kind, ...]] = {
    "seed": ("seed", "environment", "code", "library", "settings"),
    "environment": ("environment", "code", "library", "settings", "numerics", "machine"),
    "schedule": ("schedule", "machine", "settings", "code"),
    "numbers": ("settings", "numerics", "code", "library", "machine", "environment"),
    "results": ("evaluation", "environment", "code", "library", "numerics", "machine"),
}


@dataclass(frozen=True)
class Change:
    """A difference of two sides' pins or machines.

    Attributes:
        kind: What it can do.
        what: Its name.
        a: As the first side has it.
        b: As the second has it.
        why: What makes it matter, if that is not its kind.
    """

    kind: Kind
    what: str
    a: str
    b: str
    why: str | None = None

    def __str__(self) -> str:
        return f"{self.what}: {self.a} / {self.b}"


def changes(a: ComparedRun, b: ComparedRun) -> tuple[Change, ...]:
    """List what differs in seeds, specs, locks, runtimes and machines."""
    return (*_seeds(a, b), *_spec(a, b), *_locks(a, b), *_runtime(a, b), *_machines(a, b))


def circumstances(a: ComparedRun, b: ComparedRun) -> tuple[str, ...]:
    """Say why two honest runs may differ, beside what :func:`changes` lists."""
    return (*_unknown_machines(a, b), *_own_records(a, b))


def _unknown_machines(*sides: ComparedRun) -> Iterator[str]:
    for side in sides:
        if side.fingerprint is None:
            yield f"the machine of {side.name} is not known"
        elif side.resumed:
            # A fingerprint is of the machine that finished the run.
            yield f"{side.name} was resumed, maybe on another machine"


def _own_records(a: ComparedRun, b: ComparedRun) -> Iterator[str]:
    """Name what each run recorded for itself: no lock determines it."""
    for said, left, right in (
        (
            "each run recorded its own randomness of the operating system",
            a.entropy,
            b.entropy,
        ),
        ("each run recorded its own order of arrivals", a.arrivals, b.arrivals),
        (OWN_ORDER, _schedule(a), _schedule(b)),
    ):
        if left is not None and right is not None and sha256_file(left) != sha256_file(right):
            yield said


def _schedule(side: ComparedRun) -> Path | None:
    return None if side.training is None else side.training.schedule


def ranked(found: tuple[Change, ...], family: Family) -> tuple[Explanation, ...]:
    """Order changes by how likely they explain a first difference of some family."""
    # Kinds without a rank come last, in the order of their declaration. index() finds the first
    # place of a kind.
    order = [*_RANKS[family], *get_args(Kind)]
    ordered = sorted(found, key=lambda change: order.index(change.kind))
    return tuple(
        Explanation(
            what=each.what,
            a=each.a,
            b=each.b,
            why=each.why or _WHY[each.kind],
            matters=each.kind != "recording",
        )
        for each in ordered
    )


def _seeds(a: ComparedRun, b: ComparedRun) -> Iterator[Change]:
    """Yield the streams that begin with other keys: the seeds that took effect."""
    if a.training is None or b.training is None:
        return
    others = {each.name: each for each in b.training.streams.streams}
    for each in a.training.streams.streams:
        other = others.get(each.name)
        if other is not None and other.key != each.key:
            yield Change("seed", f"stream {each.name}", f"seed {each.seed}", f"seed {other.seed}")


def _spec(a: ComparedRun, b: ComparedRun) -> Iterator[Change]:
    left, right = (side.spec.model_dump(mode="json") for side in (a, b))
    for item in compare_documents(left, right):
        section, _, field = item.component.partition(".")
        # A section that is not listed is the trainer's.
        kind = _SECTIONS.get(section, "settings")
        if (section, field.partition(".")[0]) == ("trainer", "schedule"):
            kind = "schedule"
        why = _OTHER_ENTROPY if section == "entropy" else None
        yield Change(kind, item.component, item.claimed, item.found, why)


def _locks(side_a: ComparedRun, side_b: ComparedRun) -> Iterator[Change]:
    a, b = side_a.lock, side_b.lock
    if a is None or b is None:
        return
    yield from _wheel_changes(a, b, _loaded(side_a) | _loaded(side_b))
    unused = _is_plain_process(side_a) and _is_plain_process(side_b)
    kind: Kind = "recording" if unused else "system"
    for each in _differing(_system(a), _system(b)):
        yield Change(kind, *each, _UNUSED if unused else None)
    for each in _differing(_code(a), _code(b)):
        yield Change("code", *each)
    sets = a.data or {}, b.data or {}
    for name in sorted(sets[0].keys() & sets[1].keys()):
        one, other = (each[name].sha256 for each in sets)
        if one != other:
            yield Change("settings", f"data set {name}", _short(one), _short(other), _OTHER_DATA)
    if a.project is not None and b.project is not None:
        for item in compare_documents(a.project.files, b.project.files)[:MAX_DIFFERENCES]:
            yield Change("code", f"source file {item.component}", item.claimed, item.found)


def _wheel_changes(a: Lock, b: Lock, loaded: frozenset[str]) -> Iterator[Change]:
    """Yield the wheels that differ, first those that are known to have been loaded."""
    found = _differing(_wheels(a), _wheels(b))
    for name, left, right in sorted(found, key=lambda each: each[0] not in loaded):
        known = name in loaded
        kind: Kind = "environment" if known and name in _ENVIRONMENTS else "library"
        yield Change(kind, f"wheel {name}", left, right, None if known else _IMPORT_UNKNOWN)


def _loaded(side: ComparedRun) -> frozenset[str]:
    """Return the packages that the run is known to have imported.

    A trainer of Capsule reads back the versions of what it needs from the modules. Of a user
    program, only the versions of what the spec asks for are read back, loaded or not.
    """
    if isinstance(side.spec.trainer, CommandTrainer):
        return frozenset()
    return frozenset(name.replace("_", "-") for name in side.runtime.libraries)


def _is_plain_process(side: ComparedRun) -> bool:
    return side.recorded is not None and side.recorded.claims.image is None


def _differing(left: Mapping[str, str], right: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in sorted(left.keys() | right.keys()):
        values = shown_value(left.get(name)), shown_value(right.get(name))
        if values[0] != values[1]:
            yield name, *values


def _wheels(lock: Lock) -> dict[str, str]:
    found = {}
    for wheel in lock.image.wheels:
        why = "a dependency" if wheel.requested is None else f"requested as {wheel.requested!r}"
        found[wheel.name] = f"{wheel.version} ({why}; {wheel.sha256[:12]}…)"
    return found


def _system(lock: Lock) -> dict[str, str]:
    image = lock.image
    packages = {
        f"debian package {each.name}": f"{each.version} ({each.sha256[:12]}…)"
        for each in image.debian
    }
    recipe = {"image recipe": _short(image.recipe_sha256), "assembler": str(image.assembler)}
    return packages | recipe


def _code(lock: Lock) -> dict[str, str]:
    tree = {} if lock.project is None else {"source tree": _short(lock.project.sha256)}
    return {"training code": _short(lock.image.code.sha256)} | tree


def _runtime(a: ComparedRun, b: ComparedRun) -> Iterator[Change]:
    """Yield differences in what was read back in the training processes: what really ran."""
    governed = [(side.spec.accelerator, side.spec.determinism) for side in (a, b)]
    if governed[0] == governed[1]:  # else flags follow from the specs, which say it shorter
        flags = {"flags": a.runtime.flags}, {"flags": b.runtime.flags}
        for item in compare_documents(*flags):
            yield Change("numerics", item.component, item.claimed, item.found)
    libraries = a.runtime.libraries, b.runtime.libraries
    for name in sorted(libraries[0].keys() | libraries[1].keys()):
        versions = [shown_value(each.get(name)) for each in libraries]
        if versions[0] != versions[1]:
            kind: Kind = "environment" if name.replace("_", "-") in _ENVIRONMENTS else "library"
            yield Change(kind, f"library {name}, as read back", *versions)


def _machines(a: ComparedRun, b: ComparedRun) -> Iterator[Change]:
    if a.fingerprint is None or b.fingerprint is None:
        return
    compilers = a.compilers or b.compilers
    for row in compare(a.fingerprint, b.fingerprint, a.spec, compilers):
        matters = row.effect in ("may differ", "gate")
        # Equal facts matter, too: a relaxation, or a GPU that neither record names.
        if matters or row.recorded != row.here:
            kind: Kind = "machine" if matters else "recording"
            yield Change(kind, row.field, row.recorded, row.here, row.reason)


def _short(digest: str) -> str:
    return f"{digest[:12]}…"
