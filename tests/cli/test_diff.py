"""``capsule diff``: what is checked before a run is executed for its dense record."""

import json

import pytest

from capsule.verification import diff
from tests.cli.conftest import capsule


@pytest.mark.parametrize("place", ["folder", "/proc/a.dense"])
def test_a_dense_record_that_cannot_be_written_is_found_before_anything_is_executed(
    bundle, tmp_path, monkeypatch, place
):
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(diff, "diff", lambda *_: pytest.fail("it was executed"))
    done = capsule("diff", bundle, bundle, "--dense", tmp_path / place, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["code"]) == (2, "CAP-X004")
    assert str(tmp_path / place) in document["message"]
