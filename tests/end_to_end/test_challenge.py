"""A challenge of a real run in a real container engine."""

import shutil

import pytest

from capsule import execution
from capsule.bundle.keys import load_public
from capsule.bundle.trust import TrustPolicy
from capsule.experiment import contract
from capsule.experiment.contract import Result
from capsule.image.cache import Cache
from capsule.report.progress import open_reporter
from capsule.verification.request import Mode, VerifyRequest
from capsule.verification.verify import verify

pytestmark = [pytest.mark.engine, pytest.mark.network]


def test_a_segment_goes_on_from_its_state_and_a_fresh_seed_is_answered(micro, monkeypatch):
    monkeypatch.setattr("capsule.verification.execution.challenge.choose", lambda *_: [1])
    report = verified(micro, "segments:1")
    assert report.verdict == "reproduced-segments", report
    (segment,) = report.challenge.segments
    assert (segment.begins, segment.ends, segment.equal) == (200, 400, True)
    assert (report.challenge.of, report.challenge.undetected) == (2, 0.5)
    assert (report.mode, report.reexecuted_steps) == ("segments:1", 200)
    assert report.fresh_seed.keys == 6
    assert "1 of 2 segments, chosen at random by this verifier" in report.summary
    assert "1 more and the evaluation were not executed" in report.summary


def verified(micro, mode):
    trust = TrustPolicy(keys=(load_public(micro.public),))
    request = VerifyRequest(micro.bundle, trust, Mode.parse(mode))
    with open_reporter(quiet=True) as reporter:
        return verify(request, Cache(), reporter)


def test_an_image_that_recites_is_told_from_one_that_computes(micro, monkeypatch):
    def recite(lock, engine, directory, *_, **__):
        shutil.copytree(micro.directory / "work", directory, dirs_exist_ok=True)
        return Result.model_validate_json((directory / contract.RESULT).read_bytes())

    monkeypatch.setattr(execution, "execute", recite)
    assert verified(micro, "full").verdict == "reproduced-bitwise"  # it is fooled
    report = verified(micro, "fresh-seed")
    assert report.verdict == "not-reproduced"
    assert "does not compute from the seed" in report.summary
    assert verified(micro, "segments:1").verdict == "not-reproduced"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--challenge", "3"), "CAP-V063"),
        (("--challenge", "some"), "CAP-V060"),
        (("--challenge", "1", "--mode", "prefix:8"), "CAP-V064"),
        (("--fresh-seed", "--mode", "integrity"), "CAP-V064"),
    ],
)
def test_a_challenge_that_cannot_be_is_refused_before_anything_runs(micro, tmp_path, options, code):
    done = micro.verify(micro.bundle, *options, cwd=tmp_path)
    assert done.status == 2
    assert code in done.errors
