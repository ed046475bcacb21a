"""Settings of a spec as remedies: which are in force, which are possible, which are given up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from capsule.diagnosis.apply import set_fields
from capsule.diagnosis.findings import CATALOGUE, Finding, Setting, finding
from capsule.experiment.spec import Spec, calendar_clock
from capsule.host.errors import CapsuleError
from capsule.host.spec_file import parse_spec

CLOCK = "entropy.clock"
UNKNOWN = "CAP-D109"
# Field, the values that give a guarantee up, and the value that gives it.
_GUARANTEES: tuple[tuple[str, tuple[Setting | None, ...], Setting], ...] = (
    ("entropy.mode", ("system",), "virtual"),
    ("entropy.supervised", (False,), True),
    ("entropy.address_randomization", (True,), False),
    (CLOCK, ("system",), "virtual"),
    ("determinism.hash_seed", (None,), 0),
    ("determinism.threads", (None,), 1),
    ("determinism.cores", (None,), 4),
    ("determinism.algorithms", ("off", "warn"), "error"),
    ("determinism.fill_uninitialized_memory", (False,), True),
    ("determinism.propagation", (False,), True),
    ("determinism.sorted_listings", (False,), True),
)


def in_force(spec: Spec, field: str) -> Setting | None:
    """Return the value that a dotted field has in a run of the spec."""
    if field == CLOCK:
        return calendar_clock(spec)
    node: Any = spec
    value: Setting | None = reduce(getattr, field.split("."), node)
    return value


def with_settings(spec: Spec, patch: Mapping[str, Setting]) -> Spec | None:
    """Return the spec with some fields set; None if such a spec cannot have them."""
    # Without the defaults: a spec of a program is rejected if it has sections of trainers, even
    # with the values that they would have anyway.
    document: Any = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    set_fields(document, patch)
    try:
        return parse_spec(json.dumps(document).encode(), spec.name)
    except CapsuleError:
        return None


def tailored(item: Finding, spec: Spec) -> Finding:
    """Keep those remedies of a finding that are not in force and that the spec can have."""
    entry = CATALOGUE[item.code]
    patch = {
        name: value
        for name, value in item.patch.items()
        if in_force(spec, name) != value and with_settings(spec, {name: value}) is not None
    }
    effects = [remedy.effect for remedy in entry.remedies if remedy.field in patch]
    return item.model_copy(update={"patch": patch, "mitigation": " ".join([entry.fix, *effects])})


def given_up(spec: Spec) -> list[Finding]:
    """Return a finding that names every guarantee that the spec gives up, if there is one."""
    weak = {
        field: value
        for field, given, value in _GUARANTEES
        if in_force(spec, field) in given and with_settings(spec, {field: value}) is not None
    }
    if not weak:
        return []
    now = ", ".join(f"{field}: {_text(in_force(spec, field))}" for field in weak)
    return [finding("CAP-D110", f"the spec says {now}").model_copy(update={"patch": weak})]


def described(patch: Mapping[str, Setting]) -> str:
    """Write settings as a spec does."""
    return ", ".join(f"{name}: {_text(value)}" for name, value in patch.items())


def unexplained(findings: Iterable[Finding]) -> bool:
    """Tell whether no finding names a cause of the difference."""
    # CAP-D108, a measured time, is only a warning, and yet names a cause.
    causes = (item for item in findings if item.level == "error" or item.code == "CAP-D108")
    return all(item.code in ("CAP-D101", UNKNOWN) for item in causes)


def _text(value: Setting | None) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)
