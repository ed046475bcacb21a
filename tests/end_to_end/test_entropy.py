"""Runs without any seed: repeatable when their randomness is derived, or recorded and replayed."""

import json

import pytest

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import load_public
from capsule.entropy.profile import parse
from capsule.entropy.report import EntropyReport
from capsule.experiment.canonical import sha256_hex
from tests.end_to_end.conftest import forge, run
from tests.hostile.genuine import edit_json

pytestmark = [pytest.mark.engine, pytest.mark.network]

UNSEEDED = (
    "--set", "seeds={random: true}",
    "--set", "trainer.total_steps=240",
    "--set", "evaluation.interval=240",
    "--set", "recording.checkpoint_interval=240",
)  # fmt: skip
RECORDED = (
    *UNSEEDED,
    "--set", "entropy.mode=recorded",
    "--set", "recording.segment_states=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded(workplace):
    """Two runs whose randomness is fresh."""
    return [run(workplace, *RECORDED) for _ in range(2)]


def members(one):
    with open_bundle(one.bundle, [load_public(one.public)]) as opened:
        return {path: staged.read_bytes() for path, staged in opened.files.items()}


def root_seeds(files):
    return {stream["seed"] for stream in json.loads(files[run_bundle.STREAMS])["streams"]}


def test_derived_randomness_makes_an_unseeded_run_repeatable(workplace):
    first, second = (run(workplace, *UNSEEDED) for _ in range(2))
    assert first.claim_id == second.claim_id
    assert len(root_seeds(members(first))) == 1
    assert root_seeds(members(first)) == root_seeds(members(second))
    report = EntropyReport.model_validate_json(members(first)[run_bundle.ENTROPY_REPORT])
    assert (report.mode, report.supervised, report.bypassed) == ("virtual", True, 0)
    assert report.requests(lambda _: True).calls > 0


def test_recorded_randomness_is_fresh_and_verify_replays_it(recorded, tmp_path):
    first, second = recorded
    assert root_seeds(members(first)) != root_seeds(members(second))
    profile = members(first)[run_bundle.ENTROPY_PROFILE]
    assert {thread.process for thread in parse(profile).threads} == {"0"}
    for mode, verdict in (("full", "reproduced-bitwise"), ("prefix:216", "reproduced-prefix")):
        done = first.verify(first.bundle, "--mode", mode, cwd=tmp_path)
        assert (done.status, done.document["verdict"]) == (0, verdict), done.output


def test_a_swapped_profile_is_found_out(recorded, tmp_path):
    first, second = recorded
    foreign = members(second)[run_bundle.ENTROPY_PROFILE]

    def swap(files):
        files[run_bundle.ENTROPY_PROFILE] = foreign

    def swap_and_claim(files):
        swap(files)
        digest = sha256_hex(foreign)
        edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(entropy_profile=digest))

    contradiction = forge(first, swap, tmp_path / "a.capsule.tar")
    done = first.verify(contradiction, "--mode", "integrity", cwd=tmp_path)
    assert (done.status, done.document["error"]["code"]) == (3, "CAP-V010")
    lie = forge(first, swap_and_claim, tmp_path / "b.capsule.tar")
    done = first.verify(lie, "--mode", "prefix:8", cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (1, "not-reproduced")
    assert done.document["first_difference"]["step"] <= 4


def test_a_damaged_profile_is_refused(recorded, tmp_path):
    first = recorded[0]

    def damage(files):
        profile = bytearray(files[run_bundle.ENTROPY_PROFILE])
        profile[len(profile) // 2] ^= 1
        files[run_bundle.ENTROPY_PROFILE] = bytes(profile)
        digest = sha256_hex(bytes(profile))
        edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(entropy_profile=digest))

    damaged = forge(first, damage, tmp_path / "c.capsule.tar")
    done = first.verify(damaged, "--mode", "integrity", cwd=tmp_path)
    assert (done.status, done.document["error"]["code"]) == (3, "CAP-R214")


def test_a_recorded_run_cannot_be_resumed(workplace, recorded):
    """What an interrupted start has drawn is unknown; a finished run is simply packed again."""
    from tests.end_to_end.conftest import capsule

    directory = recorded[0].directory
    done = capsule("run", "--resume", directory, "--key", "alice", "--json", cwd=workplace)
    assert done.document["claim_id"] == recorded[0].claim_id
    work = directory / "work"
    (work / "ledger.json").unlink()
    (work / "entropy" / "start-1").mkdir(parents=True)
    done = capsule("run", "--resume", directory, "--key", "alice", cwd=workplace)
    assert done.status == 2
    assert "CAP-R301" in done.errors
