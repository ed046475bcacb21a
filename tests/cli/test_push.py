"""``capsule push``: the image of a spec, a lock or a bundle in a registry of this machine."""

import json
from contextlib import contextmanager

import pytest

from capsule import execution
from capsule.bundle.keys import generate
from capsule.experiment.errors import ExitCode
from capsule.export import images
from capsule.image.registry.images import pull_image
from capsule.image.registry.reference import Reference
from tests.cli.conftest import capsule
from tests.hostile import genuine


@pytest.fixture
def built(image, monkeypatch):
    """The locks whose image was built; it is the same for all of them."""
    locks = []

    def build(lock, *_, **__):
        locks.append(lock)
        return image

    monkeypatch.setattr(execution, "build_image", build)
    return locks


@pytest.mark.parametrize("source", ["cart.yaml", "cart.lock.json"])
def test_the_image_of_a_spec_or_a_lock_is_in_the_registry_afterwards(
    place, built, image, registry, tmp_path, source
):
    capsule("lock", "cart.yaml")
    done = capsule("push", source, f"{registry}/group/tiny:paper", "--json", "--quiet")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == {
        "schema": "capsule/pushed/v1",
        "image": image.config_digest,
        "manifest": image.manifest_digest,
        "reference": f"{registry}/group/tiny:paper@{image.manifest_digest}",
    }
    assert [lock.document() + b"\n" for lock in built] == [(place / "cart.lock.json").read_bytes()]
    (tmp_path / "pulled").mkdir()
    reference = Reference.parse(document["reference"])
    pulled = pull_image(reference, tmp_path / "pulled", lambda _: None)
    assert (pulled.config, pulled.manifest) == (image.config, image.manifest)


def test_without_a_tag_the_first_digits_of_the_identity_are_the_tag(place, built, image, registry):
    done = capsule("push", "cart.yaml", f"{registry}/tiny")
    tag = image.config_digest.removeprefix("sha256:")[:12]
    assert done.stdout == (
        f"image     {image.config_digest}\n"
        f"pushed    {registry}/tiny:{tag}@{image.manifest_digest}\n"
    )
    assert "pushing layer" in done.stderr


def test_a_setting_is_in_the_lock_whose_image_is_built(place, built, registry):
    assert capsule("push", "cart.yaml", f"{registry}/tiny", "--set", "seeds.root=7").exit_code == 0
    assert [lock.spec.seeds.root for lock in built] == [7]
    assert not (place / "cart.lock.json").exists()


def test_the_files_of_a_bundles_image_are_there_until_it_is_uploaded(
    bundle, image, registry, monkeypatch
):
    @contextmanager
    def of_bundle(path, *_):
        assert path == bundle
        yield image
        for layer in image.layers:
            layer.path.unlink()

    monkeypatch.setattr(images, "image_of_bundle", of_bundle)
    done = capsule("push", bundle, f"{registry}/tiny:1", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["image"] == image.config_digest


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("tiny", "CAP-I401"),
        ("example.org/Tiny", "CAP-I401"),
        (f"example.org/tiny@sha256:{'0' * 64}", "CAP-I401"),
    ],
)
def test_a_wrong_name_is_refused(place, built, name, code):
    done = capsule("push", "cart.yaml", name, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["code"]) == (2, code)
    assert name in document["message"]
    assert "REGISTRY/NAME[:TAG]" in document["fix"] or "registry.example.org" in document["fix"]


def test_a_name_that_is_none_is_refused_before_anything_is_locked(place, built):
    assert capsule("push", "cart.yaml", "tiny").exit_code == 2
    assert built == []
    assert not (place / "cart.lock.json").exists()


def test_a_bundle_by_another_signer_is_not_pushed(bundle, tmp_path):
    generate(tmp_path / "mallory")
    done = capsule("push", bundle, "localhost:1/tiny", "--key", tmp_path / "mallory.pub")
    assert (done.exit_code, "CAP-B125" in done.stderr) == (3, True)


def test_the_bundle_of_a_plain_process_has_no_image(tmp_path):
    path = genuine.packed(genuine.outside("training"), tmp_path / "plain.capsule.tar")
    done = capsule("push", path, "localhost:1/tiny", "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["code"]) == (2, "CAP-I406")
    assert document["message"].startswith("plain.capsule.tar has no image")


def test_settings_for_a_bundle_are_refused(registry):
    done = capsule("push", "run.capsule.tar", f"{registry}/tiny", "--set", "seeds.root=1")
    assert done.exit_code == ExitCode.USAGE
    assert "CAP-L003: run.capsule.tar is a bundle, whose pins cannot be changed" in done.stderr
