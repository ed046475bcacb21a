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
