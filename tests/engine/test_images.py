"""Which images of an engine are Capsule's, what their removal frees, and that used ones stay."""

from unittest.mock import Mock

import pytest
from docker.errors import NotFound

from capsule.engine.images import LABELS, EngineImages
from capsule.image.assembly.assemble import archive_chunks
from tests.engine.conftest import remove_images

pytestmark = pytest.mark.engine
NAME = "localhost/capsule/test:{}"


@pytest.fixture
def load(engine, make_image):
    """Return a function that loads an image, and returns its id in the engine."""

    def load_image(text, *, reference=None, labels=LABELS, author="capsule test"):
        image = make_image(text, reference, labels, author)
        engine._client.images.load(archive_chunks(image))
        return engine._find(image).id

    yield load_image
    remove_images(engine)  # one would keep the layers of the next test's


def found(engine):
    return {image.id: image for image in EngineImages(engine._client).found}


def test_images_of_capsule_are_found_with_and_without_a_name(engine, load):
    named, unnamed = load("named", reference=NAME.format("prune-1")), load("unnamed")
    images = found(engine)
    assert images[named].names == (NAME.format("prune-1"),)
    assert images[unnamed].names == ()
    assert not images[named].used
    assert len(images[named].layers) == 2


def test_other_images_are_not_capsules(engine, load):
    others = [
        load("labels", labels=LABELS[:2]),
        load("author", author="RUN something"),
        load("name", reference="localhost/mine:prune"),
    ]
    assert not found(engine).keys() & set(others)


def test_an_image_that_is_removed_meanwhile_is_not_found():
    client = Mock(
        **{"api.containers.return_value": [], "api.history.side_effect": NotFound("gone")}
    )
    client.version.return_value = {"Version": "1"}
    client.api.images.return_value = [{"Id": "sha256:1"}]
    client.api.inspect_image.return_value = {
        "Id": "sha256:1",
        "Config": {"Labels": dict.fromkeys(LABELS, "")},
        "RootFS": {"Layers": []},
    }
    assert EngineImages(client).found == ()


def test_a_layer_that_another_image_has_frees_nothing(engine, load):
    one, two = load("first"), load("second")
    images = EngineImages(engine._client)
    chosen = {image.id: image for image in images.found if image.id in (one, two)}
    base, text = chosen[one].layers.values()
    assert base > text > 0
    assert images.freed([chosen[one]]) == text
    assert images.freed(chosen.values()) == base + 2 * list(chosen[two].layers.values())[1] + (
        text - list(chosen[two].layers.values())[1]
    )


def test_removal_leaves_an_image_that_a_container_has(engine, load):
    identity = load("used", reference=NAME.format("prune-2"))
    images = EngineImages(engine._client)
    (image,) = (each for each in images.removable() if each.id == identity)
    container = engine._client.containers.create(identity, entrypoint=["true"], command=[])
    try:
        assert found(engine)[identity].used
        assert not images.remove(image)
        assert identity in found(engine)
    finally:
        container.remove(force=True)
    assert images.remove(image)
    assert identity not in found(engine)
    assert images.remove(image)  # another process was faster
