"""An evaluation of a real run, played again in a real container, and a picture of an episode."""

import json

import ale_py
import numpy as np
import pytest
from ale_py import roms
from PIL import Image

from capsule.bundle import run_bundle
from capsule.experiment import contract
from tests.end_to_end.conftest import capsule, forge
from tests.hostile.genuine import edit_json

pytestmark = [pytest.mark.engine, pytest.mark.network]


def replay(micro, bundle, *arguments, cwd):
    return capsule("replay", bundle, "--key", micro.public, *arguments, cwd=cwd)


def test_the_best_episode_is_played_as_it_was_claimed_and_drawn(micro, tmp_path):
    done = replay(micro, micro.bundle, "--json", "-o", "play.png", cwd=tmp_path)
    assert done.status == 0, done.errors
    found = json.loads(done.output)
    evaluation = json.loads((micro.directory / "work" / contract.EVALUATION).read_bytes())
    last = evaluation["points"][-1]
    returns = [float.fromhex(score) for score in last["returns"]]
    assert found["episodes"] == len(returns) == 2
    assert found["episode"] == returns.index(max(returns))
    assert found["return"] == max(returns)
    assert found["steps"] == last["lengths"][found["episode"]]
    assert found["claim_id"] == micro.claim_id
    with Image.open(tmp_path / "play.png") as picture:
        assert picture.format == "PNG"
        first = np.asarray(picture.convert("RGB"))
    assert np.array_equal(first, screen_after(evaluation["starts"][found["episode"]]))


def screen_after(start):
    """Return the screen of Breakout after some actions, each held for one frame."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setFloat("repeat_action_probability", 0.0)
    ale.setInt("frame_skip", 1)
    ale.loadROM(roms.get_rom_path("breakout"))
    for action in start:
        ale.act(ale.getMinimalActionSet()[action])
    return ale.getScreenRGB()


def test_another_evaluation_than_the_claimed_one_is_not_drawn(micro, tmp_path):
    def better(evaluation):
        evaluation["points"][-1].update(returns=["0x1.9000000000000p+8"] * 2)

    def change(files):
        edit_json(files, run_bundle.RUN + contract.EVALUATION, better)
        edit_json(files, run_bundle.CLAIMS, lambda claims: better(claims["evaluation"]))

    forged = forge(micro, change, tmp_path / "forged.capsule.tar")
    done = replay(micro, forged, cwd=tmp_path)
    assert done.status == 1
    assert "CAP-V091" in done.errors
    assert "of 2 episodes, number 0 is the first that differs" in done.errors
    assert not (tmp_path / "play.gif").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "status"),
    [
        (("--episode", "2"), "CAP-V090", 2),
        (("-o", "play.mp4"), "CAP-V092", 2),
        (("-o", "."), "CAP-V092", 2),
    ],
)
def test_what_cannot_be_shown_is_refused_before_anything_runs(
    micro, tmp_path, arguments, code, status
):
    done = replay(micro, micro.bundle, *arguments, cwd=tmp_path)
    assert (done.status, code in done.errors) == (status, True), done.errors
    assert "playing" not in done.errors


def test_an_untrusted_bundle_is_refused(micro, workplace, tmp_path):
    done = capsule("replay", micro.bundle, "--key", workplace / "mallory.pub", cwd=tmp_path)
    assert done.status == 3
