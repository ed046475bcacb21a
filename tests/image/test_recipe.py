import pytest

from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.errors import CapsuleError
from capsule.image.assembly.assemble import TASK_USER
from capsule.image.distribution import DISTRIBUTIONS
from capsule.image.recipe import Recipe, data_file, load_recipe

BASE = "debian-12"


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=lambda each: each.name)
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_recipes_that_come_with_capsule(name, distribution):
    recipe = load_recipe(name, distribution.name)
    assert (recipe.name, recipe.base) == (name, distribution.name)
    assert list(recipe.debian) == sorted(set(recipe.debian))
    assert {"libc6"} | distribution.python_packages <= set(recipe.debian)
    assert recipe.environment["HOME"] == "/tmp"  # noqa: S108
    assert f"capsule:x:{TASK_USER}:{TASK_USER}:" in recipe.files["/etc/passwd"]


def test_recipes_differ_only_where_they_must():
    cpu, cuda = load_recipe("cpu", BASE), load_recipe("cuda", BASE)
    assert cuda.prune["*"] == (*cpu.prune["*"], "nvidia/*/include/*")
    assert cuda.model_copy(update={"name": "cpu", "prune": cpu.prune}) == cpu
    assert cpu.digest() != cuda.digest()


def test_digest_covers_every_field():
    recipe = load_recipe("cpu", BASE)
    assert recipe.digest() == sha256_hex(recipe.document())
    for change in (
        {"debian": recipe.debian[1:]},
        {"packages": ()},
        {"prune": {}},
        {"environment": {}},
        {"files": {}},
    ):
        assert recipe.model_copy(update=change).digest() != recipe.digest()


def test_patterns_for_all_come_before_a_distribution_s_own():
    recipe = load_recipe("cpu", BASE).model_copy(update={"prune": {"*": ("a",), "torch": ("b",)}})
    assert recipe.prune_patterns("torch") == ("a", "b")
    assert recipe.prune_patterns("numpy") == ("a",)


@pytest.mark.parametrize("path", ["etc/x", "/etc/x y", "/", "/etc//x"])
def test_files_need_plain_absolute_paths(path):
    document = load_recipe("cpu", BASE).model_dump(mode="json") | {"files": {path: ""}}
    with pytest.raises(ValueError, match="files"):
        Recipe.model_validate_json(canonical_json(document))


def test_unknown_recipe():
    with pytest.raises(CapsuleError, match="CAP-I101 recipe 'tpu'"):
        load_recipe("tpu", BASE)
    with pytest.raises(CapsuleError, match="on 'debian-9'"):
        load_recipe("cpu", "debian-9")


def test_data_files_are_found():
    assert data_file("specs", "dqn-breakout.yaml").is_file()
    assert not data_file("images", "none.yaml").exists()
