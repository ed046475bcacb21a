"""``capsule diagnose``: run twice, and say what differs and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import (
    DEFAULT_SPEC,
    EngineOption,
    JsonOption,
    QuietOption,
    SetOption,
    SpecArgument,
    guarded,
    locked,
    print_json,
)
from capsule.host.owner import temporary_folder

DEFAULT_STEPS = 256


@guarded
def command(
    spec: SpecArgument = DEFAULT_SPEC,
    *,
    steps: Annotated[
        int, typer.Option("--steps", help="Agent steps of each run; a program runs to its end.")
    ] = DEFAULT_STEPS,
    apply: Annotated[
        bool, typer.Option("--apply", help="Try the settings that may help; write them if they do.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Folder for the two run directories.")
    ] = None,
    overrides: SetOption = None,
    engine: EngineOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run a spec twice under instruments, and explain what differs, or could."""
    from capsule.diagnosis.trial import Workplace, apply_if_cured
    from capsule.engine.select import open_engine
    from capsule.experiment.errors import CapsuleError, ExitCode
    from capsule.image.cache import Cache
    from capsule.report.diagnosis import show_diagnosis, show_trial
    from capsule.report.progress import open_reporter

    if apply and (overrides or spec.name.endswith(".lock.json")):
        raise CapsuleError(
            "CAP-D003",
            "--apply needs the spec itself, without changes by --set",
            fix="Name the spec instead of its lock, and write what --set says into it.",
            exit_code=ExitCode.USAGE,
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
