"""Licences: read from wheels and Debian packages, and never guessed."""

import json
import zipfile
from datetime import UTC, datetime

import pytest
from cyclonedx.spdx import is_expression, is_supported_id
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.bundle.debian_copyright import SPDX_IDS, declared_licences
from capsule.bundle.licences import (
    collect_licences,
    debian_choice,
    expression_choice,
    is_spdx,
)
from capsule.bundle.package_urls import debian_purl, wheel_purl
from capsule.bundle.packing import FinishedRun, _image_files
from capsule.bundle.run_bundle import IMAGE_SBOM
from capsule.bundle.sbom import image_sbom
from capsule.bundle.sbom_checks import sbom_matches_lock, validate_sbom
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.image.archives.layers import TarEntry, file_entry, write_tar
from capsule.image.assembly.assemble import Image
from capsule.image.assembly.making import Layer
from capsule.image.cache import Cache
from capsule.machine.fingerprint import take_fingerprint
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


# --- Debian packages ----------------------------------------------------------------------------

FORMAT = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
COPYRIGHT = (
    FORMAT
    + """\
Upstream-Name: example
License: Apache-2.0
 of the header, which is a simplification

Files: *
Copyright: 2020 A. Author
License: GPL-2+ or Artistic
 This is free software.
 .
 License: not a field, as it is indented

# A comment stands alone.
Files:
 debian/*
 old/*
Copyright: 2020 A. Author
license:  expat

Files: doc/*
Copyright: 2020 A. Author
License: GPL-2+ or Artistic

License: GPL-2+
 A text that paragraphs refer to.
"""
)


def test_the_licences_of_all_files_are_read():
    assert declared_licences(COPYRIGHT) == ("GPL-2+ or Artistic", "expat")
    assert debian_choice(("GPL-2+ or Artistic", "expat", "Expat")) == [
        {"license": {"name": "GPL-2+ or Artistic", "acknowledgement": "declared"}},
        {"license": {"id": "MIT", "acknowledgement": "declared"}},
    ]


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


@pytest.fixture
def base_layer(tmp_path):
    """A layer of packages; some share a documentation, as Debian's do, by links."""

    def link(path, target):
        return TarEntry(path, "test", "symlink", 0o777, target=target)

    entries = [
        file_entry("usr/share/doc/gcc-12-base/copyright", "test", COPYRIGHT.encode()),
        link("usr/share/doc/libstdc++6", "gcc-12-base"),
        link("usr/share/doc/libgcc-s1/copyright", "/usr/share/doc/libstdc++6/copyright"),
        file_entry("usr/share/doc/bash/copyright", "test", b"in words, \xff"),
        link("usr/share/doc/loop", "loop"),
        link("usr/share/doc/away", "../../../../etc"),
        file_entry("etc/copyright", "test", COPYRIGHT.encode()),
    ]
    path = tmp_path / "layer.tar"
    with path.open("wb") as stream:
        write_tar(entries, stream.write)
    return path


@pytest.mark.parametrize("contained", [True, False])
def test_a_bundle_names_the_debian_licences_of_its_image(base_layer, tmp_path, contained):
    lock = make_lock(packages=(debian("gcc-12-base", "1"),))
    layer = Layer("base", DIGEST, base_layer, base_layer.stat().st_size)
    code = Layer("code", DIGEST, base_layer, layer.size)
    image = Image(b"{}", DIGEST, b"{}", DIGEST, (layer, code), "capsule:test")
    run = FinishedRun(
        lock=lock,
        image=image if contained else None,
        engine={"name": "docker" if contained else "process"},
        fingerprint=take_fingerprint(None),
        started=datetime(2026, 1, 1, tzinfo=UTC),
        directory=tmp_path,
    )
    members = _image_files(run, Cache(tmp_path / "cache"), tmp_path, embed_image=False)
    known = debian_choice(("GPL-2+ or Artistic", "expat")) if contained else None
    parts = json.loads(members[IMAGE_SBOM])["components"]
    (package,) = (part for part in parts if part["name"] == "gcc-12-base")
    assert package.get("licenses") == known


def test_debian_licences_come_from_the_base_layer(base_layer):
    silent = ("bash", "loop", "away", "missing")
    asserted = ("gcc-12-base", "libgcc-s1", "libstdc++6")
    lock = make_lock(packages=tuple(debian(name, "1") for name in (*asserted, *silent)))
    found = collect_licences(lock, NO_WHEELS, base_layer)
    choice = debian_choice(("GPL-2+ or Artistic", "expat"))
    assert found == {debian_purl(debian(name, "1"), "debian-12"): choice for name in asserted}
    data = image_sbom(lock, DIGEST, found)
    validate_sbom(data)
    assert sbom_matches_lock(data, lock) == []
    assert collect_licences(lock, NO_WHEELS, None) == {}
