"""What a verification says of an execution that ended early, and of the GPU before it begins."""

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.report.progress import SilentReporter
from capsule.verification import verify as verification
from capsule.verification.findings import ImageFinding, VerificationFindings
from capsule.verification.verify import WITHOUT_IMAGE, _failed

OTHER_RANDOMNESS = CapsuleError(
    "CAP-R221", "the replay asked for 8 bytes instead of 4", fix="None."
)


@pytest.mark.parametrize(
    ("unclaimed", "verdict"), [(False, "not-reproduced"), (True, "inconclusive")]
)
def test_a_replay_that_differs_decides_nothing_without_the_claimed_image(unclaimed, verdict):
    image = ImageFinding(image_source=None, image_rebuilt=False, claim=None, unclaimed=unclaimed)
    found = VerificationFindings("run.capsule.tar", "full", "bitwise", image=image)
    judgement = _failed(OTHER_RANDOMNESS, found)
    assert judgement.verdict == verdict
    assert judgement.summary.startswith(WITHOUT_IMAGE) == unclaimed
    assert judgement.summary.endswith(OTHER_RANDOMNESS.message)


@pytest.mark.xdist_group("verification")  # they share runs
@pytest.mark.slow
def test_memory_faults_of_the_gpu_are_named_before_a_re_execution(
    verified, honest_bundle, monkeypatch
):
    notes = []
    monkeypatch.setattr(SilentReporter, "note", lambda _, text: notes.append(text))
    monkeypatch.setattr(verification, "gpu_warning", lambda *_: "GPU 0 may give wrong results")
    assert verified(honest_bundle, mode="environment").verdict == "environment-matches"
    assert notes[-1] == "GPU 0 may give wrong results"
