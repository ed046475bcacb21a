"""What released versions shipped is known as Capsule's own."""

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.image import releases as module
from capsule.image.assembly import base
from capsule.image.assembly.assemble import assemble
from capsule.image.assembly.base import is_genuine
from capsule.image.assembly.making import ASSEMBLER_VERSION
from capsule.image.recipe import load_recipe
from capsule.image.releases import Releases, base_inputs, recipe_of, release_of, releases


@pytest.fixture
def released(monkeypatch):
    """Have other things been released."""

    def work(**fields):
        found = Releases(**{"code": {}, "recipes": {}, "bases": {}, **fields})
        for name in (module, base):
            monkeypatch.setattr(name, "releases", lambda: found)

    return work


def test_the_file_is_one_and_lists_recipes_by_their_digests():
    for digest, recipe in releases().recipes.items():
        assert recipe.digest() == digest


def test_a_release_is_known_by_the_digest_of_its_code_alone(released):
    released(code={"1" * 64: "0.0.9"})
    assert (release_of("1" * 64), release_of("2" * 64)) == ("0.0.9", None)


def test_an_image_of_a_released_recipe_is_assembled_by_that_recipe(tiny, released):
    own = load_recipe("cpu", "debian-12")
    older = own.model_copy(update={"environment": {**own.environment, "OF_OLD": "yes"}})
    image = tiny.lock().image.model_copy(update={"recipe_sha256": older.digest()})
    lock = tiny.lock().model_copy(update={"image": image})
    with pytest.raises(CapsuleError, match="CAP-I102"):
        assemble(lock, tiny.cache, supplied={"code": tiny.code_layer}, progress=id)
    released(recipes={older.digest(): older})
    assert recipe_of(lock) == older
    made = assemble(lock, tiny.cache, supplied={"code": tiny.code_layer}, progress=id)
    assert b"OF_OLD=yes" in made.config
    assert b"OF_OLD" not in tiny.assemble().config
    cuda = lock.model_copy(update={"image": image.model_copy(update={"recipe": "cuda"})})
    assert recipe_of(cuda) is None  # of that digest, but of another name


def test_a_base_layer_is_genuine_if_a_release_shipped_it_for_these_packages(tiny, released):
    lock = tiny.lock()
    image = lock.image

    def changed(**fields):
        return lock.model_copy(update={"image": image.model_copy(update=fields)})

    assert not is_genuine(lock)
    inputs = base_inputs(ASSEMBLER_VERSION, image.recipe_sha256, image.debian)
    released(bases={inputs: image.base})
    assert is_genuine(lock)
    with pytest.raises(CapsuleError, match="CAP-I113"):
        is_genuine(changed(base="0" * 64))
    assert not is_genuine(changed(debian=()))
    assert not is_genuine(changed(assembler=ASSEMBLER_VERSION + 1))


def test_everything_that_a_base_layer_is_made_of_counts(tiny):
    (package,) = tiny.lock().image.debian
    inputs = {
        base_inputs(*each)
        for each in (
            (3, "0" * 64, [package]),
            (4, "0" * 64, [package]),
            (3, "1" * 64, [package]),
            (3, "0" * 64, []),
            (3, "0" * 64, [package.model_copy(update={"sha256": "2" * 64})]),
        )
    }
    assert len(inputs) == 5
