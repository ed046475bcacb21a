"""Reading a study file, and the spec of each of its members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from capsule.experiment.evaluation import StartSet
from capsule.experiment.spec import Spec
from capsule.experiment.trainers import CommandTrainer
from capsule.host.errors import CapsuleError
from capsule.host.spec_file import spec_of
from capsule.host.validation import validate
from capsule.host.yaml_document import YamlDocument
from capsule.image.lockfile import lock_path
from capsule.study.members import PlannedMember, plan_members
from capsule.study.spec import StudySpec

START_SET = "evaluation.start_set"
Pair = tuple[str, Any]  # a field, as section.field, and its value


class StudyFile(NamedTuple):
    """A study and its base spec, as their files have them.

    Attributes:
        path: The study's file.
        study: The study.
        base: The base spec's document.
        folder: Folder of the base spec, to which its paths are relative.
    """

    path: Path
    study: StudySpec
    base: YamlDocument
    folder: Path

    @classmethod
    def load(cls, path: Path) -> StudyFile:
        """Read a study file and the spec that it names as its base.

        Raises:
            CapsuleError: CAP-S001 a file cannot be read, CAP-S002 it is not YAML, CAP-S003 a field
                of the study is wrong, such as 'base' if it names no file.
        """
        study = validate(YamlDocument.load(path, "study"), StudySpec)
        base = path.parent / study.base
        if not base.is_file():
            raise CapsuleError(
                "CAP-S003",
                f"{path}: base: {study.base!r} is not a file in {path.parent}",
                fix="Change base to the path of a spec, relative to the study's file.",
            )
        return cls(path, study, YamlDocument.load(base, "spec"), base.parent)

    def beside(self, suffix: str) -> Path:
        """Return the path of a file that goes with the study: ``x.yaml`` -> ``x`` + suffix."""
        return self.path.with_name(self.path.stem + suffix)

    @property
    def base_lock(self) -> Path:
        """The lock file beside the base spec; a study reads it and does not write it."""
        return lock_path(self.folder / Path(self.study.base).name)

    def starts_spec(self) -> Spec:
        """Return the spec of the run that ranks the start sequences.

        Raises:
            CapsuleError: CAP-Y002, the study names none; CAP-S003, CAP-S004, CAP-S010, as of
                :meth:`member_specs`.
        """
        if self.study.starts is None:
            raise CapsuleError(
                "CAP-Y002",
                f"study {self.study.name} has no 'starts', so no run ranks start sequences for it",
                fix="Add starts: {set: {seeds.root: 1000}} to the study.",
            )
        # This run ranks sequences of its own, even if the base spec pins some.
        own = (*sorted(self.study.starts.set.items()), (START_SET, None))
        return self._spec((), own, "starts")

    def member_specs(self, starts: StartSet | None) -> Iterator[tuple[PlannedMember, Spec]]:
        """Yield every member with its spec.

        Args:
            starts: The start sequences of all members whose group does not set its own.

        Raises:
            CapsuleError: CAP-Y001 too many members; CAP-S003, CAP-S004, CAP-S010, a setting gives
                a spec that is not valid; the message names the group.
        """
        known: dict[str, Spec] = {}  # members with equal settings have one spec
        pinned: Sequence[Pair] = ()
        if starts is not None:
            pinned = [(START_SET, starts.model_dump(mode="json", by_alias=True))]
        for member in plan_members(self.study):
            # Settings have lists and mappings as values, which have no hash.
            key = repr(member.settings)
            if key not in known:
                # plan_members() puts the settings of the study first, and _spec() adds these
                # itself.
                own = member.settings[len(self.study.set) :]
                known[key] = self._spec(pinned, own, f"groups.{member.group}")
                self._check_scores(known[key], member)
            yield member, known[key]

    def _check_scores(self, spec: Spec, member: PlannedMember) -> None:
        if self.study.scores is not None and not isinstance(spec.trainer, CommandTrainer):
            raise CapsuleError(
                "CAP-S003",
                f"{self.path}: scores: group {member.group} trains by {spec.trainer.algorithm}, "
                "whose scores are its evaluations",
                fix="Remove scores: they are for programs of your own (trainer.command).",
            )

    def _spec(self, pinned: Sequence[Pair], own: Sequence[Pair], where: str) -> Spec:
        """Return the base with the settings of the study, and then those that ``where`` has."""
        document = self.base.copy()
        shared = sorted(self.study.set.items())
        # Later ones replace earlier ones, so that a group can set evaluation.start_set itself.
        for place, pairs in (("starts", pinned), ("set", shared), (where, own)):
            for field, value in pairs:
                document.set(field, value, f"{place} of {self.path.name}")
        try:
            return spec_of(document, self.folder)
        except CapsuleError as error:
            if not own or where in error.message:
                raise
            message = f"{error.message} (with the settings of {where} of {self.path.name})"
            raise CapsuleError(error.code, message, fix=error.fix) from error
