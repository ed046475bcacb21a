"""The studies of the corpus."""

from pathlib import Path

from capsule.bundle.trust import TrustPolicy
from capsule.study.study_bundle import open_study
from tests.refusals import refusal

CORPUS = Path(__file__).parents[1] / "corpus"
KEY = CORPUS / "author.pub"
MEMBERS = ["deterministic.1", "deterministic.2", "exploration.1", "exploration.2"]


def results_of(name):
    with open_study(CORPUS / f"{name}.capsule-study.tar", TrustPolicy.of([])) as (_, study):
        return study.results


def refused(code, function, *arguments):
    error = refusal(code, function, *arguments)
    return f"{error.message} {error.fix}"
