"""``capsule replay``: what is checked before an evaluation is played."""

import json

import pytest

from capsule.host.errors import CapsuleError
from capsule.verification import replay
from tests.cli.conftest import capsule


@pytest.mark.parametrize("place", ["folder.gif", "/proc/play.gif"])
def test_a_place_that_cannot_be_written_is_found_before_anything_is_played(
    bundle, tmp_path, monkeypatch, place
):
    (tmp_path / "folder.gif").mkdir()
    monkeypatch.setattr(replay, "replayed", lambda *_: pytest.fail("it was played"))
    done = capsule("replay", bundle, "--allow-untrusted", "-o", tmp_path / place, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["code"]) == (2, "CAP-X004")
    assert str(tmp_path / place) in document["message"]


def test_the_data_sets_that_the_user_names_are_given_to_the_replay(bundle, tmp_path, monkeypatch):
    asked = []

    def replayed(request, *_):
        asked.append(dict(request.data))
        raise CapsuleError("CAP-V090", "asked", fix="")

    monkeypatch.setattr(replay, "replayed", replayed)
    place = tmp_path / "levels"
    place.mkdir()
    words = ("--allow-untrusted", "-o", tmp_path / "play.gif", "--data", f"levels={place}")
    assert capsule("replay", bundle, *words).exit_code == 2
    assert asked == [{"levels": place}]
