"""Small studies of a run that is never executed, with pins that were never resolved."""

from pathlib import Path

from capsule.experiment.lock import Lock, LockedImage, without_sources
from capsule.image.cache import Cache
from capsule.study import lock as study_lock
from capsule.study.spec import StudySpec
from capsule.study.study_file import StudyFile
from tests.bundle.locks import digest_of, make_lock

BASE = """\
schema: capsule/spec/v1
name: cart
environment: {suite: gymnasium, id: CartPole-v1}
trainer: {algorithm: dqn, network: mlp, total_steps: 1_024, replay_start: 512}
evaluation:
  {interval: 1_024, starts: 2, candidates: 2, shortlist: 2, min_actions: 0, max_actions: 0}
"""
STUDY = """\
schema: capsule/study/v1
name: tiny
base: cart.yaml
runs: 2
groups:
  deterministic: {}
  exploration: {vary: [exploration]}
"""


def write(folder: Path, study: str = STUDY, base: str = BASE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cart.yaml").write_text(base)
    path = folder / "tiny.yaml"
    path.write_text(study)
    return path


def of_groups(**groups: object) -> StudySpec:
    document = {"schema": "capsule/study/v1", "name": "s", "base": "cart.yaml", "groups": groups}
    return StudySpec.model_validate(document, strict=False)


class Resolutions:
    """Takes the place of the resolver: pins follow from the image and the accelerator alone.

    Attributes:
        made: Images that were resolved without the pins of an earlier lock.
    """

    def __init__(self, monkeypatch) -> None:
        self.made: list[str] = []
        monkeypatch.setattr(study_lock, "resolve", self.resolve)

    def resolve(self, spec, _cache, *, project, data, previous, **_) -> Lock:
        pinned = without_sources(spec)
        if previous is not None:
            return Lock(spec=pinned, image=previous.image, project=project, data=data)
        wanted = f"{pinned.image.model_dump_json()}{pinned.accelerator.model_dump_json()}"
        self.made.append(wanted)
        image = make_lock(recipe=spec.accelerator.kind).image.model_dump()
        image |= {"base": digest_of(f"{wanted} {len(self.made)}")}
        image = LockedImage.model_validate(image)
        return Lock(spec=pinned, image=image, project=project, data=data)


def locked(path: Path, previous=None, **options) -> study_lock.StudyLock:
    file = StudyFile.load(path)
    return study_lock.lock_study(file, None, previous, Cache(), lambda _: None, **options)


def digests(lock: study_lock.StudyLock) -> dict[str, str]:
    return {member.name: member.lock for member in lock.members}
