"""``capsule verify`` on real runs: what is reproduced, what is not, and what is refused."""

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import load_public
from capsule.experiment import contract
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode
from tests.end_to_end.conftest import capsule, forge
from tests.hostile.genuine import edit_json, relock

pytestmark = [pytest.mark.engine, pytest.mark.network]

FINAL = "checkpoints/step-000000000400.safetensors"
INDEX = run_bundle.RUN + contract.CHECKPOINT_INDEX


def test_an_honest_bundle_is_reproduced_bit_for_bit(micro, tmp_path):
    before = micro.bundle.read_bytes()
    done = micro.verify(micro.bundle, cwd=tmp_path)
    report = done.document
    assert done.status == 0, report
    assert report["verdict"] == "reproduced-bitwise"
    assert report["claim_id"] == micro.claim_id
    assert report["integrity"]
    assert report["authentic"]
    assert report["image_rebuilt"]
    assert report["differences"] == []
    assert report["reexecuted_steps"] == 400
    assert json.loads((tmp_path / "verify-report.json").read_text()) == report
    assert micro.bundle.read_bytes() == before


def test_another_signature_does_not_change_the_claim_id(micro, again, workplace):
    assert again.claim_id == micro.claim_id
    (workplace / "allowed").write_text(f"bob@lab {(workplace / 'bob.pub').read_text()}")
    options = ("--allowed-signers", "allowed", "--mode", "integrity", "--json", "--quiet")
    done = capsule("verify", again.bundle, *options, cwd=workplace)
    assert (done.status, done.document["verdict"]) == (0, "intact"), done.errors
    by_alice, by_bob = done.document["signers"]
    assert (by_alice["kind"], by_alice["rejection_reason"]) == (
        "dsse",
        "is not a trusted key",
    )
    assert (by_bob["kind"], by_bob["identity"]) == ("sshsig", "bob@lab")


def test_a_prefix_is_checked_called_a_prefix_and_vouched_for(micro, workplace, tmp_path):
    key, receipt = workplace / "mallory", tmp_path / "mallory.json"
    signing = ("--sign", key, "--receipt", receipt)
    done = micro.verify(micro.bundle, "--mode", "prefix:240", *signing, cwd=tmp_path)
    assert done.status == 0, done.output
    keys = ("--key", micro.public, "--key", f"{key}.pub")
    shown = capsule("receipts", micro.bundle, receipt, *keys, "--json", cwd=tmp_path)
    assert shown.status == 1, shown.errors  # less than the whole run, bit for bit
    assert shown.document["claim_id"] == micro.claim_id
    assert shown.document["tallies"] == {"reproduced-prefix": {"signers": 1, "machines": 1}}
    assert done.document["verdict"] == "reproduced-prefix"
    assert done.document["reexecuted_steps"] == 240
    refused = micro.verify(micro.bundle, "--mode", "prefix:241", cwd=tmp_path)
    assert refused.status == 2
    assert "CAP-V003" in refused.errors


def test_a_receipt_needs_a_key_and_an_execution(micro, workplace, tmp_path):
    nowhere = micro.verify(micro.bundle, "--receipt", "r.json", cwd=tmp_path)
    assert (nowhere.status, "CAP-V081" in nowhere.errors) == (2, True)
    signing = ("--sign", workplace / "mallory", "--mode", "integrity")
    nothing = micro.verify(micro.bundle, *signing, cwd=tmp_path)
    assert (nothing.status, "CAP-V080" in nothing.errors) == (2, True)


def test_integrity_and_environment_execute_nothing(micro, tmp_path):
    for mode, verdict in (("integrity", "intact"), ("environment", "environment-matches")):
        done = micro.verify(micro.bundle, "--mode", mode, cwd=tmp_path)
        assert (done.status, done.document["verdict"]) == (0, verdict)
        assert done.document["reexecuted_steps"] is None
    assert done.document["environment"]


def test_another_seed_differs_from_the_first_record_on_in_its_stream(micro, tmp_path):
    def other_seed(lock):
        lock["spec"]["seeds"]["streams"]["exploration"] = 99

    lie = forge(micro, lambda files: relock(files, other_seed), tmp_path / "lie.tar")
    done = micro.verify(lie, "--mode", "prefix:8", cwd=tmp_path)
    first = done.document["first_difference"]
    assert (done.status, done.document["verdict"]) == (1, "not-reproduced")
    assert (first["step"], first["component"]) == (4, "streams")


def test_another_hyper_parameter_differs_in_the_arithmetic_and_not_before(micro, tmp_path):
    def other_rate(lock):
        lock["spec"]["trainer"]["learning_rate"] = 0.0005

    lie = forge(micro, lambda files: relock(files, other_rate), tmp_path / "lie.tar")
    done = micro.verify(lie, "--mode", "prefix:240", cwd=tmp_path)
    first = done.document["first_difference"]
    assert (done.status, done.document["verdict"]) == (1, "not-reproduced")
    # Learning starts after step 200: the first update still sees equal minibatches and an equal
    # loss, and gives other parameters.
    assert first["step"] > 200
    assert first["component"] in {"loss", "parameters"}


def test_a_flipped_bit_in_a_checkpoint_is_tampering(micro, tmp_path):
    with open_bundle(micro.bundle, [load_public(micro.public)]) as bundle:
        tensor_bytes = bundle.files[FINAL].read_bytes()[-64:]
    data = bytearray(micro.bundle.read_bytes())
    data[data.index(tensor_bytes)] ^= 1
    flipped = tmp_path / "flipped.tar"
    flipped.write_bytes(data)
    done = micro.verify(flipped, cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (3, "tampered")


def flip_final_tensor(files):
    data = bytearray(files[FINAL])
    data[-1] ^= 1
    files[FINAL] = bytes(data)


def test_a_flipped_bit_that_was_signed_contradicts_the_claims(micro, tmp_path):
    lie = forge(micro, flip_final_tensor, tmp_path / "lie.tar")
    done = micro.verify(lie, cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (3, "tampered")
    assert done.document["error"]["code"] == "CAP-V010"
    assert "tensor" in done.document["error"]["message"]


def test_consistent_lies_about_a_checkpoint_and_the_score_are_found_by_execution(micro, tmp_path):
    from capsule.verification.integrity.tensors import tensor_digests

    def lie_about_the_checkpoint(files):
        flip_final_tensor(files)
        path = tmp_path / "final.safetensors"
        path.write_bytes(files[FINAL])
        digests = tensor_digests(path)
        edit_json(files, INDEX, lambda index: index["checkpoints"][-1].update(tensors=digests))
        index = contract.CheckpointIndex.model_validate_json(files[INDEX])
        digest = index.checkpoints[-1].digest()
        edit_json(
            files,
            run_bundle.CLAIMS,
            lambda claims: claims["checkpoints"][-1].update(digest=digest),
        )

    def better(evaluation):
        evaluation["points"][-1].update(returns=["0x1.9000000000000p+8"] * 2)

    def lie_about_the_score(files):
        edit_json(files, run_bundle.RUN + contract.EVALUATION, better)
        edit_json(files, run_bundle.CLAIMS, lambda claims: better(claims["evaluation"]))

    def lie_consistently(files):
        lie_about_the_checkpoint(files)
        lie_about_the_score(files)

    lie = forge(micro, lie_consistently, tmp_path / "lie.tar")
    done = micro.verify(lie, cwd=tmp_path)
    report = done.document
    assert (done.status, report["verdict"]) == (1, "not-reproduced")
    assert report["first_difference"] is None
    found = [difference["component"] for difference in report["differences"]]
    assert [component.partition("[")[0] for component in found] == [
        "checkpoints",
        "evaluation.points",
        "evaluation.points",
    ]


def test_a_bundle_of_an_unknown_signer_is_untrusted(micro, workplace, tmp_path):
    theirs = forge(micro, lambda _files: None, tmp_path / "theirs.tar", key=workplace / "mallory")
    done = micro.verify(theirs, "--mode", "integrity", cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (3, "untrusted")
    assert done.document["integrity"]
    assert not done.document["authentic"]
    assert done.document["signers"][0]["key"] == load_public(workplace / "mallory.pub").fingerprint
    without_key = capsule("verify", micro.bundle, "--mode", "integrity", "--json", cwd=tmp_path)
    assert (without_key.status, without_key.document["verdict"]) == (3, "untrusted")
    allowed = capsule(
        "verify",
        micro.bundle,
        "--mode",
        "integrity",
        "--allow-untrusted",
        "--json",
        cwd=tmp_path,
    )
    assert (allowed.status, allowed.document["verdict"]) == (0, "intact")
    assert allowed.document["authentic"] is False


def test_a_machine_without_the_gpu_cannot_decide(micro, tmp_path):
    if shutil.which("nvidia-smi"):
        pytest.fail("this test shows the verdict of a machine without a GPU; run it on one")

    def on_cuda(lock):
        lock["spec"]["accelerator"] = {
            "kind": "cuda",
            "cuda": "13.0",
            "cudnn": ">=9",
            "driver": ">=580",
            "gpu": "NVIDIA H200",
            "compute_capability": "9.0",
        }

    def with_another_recipe(files):
        # Of this one it would be known that its image has other variables on a GPU.
        ours = json.loads(files[run_bundle.LOCK])["image"]["recipe_sha256"].encode()
        for name in (run_bundle.LOCK, run_bundle.IMAGE_SBOM):
            files[name] = files[name].replace(ours, b"0" * 64)
        relock(files, on_cuda)

    lie = forge(micro, with_another_recipe, tmp_path / "gpu.tar")
    done = micro.verify(lie, cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (4, "inconclusive")
    assert done.document["error"]["code"].startswith("CAP-M")


def test_claims_of_another_run_are_noticed(micro, tmp_path):
    def other_returns(files):
        edit_json(
            files,
            run_bundle.CLAIMS,
            lambda claims: claims["evaluation"]["points"][-1].update(
                returns=["0x1.9000000000000p+8"] * 2
            ),
        )

    lie = forge(micro, other_returns, tmp_path / "lie.tar")
    done = micro.verify(lie, cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (3, "tampered")
    assert "returns" in done.document["error"]["message"]


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_flipped_byte_anywhere_is_refused(micro, tmp_path, data):
    original = micro.bundle.read_bytes()
    position = data.draw(st.integers(0, len(original) - 1))
    flip = data.draw(st.integers(1, 255))
    path = tmp_path / "flipped.tar"
    path.write_bytes(
        original[:position] + bytes([original[position] ^ flip]) + original[position + 1 :]
    )
    with pytest.raises(CapsuleError) as caught:
        open_bundle(path, [load_public(micro.public)])
    assert caught.value.exit_code == ExitCode.TAMPERED


def test_the_claim_id_is_the_digest_of_the_claims(micro):
    with open_bundle(micro.bundle, [load_public(micro.public)]) as bundle:
        assert sha256_hex(bundle.files[run_bundle.CLAIMS].read_bytes()) == micro.claim_id
