"""A verification that a stage ends early reports everything that the stages before it found."""

import shutil
from contextlib import contextmanager

import pytest

from capsule import execution
from capsule.bundle.keys import load_public
from capsule.bundle.trust import TrustPolicy
from capsule.host.errors import CapsuleError
from capsule.image.cache import Cache
from capsule.report.progress import SilentReporter
from capsule.verification import verify as verification
from capsule.verification.execution import admission
from capsule.verification.request import Mode, VerifyRequest
from capsule.verification.verdict import Report
from tests.verification.runs import Machine

pytestmark = pytest.mark.xdist_group("verification")  # they share runs

ALWAYS = {"bundle", "mode", "verdict", "summary", "seconds", "error"}
# Each stage with the fields of the report that are known once it has ended.
STAGES = {
    "check_consistency": {
        *("claim_id", "manifest", "recorded_ledger", "relaxations"),
        *("integrity", "authentic", "signer", "signers"),
    },
    "take_fingerprint": {"environment", "expected", "expected_grade", "machine"},
    "check_code": {"own_code"},
    "prepare_executor": {"image_rebuilt"},
    "check_packages": {"besides", "startup"},
    "Reexecutor.whole": {"ledger", "reexecuted_steps"},
    "compare_results": set(),
    "analyse": {"replica"},
}
"""Where a stage finds nothing that a report has, because the runs are equal, its set is empty."""


@pytest.fixture
def verified(honest, honest_bundle, key, monkeypatch, tmp_path):
    """Verify the honest bundle by its own run directory, which stands for a re-execution."""

    @contextmanager
    def finished(_note):
        shutil.copytree(honest.directory, tmp_path / "again")
        yield tmp_path / "again"

    def work():
        monkeypatch.setattr(admission, "open_engine", lambda *_, **__: Machine())
        monkeypatch.setattr(verification, "reexecution_folder", finished)
        monkeypatch.setattr(execution, "prepare", lambda *_, **__: None)
        trust = TrustPolicy.of([load_public(key.with_name(f"{key.name}.pub"))])
        request = VerifyRequest(
            honest_bundle, trust, Mode("full"), engine="process", code="supplied"
        )
        return verification.verify(request, Cache(tmp_path / "cache"), SilentReporter())

    return work


def found(report):
    empty = Report(bundle="", mode="", verdict="intact", summary="").model_dump()
    return {name for name, value in report.model_dump().items() if value != empty[name]}


@pytest.mark.slow
def test_a_finished_verification_has_the_findings_of_all_stages(verified):
    report = verified()
    assert report.verdict == "reproduced-bitwise"
    assert found(report) == (ALWAYS - {"error"}).union(*STAGES.values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_leaves_the_findings_before_it(verified, monkeypatch, stage):
    def fail(*_, **__):
        raise CapsuleError("CAP-X003", "full", fix="Free it.")

    owner, _, name = stage.rpartition(".")
    module = "execution.reexecution." if owner else "verify."
    monkeypatch.setattr(f"capsule.verification.{module}{owner and owner + '.'}{name}", fail)
    report = verified()
    before = list(STAGES)[: list(STAGES).index(stage)]
    assert found(report) == ALWAYS.union(*(STAGES[each] for each in before))
    assert (report.verdict, report.summary) == ("inconclusive", "full")
    assert report.error == {"code": "CAP-X003", "message": "full", "fix": "Free it."}


def test_what_convicts_a_bundle_late_leaves_its_signer_in_the_report(verified, monkeypatch):
    def fail(*_, **__):
        raise CapsuleError("CAP-V010", "forged", fix="")

    monkeypatch.setattr(verification, "prepare_executor", fail)
    report = verified()
    assert (report.verdict, report.integrity, report.authentic) == ("tampered", False, True)
    assert report.signer is not None
