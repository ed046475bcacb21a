"""Trying a cure: two more runs with the settings that may help, before the spec is changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from capsule import execution
from capsule.diagnosis.apply import apply_patch, patch_of
from capsule.diagnosis.attribution import RUNS
from capsule.diagnosis.diagnose import Diagnosis, diagnose
from capsule.diagnosis.findings import Setting
from capsule.diagnosis.settings import with_settings
from capsule.engine.interface import Engine
from capsule.experiment.fields import Model
from capsule.experiment.lock import Lock
from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Reporter
from capsule.image.cache import Cache
from capsule.image.data.places import find_data

TRIAL = "trial"  # folder of the two runs


class Trial(Model):
    """The result of two runs with other settings."""

    settings: dict[str, Setting] = Field(description="Dotted field of the spec to value.")
    diagnosis: Diagnosis = Field(description="The diagnosis of the runs with these settings.")
    applied: bool = Field(description="Whether the runs were equal, and the spec was changed.")


@dataclass(frozen=True)
class Workplace:
    """The engine, cache and reporter of diagnoses.

    Attributes:
        engine: Where runs execute.
        cache: Content-addressed store of packages and layers.
        sources: Where missing packages may come from.
        steps: Steps of each run of a trainer; None for as few as fit it.
        reporter: Called with each event.
    """

    engine: Engine
    cache: Cache
    sources: SourcesSpec
    steps: int | None
    reporter: Reporter

    def diagnose(self, lock: Lock, directory: Path) -> Diagnosis:
        """Make the engine ready for a lock, and diagnose it in a folder."""
        data = find_data(lock, self.cache, self.reporter.note)
        execution.prepare(
            lock, self.engine, self.cache, sources=self.sources, reporter=self.reporter
        )
        return diagnose(
            lock,
            self.engine,
            directory,
            steps=self.steps,
            data=data,
            reporter=self.reporter,
        )


def require_unused(directory: Path) -> None:
    """Check that a folder has no runs of an earlier diagnosis.

    A run directory that is complete is not executed again, so the earlier runs would be taken for
    those of this diagnosis.

    Raises:
        CapsuleError: CAP-X004.
    """
    for name in (*RUNS, TRIAL):
        if (path := directory / name).exists():
            raise CapsuleError(
                "CAP-X004",
                f"the output {str(directory)!r} already has runs of a diagnosis: {str(path)!r} "
                "exists",
                fix="Name another folder, or remove the earlier runs.",
            )


def try_settings(
    lock: Lock, diagnosis: Diagnosis, place: Workplace, directory: Path
) -> Trial | None:
    """Run twice with the settings that a diagnosis proposes.

    Args:
        lock: What was diagnosed.
        diagnosis: Of this lock.
        place: Where to run.
        directory: Becomes the parent of the two runs' folder.

    Returns:
        What was tried; None where the diagnosis proposes no setting.

    Raises:
        CapsuleError: As :func:`diagnose`.
    """
    patch = patch_of(diagnosis.findings)
    changed = with_settings(lock.spec, patch) if patch else None
    if changed is None:
        return None
    tried = place.diagnose(lock.model_copy(update={"spec": changed}), directory / TRIAL)
    return Trial(settings=patch, diagnosis=tried, applied=False)


def apply_if_cured(trial: Trial, spec: Path) -> Trial:
    """Write the settings of a trial into a spec file if its runs were equal.

    Raises:
        CapsuleError: As :func:`apply_patch`.
    """
    if not trial.diagnosis.equal:
        return trial
    apply_patch(spec, trial.settings)
    return trial.model_copy(update={"applied": True})
