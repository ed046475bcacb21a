"""What a verification says of an execution that ended early, and of the GPU before it begins."""

import pytest

from capsule.bundle.trust import TrustPolicy
from capsule.experiment.errors import CapsuleError
from capsule.image.cache import Cache
from capsule.machine.fingerprint import take_fingerprint
from capsule.report.progress import SilentReporter
from capsule.verification import verify as verification
from capsule.verification.findings import ImageFinding, VerificationFindings
from capsule.verification.integrity.data import data_digests
from capsule.verification.request import Expectation, Mode, VerifyRequest
from capsule.verification.verify import WITHOUT_IMAGE, _failed
from tests.hostile.genuine import SIGNER, edit_json, outside, packed, program
from tests.verification.runs import forged

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


@pytest.mark.parametrize(
    ("run", "tree", "records"),
    [
        (program, True, ("the system's randomness", "the order of arrivals")),
        (lambda: outside("training"), False, None),
    ],
)
def test_what_the_signer_wrote_and_a_re_execution_takes_is_named(run, tree, records, tmp_path):
    """Code of a source tree, and records, can give any result that an honest run does not give."""
    bundle = packed(run(), tmp_path / "run.capsule.tar")
    request = VerifyRequest(bundle, TrustPolicy.of([SIGNER.public]), Mode("integrity"))
    report = verification.verify(request, Cache(tmp_path / "cache"), SilentReporter())
    assert report.verdict == "intact"
    assert report.records == records
    assert (report.source_tree or "").startswith("1 file, SHA-256 ") == tree


def test_the_data_and_the_source_tree_are_compared_with_the_expected_ones(tmp_path, monkeypatch):
    bundle = packed(program(), tmp_path / "run.capsule.tar")
    request = VerifyRequest(bundle, TrustPolicy.of([SIGNER.public]), Mode("integrity"))
    data, trees = [], []
    monkeypatch.setattr(Expectation, "check_data", lambda _, digests: data.append(digests))
    monkeypatch.setattr(Expectation, "check_tree", lambda _, project, __: trees.append(project))
    verification.verify(request, Cache(tmp_path / "cache"), SilentReporter())
    assert [each.func for each in data] == [data_digests]
    assert [list(tree.files) for tree in trees] == [["train.py"]]


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


@pytest.mark.xdist_group("verification")
@pytest.mark.slow
@pytest.mark.parametrize(("compilers", "expected"), [(None, "bitwise"), ("numba", "statistical")])
def test_functions_compiled_for_another_processor_are_not_expected_to_give_equal_bits(
    verified, honest_bundle, key, tmp_path, monkeypatch, compilers, expected
):
    """The bundle's account of its run names what it imported."""

    def told(files):
        edit_json(
            files,
            "run/mechanisms.json",
            lambda document: document["interpreters"].update(compilers=compilers),
        )
        edit_json(files, "profiles/ledger.json", assume)

    def assume(ledger):
        (row,) = (row for row in ledger["rows"] if row["source"] == "CPU instruction sets")
        row["treatment"] = "assumed"
        row["evidence"] = (
            "numba was imported, whose functions are compiled or chosen for the processor on "
            "which they run"
        )

    def elsewhere(engine):
        here = take_fingerprint(engine)
        cpu = here.cpu.model_copy(update={"model": here.cpu.model + 1})
        return here.model_copy(update={"cpu": cpu})

    bundle = (
        forged(honest_bundle, key, told, tmp_path / "other.tar") if compilers else honest_bundle
    )
    monkeypatch.setattr(verification, "take_fingerprint", elsewhere)
    report = verified(bundle, mode="environment")
    assert report.expected_grade == expected
