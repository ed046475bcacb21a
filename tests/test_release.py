"""``scripts/release.sh`` refuses what is no release, before it builds anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.image.code import training_code_digest
from capsule.image.releases import Releases, base_inputs
from scripts import record_release

ROOT = Path(__file__).parents[1]
NOTHING = Releases(code={}, recipes={}, bases={})


@pytest.fixture
def checkout(tmp_path):
    """A clone of the committed files, and of what belongs to the release script."""
    folder = tmp_path / "clone"
    # Without tags: a checkout of a release has its tag, which the script would find first.
    clone = ["git", "clone", "-q", "--depth=1", "--no-tags", f"file://{ROOT}", folder]
    subprocess.run(clone, check=True)
    return folder


def release(folder, *arguments):
    done = subprocess.run(
        ["bash", "scripts/release.sh", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


def commit(folder):
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    subprocess.run(["git", *who, "commit", "-qm", "changed"], cwd=folder, check=True)


@pytest.mark.slow
def test_a_tree_with_changes_is_not_released(checkout):
    (checkout / "more").write_text("")
    status, errors = release(checkout, "release", "out", "key")
    assert (status, "the tree has changes" in errors) == (1, True)


@pytest.mark.slow
def test_a_version_without_a_section_is_not_released(checkout):
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    commit(checkout)
    status, errors = release(checkout, "release", "out", "key")
    assert (status, "has no section" in errors) == (1, True)


@pytest.mark.slow
def test_a_commit_without_its_tag_is_not_signed(checkout):
    status, errors = release(checkout, "sign", "out", "key")
    assert (status, "does not exist, or is of another commit" in errors) == (1, True)


@pytest.mark.slow
def test_a_tag_is_released_once(checkout):
    version = (checkout / "capsule/__init__.py").read_text().split('"')[-2]
    subprocess.run(["git", "tag", f"v{version}"], cwd=checkout, check=True)
    status, errors = release(checkout, "release", "out", "key")
    assert (status, f"the tag v{version} exists" in errors) == (1, True)


@pytest.mark.slow
def test_what_is_missing_is_said(checkout):
    assert "usage" in release(checkout)[1]
    assert "usage" in release(checkout, "release", "out")[1]
    assert not (checkout / "out").exists()


def test_a_release_lists_its_code_recipes_and_base_layers():
    from capsule import __version__
    from capsule.image.assembly.making import ASSEMBLER_VERSION
    from capsule.image.distribution import DEBIAN_12
    from capsule.image.recipe import load_recipe
    from capsule.image.resolution.debian import shipped_base

    found = record_release.with_this_version(NOTHING)
    assert found.code == {training_code_digest(): __version__}
    cpu = load_recipe("cpu", "debian-12")
    assert found.recipes[cpu.digest()] == cpu
    shipped = shipped_base(DEBIAN_12)
    packages = [package for package in shipped.packages if package.name in cpu.debian]
    inputs = base_inputs(ASSEMBLER_VERSION, cpu.digest(), packages)
    assert found.bases[inputs] == shipped.layers["cpu"]
    assert record_release.with_this_version(found) == found


def test_a_version_is_released_once():
    from capsule import __version__

    with pytest.raises(SystemExit, match="other training code"):
        record_release.with_this_version(
            NOTHING.model_copy(update={"code": {"0" * 64: __version__}})
        )
