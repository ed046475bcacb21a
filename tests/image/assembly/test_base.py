"""The base layer: what a lock says of it, what Capsule ships, and what the packages make."""

from __future__ import annotations

import pytest

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import LockedImage
from capsule.experiment.spec import SourcesSpec
from capsule.image.assembly.assemble import assemble
from capsule.image.assembly.base import is_genuine, locked_base, make_base, shipped_layer
from capsule.image.assembly.making import ASSEMBLER_VERSION
from capsule.image.cache import Cache
from capsule.image.recipe import load_recipe
from capsule.image.resolution.debian import shipped_base, shipped_layers
from capsule.image.resolution.fetch import fetch_debian
from tests.image.conftest import Member, build_deb

NOWHERE = SourcesSpec(debian=("file:/nonexistent/debian/",))
RECIPES = ("cpu", "cuda")


def ignore(_):
    pass


def shipped_image(recipe="cpu", **changes):
    packages = [each for each in shipped_base() if each.name in load_recipe(recipe).debian]
    facts = {
        "assembler": ASSEMBLER_VERSION,
        "recipe": recipe,
        "recipe_sha256": load_recipe(recipe).digest(),
        "debian": tuple(packages),
        "base": shipped_layers()[recipe],
        "wheels": (),
        "code": {"version": "0", "sha256": "0" * 64},
    }
    return LockedImage(**facts | changes)


@pytest.mark.network
def test_the_shipped_digests_are_those_of_the_layers_that_the_packages_make(tmp_path):
    """If this fails after a change of a recipe or of the rules: python scripts/base_lock.py."""
    cache, usual = Cache(tmp_path), Cache()
    for package in shipped_base():
        if usual.has(package.sha256):
            cache.add(usual.path(package.sha256), package.sha256)
    if missing := [each for each in shipped_base() if not cache.has(each.sha256)]:
        fetch_debian(missing, cache, SourcesSpec(), ignore)
    assert set(shipped_layers()) == set(RECIPES)
    for name in RECIPES:
        layer = make_base(shipped_image(name).debian, load_recipe(name), cache, ignore)
        assert layer.diff_id == f"sha256:{shipped_layers()[name]}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_locking_the_shipped_packages_needs_none_of_them(tmp_path, recipe):
    image = shipped_image(recipe)
    found = locked_base(image.debian, load_recipe(recipe), Cache(tmp_path), NOWHERE, ignore)
    assert found == image.base
    assert list(tmp_path.iterdir()) == []


def test_locking_any_other_package_makes_the_layer_once(tiny):
    lock, told = tiny.lock(), []
    arguments = (lock.image.debian, load_recipe("cpu"), tiny.cache, NOWHERE, told.append)
    assert locked_base(*arguments) == lock.image.base
    assert told == ["assembling layer base"]
    assert locked_base(*arguments) == lock.image.base
    assert len(told) == 1


def test_shipped_digests_say_nothing_about_other_packages():
    recipe, packages = load_recipe("cpu"), shipped_base()
    assert shipped_layer(packages, recipe) == shipped_layers()["cpu"]
    assert shipped_layer(reversed(packages), recipe) == shipped_layers()["cpu"]
    assert shipped_layer(packages[1:], recipe) is None
    older = packages[0].model_copy(update={"version": "1"})
    assert shipped_layer([older, *packages[1:]], recipe) is None
    extra = packages[0].model_copy(update={"name": "extra"})
    assert shipped_layer([*packages, extra], recipe) is None


def test_a_false_digest_for_the_shipped_packages_is_known_without_making_the_layer():
    assert is_genuine(shipped_image())
    assert not is_genuine(shipped_image(debian=shipped_base()[1:], base="0" * 64))
    with pytest.raises(CapsuleError, match="CAP-I113") as refusal:
        is_genuine(shipped_image(base="0" * 64))
    assert refusal.value.exit_code == ExitCode.TAMPERED
    # Of images by other rules this Capsule ships no digest.
    assert not is_genuine(shipped_image(base="0" * 64, assembler=ASSEMBLER_VERSION - 1))


def test_an_image_on_another_base_than_the_locked_one_is_never_made(tiny, tmp_path):
    honest = tiny.assemble()
    tiny.base = "0" * 64
    with pytest.raises(CapsuleError, match="CAP-I113") as refusal:
        tiny.assemble()
    assert refusal.value.exit_code == ExitCode.TAMPERED
    assert honest.layers[0].diff_id.removeprefix("sha256:") in refusal.value.message


def test_a_supplied_base_is_accepted_only_as_the_locked_one(tiny):
    """Both layers are canonical; the lock says which of them is meant."""
    honest = tiny.assemble()
    supplied = {"base": honest.layers[0].path, "code": tiny.code_layer}
    assert assemble(tiny.lock(), tiny.cache, supplied=supplied, progress=ignore) == honest
    evil = [*tiny.debs, build_deb([Member("./usr/lib/python3/zz.pth", b"import zz")], name="tiny1")]
    tiny.debs, debs = evil, tiny.debs
    other = tiny.assemble().layers[0].path
    tiny.debs = debs
    with pytest.raises(CapsuleError, match="CAP-I110"):
        assemble(tiny.lock(), tiny.cache, supplied=supplied | {"base": other}, progress=ignore)
