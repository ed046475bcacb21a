"""Package URLs are those that the reference library writes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packageurl import PackageURL

from capsule.bundle.package_urls import debian_purl, package_url, wheel_purl
from tests.bundle.locks import debian, wheel


def test_the_form_of_a_wheel():
    found = wheel_purl(wheel("ale-py", "0.12.1+cpu"))
    assert found == "pkg:pypi/ale-py@0.12.1%2Bcpu?file_name=ale_py-0.12.1%2Bcpu-py3-none-any.whl"


def test_the_form_of_a_debian_package():
    found = debian_purl(debian("libstdc++6", "1:12.2~rc1-1", "all"), "debian-13")
    assert found == "pkg:deb/debian/libstdc%2B%2B6@1:12.2~rc1-1?arch=all&distro=debian-13"
    found = debian_purl(debian("tzdata", "2024a-2ubuntu1", "all"), "ubuntu-24.04")
    assert found == "pkg:deb/ubuntu/tzdata@2024a-2ubuntu1?arch=all&distro=ubuntu-24.04"


@settings(max_examples=30)
@given(
    name=st.from_regex(r"[a-z0-9]{1,6}(-[a-z0-9]{1,6}){0,2}", fullmatch=True),
    version=st.from_regex(r"([0-9]!)?[0-9]+(\.[0-9]+)*(rc1)?(\+[a-z0-9.]{1,8})?", fullmatch=True),
)
def test_wheels_have_the_urls_of_the_reference_library(name, version):
    locked = wheel(name, version)
    expected = PackageURL("pypi", None, name, version, {"file_name": locked.filename})
    assert wheel_purl(locked) == expected.to_string()
    assert PackageURL.from_string(wheel_purl(locked)) == expected


@settings(max_examples=30)
@given(
    name=st.from_regex(r"[a-z0-9][a-z0-9+.-]{1,20}", fullmatch=True),
    version=st.from_regex(r"([0-9]:)?[0-9][A-Za-z0-9.+~-]{0,20}", fullmatch=True),
    architecture=st.sampled_from(["amd64", "all"]),
)
def test_debian_packages_have_the_urls_of_the_reference_library(name, version, architecture):
    locked = debian(name, version, architecture)
    qualifiers = {"arch": architecture, "distro": "debian-12"}
    expected = PackageURL("deb", "debian", name, version, qualifiers)
    assert debian_purl(locked, "debian-12") == expected.to_string()
    assert PackageURL.from_string(debian_purl(locked, "debian-12")) == expected


@settings(max_examples=30)
@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.just("x"), min_size=1))
def test_qualifiers_are_in_the_order_of_their_names(qualifiers):
    _, _, written = package_url("generic", "a", "1", **qualifiers).partition("?")
    assert [pair.partition("=")[0] for pair in written.split("&")] == sorted(qualifiers)


@pytest.mark.parametrize("character", "@?#%&= +/é")
def test_no_character_of_a_name_or_a_value_ends_it(character):
    text = f"a{character}b"
    parsed = PackageURL.from_string(package_url("generic", text, text, key=text))
    assert (parsed.name, parsed.version, parsed.qualifiers) == (text, text, {"key": text})
