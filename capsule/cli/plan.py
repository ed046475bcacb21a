"""``capsule plan``: what building and running a spec would take."""

from __future__ import annotations

from pathlib import Path

from capsule.cli.common import guarded, print_json
from capsule.cli.options import (
    DEFAULT_SPEC,
    JsonOption,
    QuietOption,
    SetOption,
    SpecArgument,
)

RUNS = Path("runs")


@guarded
def command(
    spec: SpecArgument = DEFAULT_SPEC,
    *,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what a run would download, build and execute.

    The command queries package indexes for packages and sizes. It downloads nothing else, and
    writes neither a lock nor the cache. It shows a time and the size of a bundle if ./runs has a
    finished run of the same lock.

    Examples:
        # Plan ./capsule.yaml.
        capsule plan

        # Plan a run with another number of steps.
        capsule plan capsule.yaml --set trainer.total_steps=1000000
    """
    from rich.console import Console

    from capsule.host.platform import require_execution
    from capsule.image.cache import Cache
    from capsule.planning import make_plan
    from capsule.report.inspection import show_rows
    from capsule.report.progress import open_reporter

    require_execution()
    with open_reporter(quiet=quiet) as reporter:
        plan = make_plan(spec, overrides or [], Cache(), RUNS, reporter.note)
    if as_json:
        print_json(plan.document())
    else:
        show_rows(plan.rows, Console())
