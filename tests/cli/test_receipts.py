"""``capsule receipts``: what is shown of the receipts beside a bundle."""

import shutil
from pathlib import Path

from tests.cli.conftest import capsule

CORPUS = Path(__file__).parents[1] / "corpus"
RECEIPT = "dqn.capsule.tar.verifier.receipt.json"


def test_a_long_file_name_is_shown_whole(tmp_path):
    name = f"{'a-long-name-' * 10}.json"
    shutil.copyfile(CORPUS / RECEIPT, tmp_path / name)
    keys = [word for who in ("author", "verifier") for word in ("--key", CORPUS / f"{who}.pub")]
    done = capsule("receipts", CORPUS / "dqn.capsule.tar", tmp_path / name, *keys)
    assert done.exit_code == 0, done.output
    assert any(line.split() == ["counts", name] for line in done.stdout.splitlines())


def test_a_bundle_by_a_revoked_key_needs_a_co_signature_as_for_verify(tmp_path):
    bundle = shutil.copyfile(CORPUS / "dqn.capsule.tar", tmp_path / "dqn.capsule.tar")
    shutil.copyfile(CORPUS / RECEIPT, tmp_path / RECEIPT)
    assert capsule("keygen", tmp_path / "carol").exit_code == 0
    assert capsule("sign", bundle, "--key", tmp_path / "carol").exit_code == 0
    keys = (CORPUS / "author.pub", CORPUS / "verifier.pub", tmp_path / "carol.pub")
    trust = [word for key in keys for word in ("--key", key)]
    trust += ["--revoked", CORPUS / "author.pub"]
    alone = capsule("receipts", bundle, *trust)
    assert alone.exit_code == 3
    assert "no key that you trust signed the bundle (SHA256:" in alone.stdout
    assert "is revoked)" in alone.stdout.replace("\n", " ")
    signature = tmp_path / "dqn.capsule.tar.carol.sshsig"
    signed = capsule("receipts", bundle, *trust, "--signature", signature)
    assert signed.exit_code == 0, signed.output
    assert "reproduced bitwise by 1 signer" in signed.stdout


def test_a_named_receipt_that_does_not_exist_is_a_mistake_of_the_user(tmp_path):
    words = ("--key", CORPUS / "author.pub")
    done = capsule("receipts", CORPUS / "dqn.capsule.tar", tmp_path / "missing.json", *words)
    assert done.exit_code == 2
    assert f"CAP-B174: the receipt '{tmp_path}/missing.json' is not a file" in done.stderr
