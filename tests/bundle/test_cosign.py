"""Co-signatures, each in a file of its own."""

import errno
import os

import pytest

from capsule.bundle import sshsig
from capsule.bundle.cosign import cosign
from capsule.host.errors import CapsuleError


def test_a_full_disk_leaves_no_part_of_a_signature(bundle, tmp_path, alice, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sign():
        cosign(bundle, lambda manifest: sshsig.sign(manifest, alice), tmp_path / "alice.sshsig")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CapsuleError, match="No space left"):
            sign()
    sign()
    with pytest.raises(CapsuleError, match="exists"):
        sign()
