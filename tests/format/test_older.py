"""Bundles of another Capsule: read always, executed by the rules of docs/verify.md."""

import json

import pytest

from capsule import execution
from capsule.bundle import run_bundle
from capsule.bundle.trust import TrustPolicy
from capsule.image.cache import Cache
from capsule.report.progress import SilentReporter
from capsule.verification.execution import admission
from capsule.verification.request import Mode, VerifyRequest
from capsule.verification.verify import verify
from tests.hostile.genuine import SIGNER, edit_json, packed, relock, training
from tests.verification.runs import Machine


@pytest.fixture
def verified(monkeypatch, tmp_path):
    """Verify a bundle in an engine that is never asked to run anything."""

    def work(bundle, mode="full", **options):
        monkeypatch.setattr(admission, "open_engine", lambda *_, **__: Machine(name="docker"))
        for name in ("fetch", "check_packages"):  # its wheels are on no index
            monkeypatch.setattr(execution, name, lambda *_, **__: None)
        monkeypatch.setattr(execution, "execute", lambda *_, **__: pytest.fail("it was executed"))
        trust = TrustPolicy.of([SIGNER.public])
        request = VerifyRequest(bundle, trust, Mode.parse(mode), **options)
        return verify(request, Cache(tmp_path / "cache"), SilentReporter())

    return work


def name_the_rules(sbom):
    for each in sbom["metadata"]["component"]["properties"]:
        if each["name"] == "capsule:image:assembler":
            each["value"] = "99"


def of_another_version(files):
    """Make a bundle that says it was made by another version, by other rules."""
    relock(files, lambda lock: lock["image"].update(assembler=99))
    edit_json(files, run_bundle.IMAGE_SBOM, name_the_rules)
    edit_json(
        files,
        run_bundle.OBSERVATIONS,
        lambda seen: seen.update(capsule="9.9.9", capsule_sha256="9" * 64),
    )
    files["REPRODUCING.md"] = b"# In other words\n"


def test_it_is_read_and_what_cannot_be_judged_is_listed(verified, tmp_path):
    report = verified(packed(training(), tmp_path / "b", of_another_version), "integrity")
    assert (report.verdict, report.authentic) == ("intact", True), report.error
    assert "REPRODUCING.md" in report.unchecked


@pytest.mark.parametrize("image", ["rebuilt", "embedded"])
def test_an_image_by_rules_that_nobody_here_knows_is_not_executed(verified, image, tmp_path):
    bundle = packed(training(), tmp_path / "b", of_another_version)
    report = verified(bundle, code="supplied", image=image)
    assert (report.verdict, report.exit_code) == ("inconclusive", 4)
    code = {"rebuilt": "CAP-I102", "embedded": "CAP-V051"}[image]
    assert report.error["code"] == code, report.error


def test_its_code_is_executed_if_a_release_had_it(verified, monkeypatch, tmp_path):
    bundle = packed(training(), tmp_path / "b")
    code = json.loads(training().files[run_bundle.LOCK])["image"]["code"]["sha256"]
    report = verified(bundle)
    assert (report.verdict, report.error["code"]) == ("inconclusive", "CAP-V014")
    monkeypatch.setattr(admission, "release_of", {code: "0.0.9"}.get)
    report = verified(bundle)
    assert report.error["code"] != "CAP-V014"
    assert report.own_code
