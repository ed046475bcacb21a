"""Licences of Debian packages, as their machine-readable copyright files declare them."""

import io
import tarfile

import pytest
from cyclonedx.spdx import is_supported_id
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.bundle.debian_copyright import (
    MAX_LINKS,
    SPDX_IDS,
    copyright_files,
    declared_licences,
)
from capsule.experiment.errors import CapsuleError
from tests.bundle.conftest import COPYRIGHT, FORMAT


def test_the_licences_of_all_files_are_read():
    assert declared_licences(COPYRIGHT) == ("GPL-2+ or Artistic", "expat")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "This package was debianized by A. Author.\n\nFiles: *\nLicense: MIT\n",
        "Format: https://example.org/1.0/\n\nFiles: *\nLicense: MIT\n",
        "Format-Specification: http://dep.debian.net/deps/dep5/\n\nFiles: *\nLicense: MIT\n",
        FORMAT,
        FORMAT + "\nFiles: *\nCopyright: nobody\n",
        FORMAT + "\nFiles: *\nLicense:\n in words\n",
        FORMAT + "\nFiles: *\nLicense: MIT\n\nFiles: b\nLicense:\n in words\n",
        FORMAT + "\nFiles: *\nLicense: MIT\nwhatever\n",
        COPYRIGHT.replace("\n", "\r\n"),
    ],
)
def test_a_copyright_file_that_is_not_machine_readable_names_no_licence(text):
    assert declared_licences(text) is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [FORMAT, "Files: *", "License: MIT", "License:", "\n", " x", "#", ":", "é", "\0"]
        )
    ).map("\n".join)
)
def test_no_text_breaks_the_reader_of_copyright_files(text):
    found = declared_licences(text)
    assert found is None or set(found) <= {"MIT"}


def test_only_names_that_mean_one_licence_become_identifiers():
    assert all(map(is_supported_id, SPDX_IDS.values()))
    assert (SPDX_IDS["gpl-2"], SPDX_IDS["gpl-2.0+"]) == ("GPL-2.0-only", "GPL-2.0-or-later")
    assert SPDX_IDS["lgpl-2.1+"] == "LGPL-2.1-or-later"
    assert not SPDX_IDS.keys() & {"mit", "bsd", "gpl", "artistic", "public-domain", "bsd-4-clause"}


@pytest.mark.parametrize(
    ("name", "identifier"),
    [
        ("apache-2.0", "Apache-2.0"),
        ("bsd-3-clause", "BSD-3-Clause"),
        ("expat", "MIT"),
        ("gpl-1+", "GPL-1.0-or-later"),
        ("gpl-3.0", "GPL-3.0-only"),
        ("lgpl-2", "LGPL-2.0-only"),
        ("lgpl-3.0+", "LGPL-3.0-or-later"),
        ("mpl-1.1", "MPL-1.1"),
        ("zlib", "Zlib"),
    ],
)
def test_short_names_mean_the_licences_of_section_7_1(name, identifier):
    assert SPDX_IDS[name] == identifier


@pytest.mark.parametrize("address", ["http://www.debian.org", "https://www.debian.org"])
@pytest.mark.parametrize("end", ["", "/"])
def test_the_format_is_recognised_by_its_address(address, end):
    header = f"Format: {address}/doc/packaging-manuals/copyright-format/1.0{end}\n"
    assert declared_licences(header + "\nFiles: *\nLicense: ISC\n") == ("ISC",)


def test_paragraphs_may_be_separated_by_lines_of_blanks():
    assert declared_licences(FORMAT + " \t\n\nFiles: *\nLicense: ISC\n \t\n") == ("ISC",)


LICENCE = st.from_regex(r"[A-Za-z][A-Za-z0-9.+ -]{0,10}[A-Za-z0-9+]", fullmatch=True)


@settings(max_examples=40)
@given(st.lists(LICENCE, min_size=1, max_size=6))
def test_each_licence_is_given_once_in_the_order_of_the_file(licences):
    paragraphs = [f"Files: {number}\nLicense: {name}\n" for number, name in enumerate(licences)]
    expected = sorted(set(licences), key=licences.index)
    assert declared_licences("\n".join([FORMAT, *paragraphs])) == tuple(expected)


def test_copyright_files_are_found_through_links(base_layer):
    names = ["libgcc-s1", "libstdc++6", "gcc-12-base", "bash", "loop", "away", "missing"]
    whole = COPYRIGHT.encode()
    assert copyright_files(base_layer, names) == {
        "libgcc-s1": whole,
        "libstdc++6": whole,
        "gcc-12-base": whole,
        "bash": b"in words, \xff",
    }
    assert copyright_files(base_layer, []) == {}


def tar_of(path, *members):
    """Write an archive with the standard library; a member is a path and a link or bytes."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize(("links", "found"), [(1, True), (MAX_LINKS, True), (MAX_LINKS + 1, False)])
def test_only_so_many_links_are_followed(tmp_path, links, found):
    doc = "usr/share/doc"
    chain = [(f"{doc}/p{number}", f"p{number + 1}") for number in range(links)]
    layer = tar_of(tmp_path / "a.tar", *chain, (f"{doc}/p{links}/copyright", b"end"))
    assert copyright_files(layer, ["p0"]) == ({"p0": b"end"} if found else {})


def test_a_folder_in_the_place_of_a_copyright_file_is_none(tmp_path):
    layer = tar_of(tmp_path / "a.tar", ("usr/share/doc/a/copyright/text", b"x"))
    assert copyright_files(layer, ["a"]) == {}


def test_a_layer_that_is_malformed_is_refused(tmp_path):
    (tmp_path / "noise.tar").write_bytes(b"noise" * 400)
    with pytest.raises(CapsuleError, match=r"noise\.tar") as caught:
        copyright_files(tmp_path / "noise.tar", ["a"])
    assert caught.value.code == "CAP-I104"
    unsafe = tar_of(tmp_path / "unsafe.tar", ("../usr/share/doc/a/copyright", b"x"))
    with pytest.raises(CapsuleError, match=r"\.\./usr/share/doc/a/copyright") as caught:
        copyright_files(unsafe, ["a"])
    assert caught.value.code == "CAP-I107"
