"""``capsule starts``: the start sequences of a bundle in a file for other specs."""

import json

import pytest

from capsule.bundle import run_bundle
from capsule.bundle.keys import generate
from capsule.experiment.evaluation import StartSet, digest_of_starts
from tests.cli.conftest import capsule
from tests.hostile import genuine


@pytest.fixture
def signer(tmp_path):
    (tmp_path / "signer.pub").write_text(genuine.SIGNER.public.openssh())
    return tmp_path / "signer.pub"


def test_the_starts_of_a_run_are_written_with_what_made_them(bundle, tmp_path):
    done = capsule("starts", bundle, "-o", tmp_path / "starts.json", "--json")
    assert done.exit_code == 0, done.stderr
    found = StartSet.model_validate_json((tmp_path / "starts.json").read_bytes())
    claims = json.loads(genuine.training().files[run_bundle.CLAIMS])
    assert found.starts == ((0,),)
    assert (found.task, found.full_action_set) == ("CartPole-v1", False)
    assert (found.candidates, found.shortlist) == (1000, 250)
    printed = json.loads(done.stdout)
    assert printed["run"] == found.run
    assert printed["sha256"] == digest_of_starts(found.starts)
    manifest = genuine.manifest_of(genuine.training())
    assert found.run == manifest["claimId"]
    assert claims["evaluation"]["starts"] == [[0]]


def test_the_terminal_shows_number_digest_file_and_the_next_step(bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = capsule("starts", bundle)
    document = json.loads(capsule("starts", bundle, "--json").stdout)
    assert done.stdout == f"starts  1\ndigest  sha256:{document['sha256']}\nfile    starts.json\n"
    assert done.stderr == "next: set evaluation.start_set to this file, relative to the spec\n"
    assert (document["file"], document["starts"]) == ("starts.json", 1)
    assert document["schema"] == "capsule/starts-written/v1"


def test_the_default_file_is_not_replaced_by_other_starts(bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "starts.json").write_text("earlier")
    done = capsule("starts", bundle)
    assert (done.exit_code, "CAP-X004: starts.json exists already" in done.stderr) == (2, True)
    assert (tmp_path / "starts.json").read_text() == "earlier"
    assert capsule("starts", bundle, "-o", "starts.json").exit_code == 0
    done = capsule("starts", bundle, "-o", bundle)
    assert (done.exit_code, "CAP-X004" in done.stderr) == (2, True)


def test_equal_runs_give_equal_files_and_an_earlier_file_is_replaced(bundle, signer, tmp_path):
    first, second = tmp_path / "new" / "first.json", tmp_path / "second.json"
    second.write_text("earlier")
    assert capsule("starts", bundle, "--key", signer, "-o", first).exit_code == 0
    assert capsule("starts", bundle, "-o", second).exit_code == 0
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().count(b"\n") == 1


def test_a_bundle_by_another_signer_is_not_read(bundle, tmp_path):
    generate(tmp_path / "mallory")
    words = ["--key", tmp_path / "mallory.pub", "-o", tmp_path / "starts.json"]
    done = capsule("starts", bundle, *words)
    assert (done.exit_code, "CAP-B125" in done.stderr) == (3, True)
    assert not (tmp_path / "starts.json").exists()


def test_a_changed_bundle_leaves_an_earlier_file(bundle, tmp_path):
    (tmp_path / "starts.json").write_text("earlier")
    bundle.write_bytes(bundle.read_bytes()[:-1])
    done = capsule("starts", bundle, "-o", tmp_path / "starts.json", "--json")
    assert (done.exit_code, json.loads(done.stdout)["code"]) == (3, "CAP-B104")
    assert (tmp_path / "starts.json").read_text() == "earlier"


def test_a_place_that_cannot_be_written_is_found_before_the_bundle_is_read(bundle, tmp_path):
    bundle.write_bytes(b"")
    (tmp_path / "file").touch()
    done = capsule("starts", bundle, "-o", tmp_path / "file" / "starts.json", "--json")
    document = json.loads(done.stdout)
    assert document["code"] == "CAP-X003"
    assert str(tmp_path / "file" / "starts.json") in document["message"]


@pytest.mark.parametrize("place", ["folder", "/proc/starts.json"])
def test_a_place_that_no_file_can_have_is_a_wrong_use(bundle, tmp_path, place):
    (tmp_path / "folder").mkdir()
    done = capsule("starts", bundle, "-o", tmp_path / place, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["code"]) == (2, "CAP-X004")
    assert str(tmp_path / place) in document["message"]
    assert "Name another place" in document["fix"]
