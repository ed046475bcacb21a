"""``capsule diagnose``: find out why two runs of a spec differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from capsule.cli.reports import tell
from capsule.host.owner import temporary_folder

if TYPE_CHECKING:
    from capsule.diagnosis.diagnose import Diagnosis
    from capsule.diagnosis.trial import Trial
    from capsule.host.errors import CapsuleError


@guarded
def command(
    spec: SpecArgument = DEFAULT_SPEC,
    *,
    steps: Annotated[
        int | None,
        option(
            "--steps N",
            "Agent steps of each run. By default, as few as fit the trainer, but at least 256. "
            "Your own program runs to its end.",
            min=1,
        ),
    ] = None,
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
    from capsule.diagnosis.trial import Workplace, apply_if_cured, require_unused, try_settings
    from capsule.engine.select import open_engine
    from capsule.host.errors import CapsuleError
    from capsule.host.outputs import require_folder
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
    if keep is not None:
        require_folder(keep)
        require_unused(keep)
    cache = Cache()
    with open_reporter(quiet=quiet) as reporter, temporary_folder("capsule-diagnose-") as scratch:
        lock, sources = locked(spec, overrides, cache, progress=reporter.note)
        chosen = open_engine(engine, progress=reporter.note)
        place = Workplace(chosen, cache, sources, steps, reporter)
        directory = scratch if keep is None else keep
        diagnosis = place.diagnose(lock, directory)
        trial: Trial | None = None
        error: CapsuleError | None = None
        if apply:
            # An error from here on ends the command only after the diagnosis has been shown.
            try:
                trial = try_settings(lock, diagnosis, place, directory)
                if trial is not None:
                    trial = apply_if_cured(trial, spec)
            except CapsuleError as raised:
                error = raised
    if as_json:
        print_json(_document(diagnosis, trial, error))
    else:
        from rich.console import Console

        show_diagnosis(diagnosis, Console())
        if trial is not None:
            show_trial(trial, spec, Console())
    if error is not None:
        tell(error)
        raise typer.Exit(error.exit_code)
    raise typer.Exit(diagnosis.exit_code if trial is None else trial.diagnosis.exit_code)


def _document(
    diagnosis: Diagnosis, trial: Trial | None, error: CapsuleError | None
) -> dict[str, Any]:
    from capsule.cli.diagnosis_document import DiagnosisDocument
    from capsule.cli.error_document import ErrorDocument

    told = None if error is None else ErrorDocument.of(error)
    # The fields have been validated already.
    document = DiagnosisDocument.model_construct(**dict(diagnosis), trial=trial, error=told)
    return document.model_dump(mode="json", by_alias=True)
