"""``capsule doctor``: test whether this machine computes the bits of the portable profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from capsule.cli.common import guarded, print_json
from capsule.cli.options import JsonOption, option

if TYPE_CHECKING:
    from capsule.experiment.spec import Numerics
    from capsule.machine.self_test import SelfTest

PROFILES: tuple[Numerics, ...] = ("portable-v3", "portable-v3-strict", "portable-v2")
_NAMED = 5  # the most differing operators that are named


@guarded
def command(
    profile: Annotated[
        Literal["all", "portable-v3", "portable-v3-strict", "portable-v2"],
        option(
            "--profile NAME",
            "Numerics profile to test: portable-v3, portable-v3-strict, portable-v2 or all.",
        ),
    ] = "all",
    *,
    as_json: JsonOption = False,
) -> None:
    """Test whether this machine computes the same bits as others.

    Operators and small trainings are executed under each numerics profile, and compared with
    recorded answers.

    Examples:
        # Test all portable numerics profiles.
        capsule doctor
    """
    from capsule.host.errors import ExitCode
    from capsule.machine.self_test import self_test

    tests = [self_test(name) for name in (PROFILES if profile == "all" else (profile,))]
    if as_json:
        found = [test.model_dump(mode="json") for test in tests]
        print_json({"schema": "capsule/doctor/v1", "profiles": found})
    else:
        for test in tests:
            _show(test)
    statuses = {test.status for test in tests}
    if "differs" in statuses:
        raise typer.Exit(ExitCode.DIFFERS)
    raise typer.Exit(ExitCode.OK if statuses == {"as expected"} else ExitCode.INCONCLUSIVE)


def _show(test: SelfTest) -> None:
    from capsule.report.text import printable

    typer.echo(f"{test.profile:<20} {test.status:<12} {printable(_detail(test))}")


def _detail(test: SelfTest) -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in test.libraries.items())
    if test.status == "as expected":
        return f"{test.answers} of {test.answers} answers; {libraries}"
    if test.status == "differs":
        named = ", ".join(test.different[:_NAMED])
        more = ", ..." if len(test.different) > _NAMED else ""
        return f"{len(test.different)} of {test.answers} answers: {named}{more}; {libraries}"
    return test.reason or f"no answers are known for {libraries}"
