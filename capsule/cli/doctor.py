"""``capsule doctor``: check whether this machine can build, run and verify."""

from __future__ import annotations

import importlib.util
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from capsule.cli.common import guarded, print_json
from capsule.cli.defaults import own_key
from capsule.cli.options import JsonOption, option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from capsule.checkup import Check
    from capsule.experiment.spec import Numerics
    from capsule.machine.self_test import SelfTest

PROFILES: tuple[Numerics, ...] = ("portable-v3", "portable-v3-strict", "portable-v2")
_COLUMNS, _INDENT = 80, " " * 11


@guarded
def command(
    profile: Annotated[
        Literal["all", "none", "portable-v3", "portable-v3-strict", "portable-v2"],
        option(
            "--profile NAME",
            "Numerics profile to test: portable-v3, portable-v3-strict, portable-v2, all or none.",
        ),
    ] = "all",
    *,
    keys: Annotated[
        list[Path] | None,
        option(
            "--key FILE",
            "Private key to check, as well as your own and those in the current folder. "
            "May be repeated.",
        ),
    ] = None,
    fix: Annotated[
        bool,
        option(
            "--fix",
            "First create missing folders (cache, TMPDIR), and remove other users' access to "
            "private keys.",
        ),
    ] = False,
    gpu: Annotated[
        bool,
        option("--gpu", "Also compare computations on torch's first GPU with those on the CPU."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check whether this machine can build, run and verify.

    Every problem is shown with its remedy. The command checks Python, container engines, the
    processor, GPUs, disk space, the cache, package indexes, Debian mirrors, programs and keys. If
    torch is installed in this Python, the command then executes operators and small trainings
    under each numerics profile, and compares the results with recorded answers.

    Exit status: 0 nothing prevents a run, 1 numerics differ, 4 something prevents runs, or a
    profile could not be tested (without torch, this applies only to a profile that --profile
    names).

    Examples:
        # Check everything.
        capsule doctor

        # Make the repairs that are safe, and skip the test of numerics.
        capsule doctor --fix --profile none

        # Test the GPU as runs do when they start.
        capsule doctor --gpu
    """
    from capsule.checkup import check_machine, gpu_check, repair
    from capsule.host.errors import CapsuleError
    from capsule.machine.self_test import gpu_self_test

    named = [*(keys or [])]
    with suppress(CapsuleError, OSError):  # a key that cannot be found is not checked
        if (own := own_key()).exists():
            named.append(own)
    done = list(repair(named)) if fix else []
    for each in done:
        typer.echo(f"--fix {each}", err=True)
    checks: list[Check] = []
    tests: list[SelfTest] = []

    def add(check: Check) -> None:
        checks.append(check)
        if not as_json:
            _show(check)

    for check in check_machine(named):
        add(check)
    for check, test in _numerics(profile):
        add(check)
        tests += [test] if test is not None else []
    if gpu:
        add(gpu_check(gpu_self_test()))
    if as_json:
        print_json(
            {
                "schema": "capsule/doctor/v1",
                "checks": [check._asdict() for check in checks],
                "fixed": done,
                "profiles": [test.model_dump(mode="json") for test in tests],
            }
        )
    raise typer.Exit(_status(checks, tests))


def _numerics(
    profile: Literal["all", "none"] | Numerics,
) -> Iterator[tuple[Check, SelfTest | None]]:
    """Test the profiles that were asked for; all are left out if this Python has no torch.

    Raises:
        CapsuleError: CAP-M007, one profile was named and this Python has no torch.
    """
    from concurrent.futures import ThreadPoolExecutor

    from capsule.checkup import no_torch, numerics_check
    from capsule.machine.self_test import self_test

    if profile == "none":
        return
    if profile == "all" and importlib.util.find_spec("torch") is None:
        yield no_torch(), None
        return
    with ThreadPoolExecutor(len(PROFILES)) as pool:  # each test is a process with one thread
        # map() yields the results in the order of the profiles, whichever test ends first.
        for test in pool.map(self_test, PROFILES if profile == "all" else (profile,)):
            yield numerics_check(test), test


def _status(checks: list[Check], tests: list[SelfTest]) -> int:
    from capsule.host.errors import ExitCode

    if any(test.status == "differs" for test in tests):
        return ExitCode.DIFFERS
    untested = any(test.status != "as expected" for test in tests)
    problem = any(check.status == "problem" for check in checks)
    return ExitCode.INCONCLUSIVE if untested or problem else ExitCode.OK


def _show(check: Check) -> None:
    """Print a check in at most 80 columns, and its remedy below it."""
    from capsule.report.text import printable

    lines = [f"{check.status:<{len(_INDENT)}}{printable(f'{check.name}: {check.found}')}"]
    if check.fix is not None:
        lines.append(f"{_INDENT}fix: {printable(check.fix)}")
    for line in lines:
        wrapped = textwrap.wrap(
            line, _COLUMNS, subsequent_indent=_INDENT, drop_whitespace=True, break_on_hyphens=False
        )
        typer.echo("\n".join(wrapped or [line]))
