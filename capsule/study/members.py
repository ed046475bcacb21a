"""The members of a study: what each run sets, as a pure function of the study spec.

A member depends on its own group, setting and run alone, so that further groups, settings and runs
leave the others as they were. The order of fields in a mapping says nothing, since canonical JSON
does not keep it: they are taken by name, so that a section precedes the fields that it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from decimal import Context, Decimal
from itertools import islice
from typing import Any, NamedTuple

from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.host.errors import CapsuleError
from capsule.study.spec import (
    MAX_MEMBERS,
    GroupSpec,
    LogUniformRange,
    SampleSpec,
    Settings,
    StudySpec,
    UniformRange,
    ValueChoice,
)

_SEED_DOMAIN, _SAMPLE_DOMAIN = "capsule/study-seed/v1", "capsule/study-sample/v1"
# The bits of the largest seed that a spec accepts (capsule.experiment.fields.Seed).
_SEED_BITS = 53
_FRACTION_DIGITS = 16  # hexadecimal
# The operators of Decimal would use the context of the thread, which any library can change.
_PRECISE = Context(prec=50)  # decimal's ln and exp are correctly rounded on every machine
_SIGNIFICANT = Context(prec=12)


class PlannedMember(NamedTuple):
    """One run of a study.

    Attributes:
        name: ``GROUP.RUN``, or ``GROUP.SETTING.RUN`` in a group of several settings; a setting of a
            grid is named by the place of each of its values, such as ``2-1``.
        group: Its group.
        setting: Number of its setting in the group, from 1.
        run: Number of the run with this setting, from 1.
        setting_values: The fields in which the settings of the group differ.
        settings: Fields of the spec, as ``section.field``, with their values; the last one counts.
    """

    name: str
    group: str
    setting: int
    run: int
    setting_values: Settings
    settings: tuple[tuple[str, Any], ...]


def plan_members(study: StudySpec) -> list[PlannedMember]:
    """Return all members of a study, group by group.

    Raises:
        CapsuleError: CAP-Y001, there are more than :data:`MAX_MEMBERS`.
    """
    # Members are generated one by one: a grid of a few lines can have more combinations than fit
    # into memory.
    members = list(islice(_members(study), MAX_MEMBERS + 1))
    if len(members) > MAX_MEMBERS:
        raise CapsuleError(
            "CAP-Y001",
            f"study {study.name} has more than {MAX_MEMBERS} members",
            fix="Lower runs, or the numbers of values in a grid.",
        )
    return members


def _members(study: StudySpec) -> Iterator[PlannedMember]:
    for name, group in study.groups.items():
        # All members share these pairs, which would take much memory otherwise.
        common = [*sorted(study.set.items()), *sorted(group.set.items())]
        settings = _settings_of(group, study.seed)
        for number, (place, setting) in enumerate(settings, 1):
            own = sorted(setting.items())
            for run in range(1, (group.runs or study.runs) + 1):
                seeds = {
                    "seeds.root" if stream == "root" else f"seeds.streams.{stream}": seed_of_run(
                        study.seed, stream, run
                    )
                    for stream in group.vary
                }
                label = ".".join((name, *place, str(run)))
                values = (*common, *own, *sorted(seeds.items()))
                yield PlannedMember(label, name, number, run, setting, values)


def seed_of_run(seed: int, stream: str, run: int) -> int:
    """Return the seed of a varied stream in a run.

    It is the first 53 bits of SHA-256 over the canonical JSON (RFC 8785) array
    ``["capsule/study-seed/v1", seed, stream, run]``: the same in every group that varies the
    stream.
    """
    digest = sha256_hex(canonical_json([_SEED_DOMAIN, seed, stream, run]))
    return int(digest[:_FRACTION_DIGITS], 16) >> (4 * _FRACTION_DIGITS - _SEED_BITS)


def _settings_of(group: GroupSpec, seed: int) -> Iterator[tuple[tuple[str, ...], Settings]]:
    """Yield the settings of a group, each with its part of the members' names, if there is one."""
    if group.grid is not None:
        fields = sorted(group.grid)
        for cell in itertools.product(*(enumerate(group.grid[field], 1) for field in fields)):
            place = "-".join(str(number) for number, _ in cell)
            yield (place,), dict(zip(fields, (value for _, value in cell), strict=True))
    elif group.settings is not None:
        for number, setting in enumerate(group.settings, 1):
            yield (str(number),), setting
    elif group.sample is not None:
        for number in range(1, group.sample.count + 1):
            yield (str(number),), sampled(group.sample, seed, number)
    else:
        yield (), {}


def sampled(sample: SampleSpec, seed: int, number: int) -> Settings:
    """Draw a setting.

    The fraction u of a field is the first 64 bits of SHA-256 over the canonical JSON array
    ``["capsule/study-sample/v1", seed, field, number]``, divided by 2^64. A number has twelve
    significant decimal digits.

    Args:
        sample: The distributions.
        seed: The study's seed, which the sample's own replaces.
        number: Number of the setting, from 1.
    """
    settings: Settings = {}
    for field, distribution in sample.fields.items():
        own = seed if sample.seed is None else sample.seed
        digest = sha256_hex(canonical_json([_SAMPLE_DOMAIN, own, field, number]))
        word = int(digest[:_FRACTION_DIGITS], 16)
        if isinstance(distribution, ValueChoice):
            values = distribution.choice
            # The bias of a product and a shift is below len(values) / 2^64.
            settings[field] = values[word * len(values) >> 64]
        else:
            share = _PRECISE.divide(Decimal(word), Decimal(2**64))
            settings[field] = _quantile(distribution, share)
    return settings


def _quantile(distribution: LogUniformRange | UniformRange, share: Decimal) -> float:
    """Return a quantile, rounded to twelve significant digits within the bounds."""
    if isinstance(distribution, UniformRange):
        # The conversion of a float to a Decimal is exact.
        low, high = map(Decimal, distribution.uniform)
        exact = _PRECISE.add(low, _PRECISE.multiply(share, _PRECISE.subtract(high, low)))
    else:
        low, high = map(Decimal, distribution.log_uniform)
        lower, upper = _PRECISE.ln(low), _PRECISE.ln(high)
        width = _PRECISE.subtract(upper, lower)
        exact = _PRECISE.exp(_PRECISE.add(lower, _PRECISE.multiply(share, width)))
    # A value that is rounded to twelve digits can lie outside of bounds that have more digits.
    return float(min(max(_SIGNIFICANT.plus(exact), low), high))
