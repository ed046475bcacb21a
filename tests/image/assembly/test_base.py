"""The base layer: what a lock says of it, what Capsule ships, and what the packages make."""

from __future__ import annotations

import pytest

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock, LockedImage
from capsule.experiment.spec import SourcesSpec
from capsule.host.spec_file import parse_spec
from capsule.image.assembly.assemble import assemble
from capsule.image.assembly.base import is_genuine, locked_base, make_base, shipped_layer
from capsule.image.assembly.making import ASSEMBLER_VERSION
from capsule.image.cache import Cache
from capsule.image.distribution import DEBIAN_12, DISTRIBUTIONS
from capsule.image.recipe import load_recipe
from capsule.image.releases import recipe_of as recipe_named
from capsule.image.resolution.debian import shipped_base
from capsule.image.resolution.fetch import fetch_debian
from tests.image.conftest import Member, build_deb

NOWHERE = SourcesSpec(debian=("file:/nonexistent/debian/",))
RECIPES = ("cpu", "cuda")


def ignore(_):
    pass


def recipe_of(name="cpu", distribution=DEBIAN_12):
    return load_recipe(name, distribution.name)


def spec_on(distribution):
    text = f"name: a\nimage: {{base: {distribution.name}}}\ntrainer: {{command: [a]}}\n"
    return parse_spec(f"schema: capsule/spec/v1\ncode: {{}}\n{text}".encode(), "a.yaml")


def shipped_lock(name="cpu", distribution=DEBIAN_12, **changes):
    recipe, shipped = recipe_of(name, distribution), shipped_base(distribution)
    facts = {
        "assembler": ASSEMBLER_VERSION,
        "recipe": name,
        "recipe_sha256": recipe.digest(),
        "debian": tuple(each for each in shipped.packages if each.name in recipe.debian),
        "base": shipped.layers[name],
        "wheels": (),
        "code": {"version": "0", "sha256": "0" * 64},
    }
    spec = spec_on(distribution)
    return Lock.model_construct(spec=spec, image=LockedImage(**facts | changes))


@pytest.mark.network
@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=lambda each: each.name)
def test_the_shipped_digests_are_those_of_the_layers_that_the_packages_make(tmp_path, distribution):
    """If this fails after a change of a recipe or of the rules: python scripts/base_lock.py."""
    cache, usual, shipped = Cache(tmp_path), Cache(), shipped_base(distribution)
    for package in shipped.packages:
        if usual.has(package.sha256):
            cache.add(usual.path(package.sha256), package.sha256)
    fetch_debian(distribution.vendor, shipped.packages, cache, SourcesSpec(), ignore)
    assert set(shipped.layers) == set(RECIPES)
    for name in RECIPES:
        debian = shipped_lock(name, distribution).image.debian
        layer = make_base(debian, recipe_of(name, distribution), cache, ignore)
        assert layer.diff_id == f"sha256:{shipped.layers[name]}"


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=lambda each: each.name)
@pytest.mark.parametrize("name", RECIPES)
def test_locking_the_shipped_packages_needs_none_of_them(tmp_path, name, distribution):
    image, recipe = shipped_lock(name, distribution).image, recipe_of(name, distribution)
    found = locked_base(image.debian, recipe, Cache(tmp_path), NOWHERE, ignore)
    assert found == image.base
    assert list(tmp_path.iterdir()) == []


def test_locking_any_other_package_makes_the_layer_once(tiny):
    lock, told = tiny.lock(), []
    arguments = (lock.image.debian, recipe_of(), tiny.cache, NOWHERE, told.append)
    assert locked_base(*arguments) == lock.image.base
    assert told == ["assembling layer base"]
    assert locked_base(*arguments) == lock.image.base
    assert len(told) == 1


def test_shipped_digests_say_nothing_about_other_packages():
    recipe, packages = recipe_of(), shipped_base(DEBIAN_12).packages
    ours = shipped_base(DEBIAN_12).layers["cpu"]
    assert shipped_layer(packages, recipe) == ours
    assert shipped_layer(reversed(packages), recipe) == ours
    assert shipped_layer(packages[1:], recipe) is None
    older = packages[0].model_copy(update={"version": "1"})
    assert shipped_layer([older, *packages[1:]], recipe) is None
    extra = packages[0].model_copy(update={"name": "extra"})
    assert shipped_layer([*packages, extra], recipe) is None


def test_a_false_digest_for_the_shipped_packages_is_known_without_making_the_layer():
    assert is_genuine(shipped_lock())
    assert not is_genuine(shipped_lock(debian=shipped_base(DEBIAN_12).packages[1:], base="0" * 64))
    with pytest.raises(CapsuleError, match="CAP-I113") as refusal:
        is_genuine(shipped_lock(base="0" * 64))
    assert refusal.value.exit_code == ExitCode.TAMPERED
    # Of images by other rules this Capsule ships no digest.
    assert not is_genuine(shipped_lock(base="0" * 64, assembler=ASSEMBLER_VERSION - 1))


def test_a_lock_of_one_distribution_with_the_recipe_of_another_names_no_recipe():
    lock = shipped_lock()
    spec = spec_on(DISTRIBUTIONS["debian-13"])
    assert recipe_named(lock) == recipe_of()
    assert recipe_named(lock.model_copy(update={"spec": spec})) is None


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
