"""The studies of the corpus."""

from pathlib import Path

import pytest

from capsule.bundle.trust import TrustPolicy
from capsule.host.errors import CapsuleError
from capsule.study.study_bundle import open_study

CORPUS = Path(__file__).parents[1] / "corpus"
KEY = CORPUS / "author.pub"
MEMBERS = ["deterministic.1", "deterministic.2", "exploration.1", "exploration.2"]


def results_of(name):
    with open_study(CORPUS / f"{name}.capsule-study.tar", TrustPolicy.of([])) as (_, study):
        return study.results


def refused(code, function, *arguments):
    with pytest.raises(CapsuleError) as caught:
        function(*arguments)
    assert caught.value.code == code
    return f"{caught.value.message} {caught.value.fix}"
