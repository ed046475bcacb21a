"""What ``capsule verify`` says about a difference, on real re-executions without an image."""

import io

import pytest
from rich.console import Console

from capsule import execution
from capsule.bundle import run_bundle
from capsule.bundle.keys import load_public
from capsule.bundle.trust import TrustPolicy
from capsule.experiment import contract
from capsule.image.cache import Cache
from capsule.report.progress import SilentReporter
from capsule.report.terminal import show_report
from capsule.verification import verify as verification
from capsule.verification.execution import admission
from capsule.verification.request import Mode, VerifyRequest
from capsule.verification.verify import verify
from tests.verification.runs import Machine, edit_json, forged

pytestmark = pytest.mark.xdist_group("verification")  # they share runs


@pytest.fixture
def verified(key, monkeypatch, tmp_path):
    """Verify a bundle on this machine, with the packages of the tests."""

    def work(bundle, mode="full", machine=None, code="supplied"):
        monkeypatch.setattr(verification, "open_engine", lambda *_, **__: machine or Machine())
        monkeypatch.setattr(execution, "prepare", lambda *_, **__: None)
        trust = TrustPolicy.of([load_public(key.with_name(f"{key.name}.pub"))])
        request = VerifyRequest(bundle, trust, Mode.parse(mode), engine="process", code=code)
        return verify(request, Cache(tmp_path / "cache"), SilentReporter())

    return work


def shown(report):
    stream = io.StringIO()
    show_report(report, Console(file=stream, width=200))
    return stream.getvalue()


@pytest.mark.slow
def test_a_reproduced_run_has_a_replica_and_no_divergence(verified, honest_bundle, honest):
    report = verified(honest_bundle)
    assert report.verdict == "reproduced-bitwise"
    assert report.divergence is None
    evaluation = (honest.directory / contract.EVALUATION).read_bytes()
    assert report.replica.evaluation == contract.Evaluation.model_validate_json(evaluation)
    assert report.replica.divergence.steps == 400
    assert report.replica.divergence.components["parameters"] == ()


@pytest.mark.slow
def test_other_training_code_is_executed_only_if_the_user_accepts_it(
    verified, honest_bundle, monkeypatch
):
    monkeypatch.setattr(execution, "execute", lambda *_, **__: pytest.fail("it was executed"))
    report = verified(honest_bundle, code="own")
    assert (report.verdict, report.exit_code) == ("inconclusive", 4)
    assert report.error["code"] == "CAP-V014"
    assert "--code supplied" in report.error["fix"]
    monkeypatch.undo()
    report = verified(honest_bundle)
    assert (report.verdict, report.own_code) == ("reproduced-bitwise", False)
    assert "the training code was the signer's own" in report.summary


@pytest.mark.slow
def test_the_code_of_a_release_is_executed_and_named(verified, honest_bundle, monkeypatch):
    monkeypatch.setattr(admission, "release_of", lambda _: "0.0.9")
    report = verified(honest_bundle, code="own")
    assert (report.verdict, report.own_code) == ("reproduced-bitwise", True)
    assert report.summary.endswith("; the training code was that of Capsule 0.0.9")


@pytest.mark.slow
def test_a_lie_about_the_score_is_called_tampering(verified, honest_bundle, key, tmp_path):
    def better(evaluation):
        evaluation["points"][-1].update(returns=["0x1.9000000000000p+8"] * 2)

    def lie(files):
        edit_json(files, run_bundle.RUN + contract.EVALUATION, better)
        edit_json(files, run_bundle.CLAIMS, lambda claims: better(claims["evaluation"]))

    report = verified(forged(honest_bundle, key, lie, tmp_path / "lie.tar"))
    assert report.verdict == "not-reproduced"
    assert report.divergence.causes[0].name == "tampering"
    assert report.replica.divergence.components["loss"] == ()
    text = shown(report)
    assert "equal, record by record, up to step 400" in text
    assert "tampering (likely)" in text


@pytest.mark.slow
def test_other_physics_are_named_by_a_prefix_already(verified, honest_bundle):
    moon = Machine(variables={"PHYSICS_GRAVITY": "9.9"})
    report = verified(honest_bundle, "prefix:120", moon)
    assert report.verdict == "not-reproduced"
    assert report.replica is None
    assert report.divergence.causes[0].name == "environment-dynamics"
    assert report.first_difference == report.divergence.first
    assert "environment-dynamics (shown)" in shown(report)


class Hasty(Machine):
    """Ends a prefix before the step that it is to reach."""

    def run(self, task, **options):
        job = task.run_directory / contract.JOB
        text = job.read_text()
        assert '"stop_after":120' in text
        job.write_text(text.replace('"stop_after":120', '"stop_after":80'))
        return super().run(task, **options)


@pytest.mark.slow
def test_a_prefix_that_ends_early_is_not_reproduced(verified, honest_bundle):
    report = verified(honest_bundle, "prefix:120", Hasty())
    assert report.verdict == "not-reproduced"
    assert report.summary.startswith("the re-execution ended before step 120")
