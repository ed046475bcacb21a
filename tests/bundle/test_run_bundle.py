"""Where a program's outputs go in a bundle."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.bundle import run_bundle
from capsule.bundle.archive import MAX_NAME, NAME_PATTERN
from capsule.bundle.claims import claims_model
from capsule.bundle.events import parse_event, sound_events
from capsule.bundle.manifest import BundleFile, Manifest
from capsule.bundle.run_bundle import members_of, output_members
from capsule.bundle.trust import TrustPolicy
from capsule.experiment.lock import Lock
from capsule.image.cache import Cache
from capsule.report.progress import SilentReporter
from capsule.verification.request import Mode, VerifyRequest
from capsule.verification.verify import verify
from tests.hostile import genuine

ONE, TWO = "1" * 64, "2" * 64


def test_a_name_that_an_archive_can_hold_is_kept():
    assert output_members([("runs/model.pt", ONE)]) == {"runs/model.pt": "workspace/runs/model.pt"}


def test_any_other_goes_by_its_digest():
    for path in (".hidden", "a b", "é", "deep/" * 20 + "x", "-dash"):
        assert output_members([(path, ONE)]) == {path: f"outputs/{ONE}"}


def test_names_that_a_file_system_could_confuse_are_kept_apart():
    assert output_members([("a", ONE), ("A", TWO)]) == {
        "A": "workspace/A",
        "a": f"outputs/{ONE}",
    }
    assert output_members([("B/c", ONE), ("b", TWO)])["b"] == f"outputs/{TWO}"
    assert output_members([("A", ONE), ("a/c", TWO)])["a/c"] == f"outputs/{TWO}"


def test_the_names_that_are_taken_are_not_copied_for_every_output(monkeypatch):
    class Names(set):
        def __or__(self, other):
            pytest.fail("time would be quadratic in the number of outputs")

    monkeypatch.setattr(run_bundle, "set", Names, raising=False)
    paths = [(f"{number % 9}/{number}", ONE) for number in range(99)]
    assert output_members(paths) == {path: f"workspace/{path}" for path, _ in paths}


PATHS = st.lists(st.text(st.sampled_from("aAbB./-é"), min_size=1, max_size=9), max_size=8)


@given(PATHS)
def test_every_output_has_a_place_that_a_manifest_takes(paths):
    members = output_members([(path, f"{number:064x}") for number, path in enumerate(paths)])
    assert members.keys() == set(paths)
    names = sorted(set(members.values()))
    assert all(re.fullmatch(NAME_PATTERN, name) and len(name) <= MAX_NAME for name in names)
    claims = BundleFile(
        path="claims.json", size=0, sha256=ONE, role="claims", mediaType="application/json"
    )
    files = [
        BundleFile(path=name, size=0, sha256=TWO, role="output", mediaType="a/b") for name in names
    ]
    Manifest(claimId=ONE, files=(claims, *sorted(files, key=lambda file: file.path)))


@pytest.mark.parametrize("run", [genuine.training, genuine.program])
def test_a_bundle_has_the_members_that_follow_from_lock_and_claims(run):
    files = run().files
    lock = Lock.model_validate_json(files["spec/lock.json"])
    claims = claims_model(lock).model_validate_json(files["claims.json"])
    assert members_of(lock, claims, embedded=False, with_data=False) == run().facts
    assert "image/image.tar.zst" in members_of(lock, claims, embedded=True, with_data=False)


def test_members_of_another_version_are_listed_as_not_checked(tmp_path):
    def made_elsewhere(files):
        genuine.edit_json(
            files, "observations.json", lambda facts: facts.update(capsule_sha256="9" * 64)
        )
        files["verify.sh"] = b"echo VERIFIED"
        files["REPRODUCING.md"] = b"curl https://example.org | sh"

    path = genuine.packed(genuine.training(), tmp_path / "bundle", made_elsewhere)
    request = VerifyRequest(path, TrustPolicy.of([genuine.SIGNER.public]), Mode("integrity"))
    report = verify(request, Cache(tmp_path), SilentReporter())
    assert report.verdict == "intact"
    assert {"verify.sh", "REPRODUCING.md", "image/seccomp.json"} <= {*report.unchecked}
    assert "claims.json" not in report.unchecked


EVENT = b'{"kind":"start","step":0,"time":1}\n'


def test_only_events_are_packed():
    lines = [
        EVENT,
        b"text\n",
        b'{"step": 0, "kind": "start", "time": 1.0}\n',
        b"\xff\n",
        EVENT[:-1],
    ]
    assert list(sound_events(io.BytesIO(b"".join(lines)))) == [EVENT, EVENT, EVENT]


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(EVENT[:-1])), max_size=6))
def test_what_is_packed_of_events_is_accepted(lines):
    for line in sound_events(io.BytesIO(b"\n".join(lines))):
        assert parse_event(line).kind == "start"
