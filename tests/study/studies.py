"""Studies that nobody ran: locks and results that were made by hand."""

import json
from pathlib import Path

from capsule.bundle.claims import CheckpointClaim, ImageClaim, TraceClaim, TrainingClaims
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.contract import Evaluation, EvaluationPoint
from capsule.experiment.lock import Lock, LockedProject
from capsule.host.spec_file import spec_of
from capsule.host.yaml_document import YamlDocument
from capsule.study.lock import LockedMember, SharedPins, StudyLock
from capsule.study.program_scores import ScoreReader
from capsule.study.results import MemberIdentity, StudyResults, member_result
from capsule.study.spec import StudySpec
from capsule.study.study_file import StudyFile
from tests.locked_images import locked_image

ZERO = "0" * 64
BASE = {
    "schema": "capsule/spec/v1",
    "name": "cart",
    "environment": {"suite": "gymnasium", "id": "CartPole-v1"},
    "trainer": {"algorithm": "dqn", "network": "mlp", "total_steps": 8},
}
GROUPS = {
    "deterministic": {},
    "exploration": {"vary": ["exploration"]},
    "rates": {"runs": 1, "grid": {"trainer.learning_rate": [0.1, 0.01, 0.001]}},
}
IMAGE = locked_image()
CLAIMED = ImageClaim(config=f"sha256:{ZERO}", layers=())
TREE = LockedProject(sha256=ZERO, size=0, files={}, git=None)
STEPS = (0, 4, 8)


def make_file(groups=GROUPS, base=BASE, **study):
    document = {"name": "tiny", "base": "base.yaml", "runs": 3, "groups": groups, **study}
    return StudyFile(
        Path("tiny.yaml"),
        StudySpec.model_validate_json(json.dumps(document)),
        YamlDocument(json.dumps(base).encode(), "base.yaml", "spec"),
        Path(),
    )


def base_spec(file):
    """Return the base spec of a study, without any group."""
    return spec_of(file.base.copy(), file.folder)


def make_lock(groups=GROUPS, **options):
    file = make_file(groups, **options)
    project = None if base_spec(file).code is None else TREE
    pins = SharedPins(image=IMAGE, project=project)
    specs, members = {}, []
    for member, spec in file.member_specs(None):
        number = specs.setdefault(spec.digest(), (len(specs), spec))[0]
        digest = Lock(spec=spec, image=pins.image, project=pins.project).digest()
        members.append(LockedMember(name=member.name, spec=number, pins=0, lock=digest))
    return StudyLock(
        study=file.study,
        pins=(pins,),
        specs=tuple(spec for _, spec in specs.values()),
        members=tuple(members),
    )


def make_claims(lock, scores, **changes):
    """Return claims with these scores at STEPS, each the mean return of two episodes."""
    points = tuple(
        EvaluationPoint(
            step=step,
            returns=(float(score - 1).hex(), float(score + 1).hex()),
            lengths=(1, 1),
        )
        for step, score in zip(STEPS, scores, strict=True)
    )
    facts = {
        "lock": lock,
        "image": None,
        "relaxations": ("engine=process",),
        "flags": {},
        "libraries": {},
        "streams": (),
        "trace": TraceClaim(records=1, head=ZERO),
        "checkpoints": (CheckpointClaim(step=8, digest=ZERO),),
        "evaluation": Evaluation(starts=((0,), (1,)), points=points),
        "steps": 8,
        "episodes": 1,
        "parameters": ZERO,
    }
    return TrainingClaims(**facts | changes)


def final_score(member):
    """Return what the final network of a member scores: the same for equal locks."""
    return int(member.lock[:4], 16) % 50


def no_outputs(_claims, path):
    raise AssertionError(path)


def make_results(lock=None, missing=(), image=None):
    lock = lock or make_lock()
    members = []
    for member in lock.members:
        if member.name not in missing:
            score = final_score(member)
            claims = make_claims(member.lock, (0, 2 * score, score), image=image)
            identity = MemberIdentity(
                name=member.name,
                claim_id=claims.claim_id(),
                bundle=sha256_hex(member.name.encode()),
            )
            members.append(
                member_result(lock, identity, claims, no_outputs, ScoreReader(lock.study))
            )
    return StudyResults(lock, tuple(members), tuple(missing))
