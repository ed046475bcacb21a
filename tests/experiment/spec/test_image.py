"""The sections ``image`` and ``code``: bases and their Python, names of packages, patterns."""

import json

import pytest
from packaging.requirements import Requirement
from pydantic import ValidationError

from capsule.experiment.spec import CodeSpec, ImageSpec, SourcesSpec
from capsule.experiment.spec.image import PYTHON


def image(**fields):
    return ImageSpec.model_validate_json(json.dumps(fields))


def refusal(model, **fields):
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps(fields))
    return str(caught.value)


@pytest.mark.parametrize(
    ("base", "python"),
    [("debian-12", "3.11"), ("debian-13", "3.13"), ("ubuntu-24.04", "3.12")],
)
def test_the_python_is_that_of_the_base(base, python):
    """Bookworm has Python 3.11, trixie 3.13 (packages.debian.org), noble 3.12."""
    assert image(base=base).python == image(base=base, python=python).python == python
    assert image(base=base).document() == image(base=base, python=python).document()


@pytest.mark.parametrize(("base", "python"), [("debian-12", "3.13"), ("debian-13", "3.11")])
def test_another_python_is_rejected_with_that_of_the_base(base, python):
    message = refusal(ImageSpec, base=base, python=python)
    assert f"image.python must be '{PYTHON[base]}', the version of image.base '{base}'" in message


def test_the_default_base_is_the_first_one():
    assert (image().base, image().python) == ("debian-12", "3.11")
    assert image(python="3.11") == image()
    assert "image.python must be '3.11'" in refusal(ImageSpec, python="3.13")


@pytest.mark.parametrize("base", ["ubuntu", "Debian-12", "", None])
def test_a_base_without_a_recipe_is_rejected(base):
    assert "\nbase\n  Input should be 'debian-12', 'debian-13' or 'ubuntu-24.04'" in refusal(
        ImageSpec, base=base
    )


def test_an_image_is_read_back_with_its_python():
    for base in PYTHON:
        stored = image(base=base, packages=["torch==2.13.0"], debian=["git"])
        assert ImageSpec.parse(stored.document()) == stored


def test_the_default_packages_are_pinned_to_one_version_each():
    wanted = [Requirement(each) for each in image().packages]
    assert len({each.name for each in wanted}) == len(wanted)
    for each in wanted:
        (specifier,) = each.specifier
        assert specifier.operator == "=="
        assert "*" not in specifier.version


@pytest.mark.parametrize(
    "package", ["numpy", "ray[client]>=2.60", "a-b_c.d", "x @ https://example.org/x.whl", "x; y"]
)
def test_packages_begin_with_a_name(package):
    assert image(packages=[package]).packages == (package,)


@pytest.mark.parametrize("package", ["", "-r file", "--index-url=x", " numpy", "./wheel", "\nx"])
def test_what_an_installer_would_take_for_an_option_or_a_path_is_rejected(package):
    assert "packages.0" in refusal(ImageSpec, packages=[package])


@pytest.mark.parametrize("name", ["libstdc++6", "g++", "git", "0ad", "python3.11"])
def test_names_of_debian_packages(name):
    """Debian Policy 5.6.1: two characters or more, lower-case, begins with an alphanumeric one."""
    assert image(debian=[name]).debian == (name,)


@pytest.mark.parametrize("name", ["", "g", "Git", "-git", "git=1.0", "git/stable", "a_b", "git\n"])
def test_what_is_no_name_of_a_debian_package_is_rejected(name):
    assert "debian.0" in refusal(ImageSpec, debian=[name])


def test_sources_have_defaults_and_known_keys_only():
    assert image().sources == SourcesSpec()
    assert SourcesSpec() == SourcesSpec(index=None, extra_indexes=(), find_links=(), debian=())
    assert "sources.mirror" in refusal(ImageSpec, sources={"mirror": "x"})


# ---- code ----


def test_code_is_the_whole_folder_of_the_spec_by_default():
    assert CodeSpec() == CodeSpec(path=".", files=("*",))


@pytest.mark.parametrize("files", [["*"], ["*", "!data/*"], ["src/*.py"], ["!*", "a!b"]])
def test_patterns_of_files(files):
    assert CodeSpec.model_validate_json(json.dumps({"files": files})).files == tuple(files)


@pytest.mark.parametrize("files", [[], [""], ["!"], ["!!a"], ["*", ""]])
def test_patterns_that_choose_nothing_are_rejected(files):
    assert "files" in refusal(CodeSpec, files=files)
