"""Licences: read from wheels and Debian packages, and never guessed."""

import zipfile

import pytest
from cyclonedx.spdx import is_expression
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.bundle.licences import (
    collect_licences,
    debian_choice,
    expression_choice,
    is_spdx,
)
from capsule.bundle.package_urls import debian_purl, wheel_purl
from capsule.bundle.sbom import image_sbom
from capsule.bundle.sbom_checks import sbom_matches_lock, validate_sbom
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode
from tests.bundle.locks import debian, make_lock, wheel

DIGEST = "sha256:" + sha256_hex(b"image")
NO_WHEELS = {}.__getitem__
MIT = "License :: OSI Approved :: MIT License"
BSD = "License :: OSI Approved :: BSD License"


@pytest.mark.parametrize(
    ("headers", "licence"),
    [
        (["License-Expression: Apache-2.0 OR MIT"], "Apache-2.0 OR MIT"),
        (["License-Expression: LicenseRef-NVIDIA-Proprietary"], "LicenseRef-NVIDIA-Proprietary"),
        (["License-Expression: MIT", "License: GPL-3.0-only"], "MIT"),
        (["License: BSD-3-Clause", f"Classifier: {BSD}"], "BSD-3-Clause"),
        (["License: GPL"], None),
        (["License: UNKNOWN", f"Classifier: {MIT}"], "MIT"),
        ([f"Classifier: {MIT}", "Classifier: Programming Language :: Python :: 3"], "MIT"),
        ([f"Classifier: {BSD}"], None),
        ([f"Classifier: {MIT}", f"Classifier: {BSD}"], None),
        (["Classifier: License :: OSI Approved :: Apache Software License"], None),
        ([], None),
    ],
)
def test_licences_are_read_and_never_guessed(tmp_path, headers, licence):
    path = tmp_path / "wheel"
    metadata = "\n".join(["Metadata-Version: 2.4", "Name: ale-py", "Version: 0.12.1", *headers])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vendored/MIT-1.0.dist-info/METADATA", "License-Expression: ISC\n")
        archive.writestr("ALE.Py-0.12.1.dist-info/METADATA", metadata + "\n\nA description.\n")
    lock = make_lock(wheels=(wheel("ale-py", "0.12.1"),))
    found = collect_licences(lock, {wheel("ale-py", "0.12.1"): path}.__getitem__, None)
    purl = wheel_purl(wheel("ale-py", "0.12.1"))
    assert found == ({} if licence is None else {purl: expression_choice(licence)})
    validate_sbom(image_sbom(lock, DIGEST, found))


@pytest.mark.parametrize("content", [b"not a zip", None])
def test_an_unreadable_wheel_is_refused(tmp_path, content):
    path = tmp_path / "wheel"
    if content is None:
        zipfile.ZipFile(path, "w").close()
    else:
        path.write_bytes(content)
    for place in (path, tmp_path / "missing"):
        with pytest.raises(CapsuleError) as caught:
            collect_licences(
                make_lock(wheels=(wheel("ale-py"),)), lambda _, place=place: place, None
            )
        assert (caught.value.code, caught.value.exit_code) == ("CAP-B061", ExitCode.BUILD_FAILED)
        assert "ale_py-1.0-py3-none-any.whl" in caught.value.message


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("MIT", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("(MIT OR Apache-2.0) AND BSD-3-Clause", True),
        ("MIT AND LicenseRef-Own-1", True),
        ("mit", False),
        ("GPL", False),
        ("", False),
        ("()", False),
        ("AND", False),
        ("MIT OR", False),
        ("MIT MIT", False),
        ("MIT AND ", False),
        ("BSD License", False),
        ("LicenseRef-", False),
    ],
)
def test_spdx_expressions(text, sound):
    assert is_spdx(text) is sound


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(["MIT", "ISC", "AND", "OR", "WITH", "(", ")", "LicenseRef-x", "GPL", "é"])
    ).map(" ".join)
)
def test_no_text_breaks_the_check_of_expressions(text):
    if is_spdx(text):
        assert is_expression(text.replace("LicenseRef-x", "MIT"))


def test_a_licence_that_is_none_is_refused():
    with pytest.raises(CapsuleError) as caught:
        expression_choice("BSD License")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B060", ExitCode.USAGE)
    assert "'BSD License'" in caught.value.message


def test_debian_names_of_one_licence_become_its_identifier_once():
    assert debian_choice(("GPL-2+ or Artistic", "expat", "Expat")) == [
        {"license": {"name": "GPL-2+ or Artistic", "acknowledgement": "declared"}},
        {"license": {"id": "MIT", "acknowledgement": "declared"}},
    ]


def test_debian_licences_come_from_the_base_layer(base_layer):
    silent = ("bash", "loop", "away", "missing")
    asserted = ("gcc-12-base", "libgcc-s1", "libstdc++6")
    lock = make_lock(packages=tuple(debian(name, "1") for name in (*asserted, *silent)))
    found = collect_licences(lock, NO_WHEELS, base_layer)
    choice = debian_choice(("GPL-2+ or Artistic", "expat"))
    assert found == {debian_purl(debian(name, "1"), "debian-12"): choice for name in asserted}
    data = image_sbom(lock, DIGEST, found)
    validate_sbom(data)
    assert sbom_matches_lock(data, lock, DIGEST) == []
    assert collect_licences(lock, NO_WHEELS, None) == {}
