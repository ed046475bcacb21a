"""Fixtures of finished runs, and their verification."""

import pytest

from capsule import execution
from capsule.bundle.keys import load_public
from capsule.bundle.trust import TrustPolicy
from capsule.image.cache import Cache
from capsule.report.progress import SilentReporter
from capsule.verification import verify as verification
from capsule.verification.execution import admission
from capsule.verification.request import Mode, VerifyRequest
from tests.verification.runs import Machine, honest, honest_bundle, key, other_numerics, patched

__all__ = ["honest", "honest_bundle", "key", "other_numerics", "patched"]


@pytest.fixture
def verified(key, monkeypatch, tmp_path):
    """Verify a bundle on this machine, with the packages of the tests."""

    def work(bundle, mode="full", machine=None, code="supplied"):
        monkeypatch.setattr(admission, "open_engine", lambda *_, **__: machine or Machine())
        monkeypatch.setattr(execution, "prepare", lambda *_, **__: None)
        trust = TrustPolicy.of([load_public(key.with_name(f"{key.name}.pub"))])
        request = VerifyRequest(bundle, trust, Mode.parse(mode), engine="process", code=code)
        return verification.verify(request, Cache(tmp_path / "cache"), SilentReporter())

    return work
