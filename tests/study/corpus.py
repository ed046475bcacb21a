"""The studies of the corpus."""

import shutil
from pathlib import Path

from capsule.bundle.trust import TrustPolicy
from capsule.study.directory import OUTCOME, Outcome, StudyDirectory
from capsule.study.study_bundle import open_study
from tests.refusals import refusal

CORPUS = Path(__file__).parents[1] / "corpus"
KEY = CORPUS / "author.pub"
MEMBERS = ["deterministic.1", "deterministic.2", "exploration.1", "exploration.2"]


def results_of(name):
    with open_study(CORPUS / f"{name}.capsule-study.tar", TrustPolicy.of([])) as (_, study):
        return study.results


def finished_study(folder, name="study"):
    """Make the folder of a study of the corpus whose members have ended with its bundles."""
    results = results_of(name)
    study = StudyDirectory.create(folder, results.lock, resume=False)
    for member in results.members:
        identity = member.identity
        place = study.folder(identity.name)
        place.mkdir(parents=True)
        source = CORPUS / f"{name}.members" / f"{identity.name}.capsule.tar"
        shutil.copyfile(source, place / "x.capsule.tar")
        outcome = Outcome(bundle="x.capsule.tar", claim_id=identity.claim_id)
        (place / OUTCOME).write_bytes(outcome.document())
    return study


def refused(code, function, *arguments):
    error = refusal(code, function, *arguments)
    return f"{error.message} {error.fix}"
