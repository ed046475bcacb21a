"""The members of a bundle that follow from its other documents."""

import hashlib
import json
from pathlib import Path

import pytest

import capsule
from capsule.bundle import run_bundle
from capsule.bundle.claims import Observations, claims_model
from capsule.bundle.derived import derived_members
from capsule.bundle.run_bundle import members_of
from capsule.experiment import contract
from capsule.experiment.lock import Lock
from capsule.machine.fingerprint import OperatingSystem
from tests.hostile import genuine

PROFILE = Path(capsule.__file__).parent / "image" / "seccomp.json"
ALWAYS = {"spec/job.json", "machine/sbom.cdx.json", "REPRODUCING.md", "ro-crate-metadata.json"}
RUNS = {
    "training": genuine.training,
    "program": genuine.program,
    "training outside": lambda: genuine.outside("training"),
    "program outside": lambda: genuine.outside("program"),
}


def documents(run):
    lock = Lock.parse(run.files[run_bundle.LOCK])
    claims = claims_model(lock).parse(run.files[run_bundle.CLAIMS])
    return lock, claims, Observations.parse(run.files[run_bundle.OBSERVATIONS])


@pytest.fixture(params=RUNS)
def run(request):
    return RUNS[request.param]()


def test_a_verifier_makes_the_members_of_the_bundle_again(run):
    made = derived_members(*documents(run), run.facts)
    assert made.keys() >= ALWAYS
    assert {path: run.files[path] for path in made} == made
    # The kinds may come in any order, as from a manifest.
    assert derived_members(*documents(run), dict(reversed(run.facts.items()))) == made


def test_the_system_calls_of_containers_are_packed_with_an_image_only(run):
    made = derived_members(*documents(run), run.facts)
    _, claims, _ = documents(run)
    assert made.keys() - ALWAYS == (set() if claims.image is None else {"image/seccomp.json"})
    if claims.image is not None:
        assert made["image/seccomp.json"] == PROFILE.read_bytes()


def test_the_job_is_that_of_a_whole_run(run):
    lock, claims, observed = documents(run)
    job = contract.Job.parse(derived_members(lock, claims, observed, run.facts)["spec/job.json"])
    assert job.spec == lock.spec
    assert (job.stop_after, job.learners, job.replicas, job.dense) == (None, 1, 1, None)
    assert job.segment is False


def test_the_crate_describes_every_other_member(run):
    made = derived_members(*documents(run), run.facts)
    graph = json.loads(made["ro-crate-metadata.json"])["@graph"]
    named = {each["@id"] for each in graph}
    assert run.facts.keys() <= named


def test_the_guide_depends_on_what_the_bundle_carries():
    lock, claims, observed = documents(genuine.training())
    guides = [
        derived_members(
            lock, claims, observed, members_of(lock, claims, embedded=embedded, with_data=False)
        )["REPRODUCING.md"]
        for embedded in (False, True)
    ]
    assert b"image.tar.zst" not in guides[0]
    assert b"image.tar.zst" in guides[1]
    for guide in guides:
        assert hashlib.sha256(claims.document()).hexdigest() in guide.decode()


def test_another_machine_changes_what_is_said_of_it_and_no_job_and_guide():
    lock, claims, observed = documents(genuine.training())
    other = observed.fingerprint.model_copy(update={"os": OperatingSystem(id="ubuntu")})
    elsewhere = observed.model_copy(update={"fingerprint": other})
    kinds = genuine.training().facts
    here, there = (derived_members(lock, claims, each, kinds) for each in (observed, elsewhere))
    differing = {path for path in here if here[path] != there[path]}
    assert "machine/sbom.cdx.json" in differing
    assert not differing & {"spec/job.json", "REPRODUCING.md", "image/seccomp.json"}
