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
from capsule.experiment.owner import temporary_folder

DEFAULT_STEPS = 256


@guarded
def command(
    spec: SpecArgument = DEFAULT_SPEC,
    *,
    steps: Annotated[
        int, typer.Option("--steps", help="Agent steps of each run; a program runs to its end.")
    ] = DEFAULT_STEPS,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the mitigations into the spec.")
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
    from capsule import execution
    from capsule.diagnosis.apply import apply_patch, patch_of
    from capsule.diagnosis.diagnose import diagnose
    from capsule.engine.select import open_engine
    from capsule.experiment.errors import CapsuleError, ExitCode
    from capsule.image.cache import Cache
    from capsule.report.diagnosis import show_diagnosis
    from capsule.report.progress import open_reporter

    if apply and (overrides or spec.name.endswith(".lock.json")):
        raise CapsuleError(
            "CAP-D003",
            "--apply needs a spec that says all by itself",
            fix="Name the spec instead of its lock, and write what --set says into it.",
            exit_code=ExitCode.USAGE,
        )
    cache = Cache()
    with open_reporter(quiet=quiet) as reporter, temporary_folder("capsule-diagnose-") as scratch:
        lock, sources = locked(spec, overrides, cache, progress=reporter.note)
        chosen = open_engine(engine, progress=reporter.note)
        execution.prepare(lock, chosen, cache, sources=sources, reporter=reporter)
        directory = scratch if keep is None else keep
        diagnosis = diagnose(lock, chosen, directory, steps=steps, reporter=reporter)
    patch = patch_of(diagnosis.findings)
    if apply and patch:
        apply_patch(spec, patch)
    if as_json:
        document = diagnosis.model_dump(mode="json", by_alias=True)
        print_json({**document, "applied": patch if apply else {}})
    else:
        from rich.console import Console

        show_diagnosis(diagnosis, Console())
        if apply and patch:
            typer.echo(f"wrote {', '.join(patch)} into {spec}; lock and diagnose again", err=True)
    raise typer.Exit(diagnosis.exit_code)
