"""What follows from the choice of a distribution, against the libraries that installers use."""

import pytest
from packaging.markers import default_environment
from packaging.tags import parse_tag

from capsule.experiment.errors import CapsuleError
from capsule.host.spec_file import parse_spec
from capsule.image.distribution import (
    DEBIAN_12,
    DEBIAN_13,
    DISTRIBUTIONS,
    UBUNTU_24_04,
    distribution_of,
    supported_tags,
)

EACH = pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=lambda each: each.name)


def parse(image):
    text = (
        f"schema: capsule/spec/v1\nname: a\nimage: {image}\ncode: {{}}\ntrainer: {{command: [a]}}\n"
    )
    return parse_spec(text.encode(), "a.yaml")


@EACH
def test_python_follows_from_the_base(distribution):
    for image in (
        f"{{base: {distribution.name}}}",
        f"{{base: {distribution.name}, python: '{distribution.python}'}}",
    ):
        assert parse(image).image.python == distribution.python
        assert distribution_of(parse(image).image) == distribution


def test_a_base_has_one_python():
    with pytest.raises(CapsuleError) as caught:
        parse("{base: debian-13, python: '3.11'}")
    assert (
        "image.python must be '3.13', the version of image.base 'debian-13'" in caught.value.message
    )
    assert caught.value.fix == "Change image.python or image.base."


def test_the_default_is_what_it_was():
    assert distribution_of(parse("{}").image) == DEBIAN_12


@EACH
def test_wheels_of_its_python_and_of_older_c_libraries_fit(distribution):
    tags, abi = set(supported_tags(distribution)), distribution.abi
    fitting = (
        f"{abi}-{abi}-manylinux_2_28_x86_64",
        f"{abi}-{abi}-manylinux_2_17_x86_64.manylinux2014_x86_64",
        "cp38-abi3-manylinux2010_x86_64",
        "py3-none-manylinux1_x86_64",
        "py3-none-any",
    )
    for name in fitting:
        assert parse_tag(name) & tags, name
    for name in ("cp310-cp310-manylinux_2_28_x86_64", f"{abi}-{abi}-musllinux_1_2_x86_64"):
        assert not parse_tag(name) & tags, name


def test_what_a_newer_c_library_takes_an_older_one_does_not():
    newer = parse_tag("py3-none-manylinux_2_39_x86_64")
    assert newer & set(supported_tags(DEBIAN_13))
    assert newer & set(supported_tags(UBUNTU_24_04))
    assert not newer & set(supported_tags(DEBIAN_12))


@EACH
def test_markers_have_every_variable_of_the_specification(distribution):
    assert distribution.markers.keys() == default_environment().keys()
    assert distribution.markers["python_version"] == distribution.python
