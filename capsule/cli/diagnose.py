"""``capsule diagnose``: find out why two runs of a spec differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import guarded, locked, print_json
from capsule.cli.options import (
    DEFAULT_SPEC,
    OUTPUT,
    EngineOption,
    JsonOption,
    QuietOption,
    SetOption,
    SpecArgument,
    option,
)
from capsule.host.owner import temporary_folder

DEFAULT_STEPS = 256


@guarded
def command(
    spec: SpecArgument = DEFAULT_SPEC,
    *,
    steps: Annotated[
        int,
        option("--steps N", "Agent steps of each run. Your own program runs to its end."),
    ] = DEFAULT_STEPS,
    apply: Annotated[
        bool,
        option(
            "--apply",
            "Try the settings that may make the runs equal, and write them into the spec if "
            "they do.",
        ),
    ] = False,
    keep: Annotated[
        Path | None,
        option("--keep FOLDER", "Keep the two run directories in this folder.", OUTPUT),
    ] = None,
    overrides: SetOption = None,
    engine: EngineOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run a spec twice, and explain what differs and why.

    Both runs are instrumented to find the line of code and the operator that cause a difference,
    and the setting that prevents it.

    Examples:
        # Diagnose ./capsule.yaml.
        capsule diagnose

        # Write the settings that make the two runs equal into the spec.
        capsule diagnose train.yaml --apply
    """
    from capsule.diagnosis.trial import Workplace, apply_if_cured
    from capsule.engine.select import open_engine
    from capsule.host.errors import CapsuleError
    from capsule.image.cache import Cache
    from capsule.image.lockfile import names_lock
    from capsule.report.diagnosis import show_diagnosis, show_trial
    from capsule.report.progress import open_reporter

    if apply and (overrides or names_lock(spec)):
        raise CapsuleError(
            "CAP-D003",
            "--apply requires a spec file, and cannot be combined with --set",
            fix="Name the spec instead of its lock, and write the values of --set into the spec.",
        )
    cache = Cache()
    with open_reporter(quiet=quiet) as reporter, temporary_folder("capsule-diagnose-") as scratch:
        lock, sources = locked(spec, overrides, cache, progress=reporter.note)
        chosen = open_engine(engine, progress=reporter.note)
        place = Workplace(chosen, cache, sources, steps, reporter)
        directory = scratch if keep is None else keep
        diagnosis = place.diagnose(lock, directory)
        trial = apply_if_cured(spec, lock, diagnosis, place, directory) if apply else None
    if as_json:
        document = diagnosis.model_dump(mode="json", by_alias=True)
        tried = None if trial is None else trial.model_dump(mode="json", by_alias=True)
        print_json({**document, "trial": tried})
    else:
        from rich.console import Console

        show_diagnosis(diagnosis, Console())
        if trial is not None:
            show_trial(trial, spec, Console())
    raise typer.Exit(diagnosis.exit_code if trial is None else trial.diagnosis.exit_code)
