"""Deposits for Zenodo: the form that its API documents, and files that are complete."""

import html
import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import partial

import pytest

from capsule.bundle import sshsig
from capsule.bundle.cosign import cosign
from capsule.bundle.keys import generate, load_private
from capsule.bundle.trust import TrustPolicy
from capsule.export import zenodo
from capsule.export.deposit import Creator, Details
from capsule.export.zenodo import export_zenodo
from capsule.host.errors import CapsuleError
from tests.export.conftest import STUDY, TRAINING, content

DETAILS = Details(
    creators=(Creator("Doe, Jane", "Example University", "0000-0002-1825-0097"), Creator("A Lab")),
    licence="CC-BY-4.0",
    related=(("isSupplementTo", "10.1234/abc"),),
)
NO_KEYS = TrustPolicy.of([])


def metadata(folder):
    return json.loads((folder / ".zenodo.json").read_text())


def test_the_metadata_has_the_fields_that_the_api_requires(tmp_path):
    export_zenodo(TRAINING, NO_KEYS, DETAILS, tmp_path / "deposit")
    found = metadata(tmp_path / "deposit")
    assert json.loads((tmp_path / "deposit" / "metadata.json").read_text()) == {"metadata": found}
    assert found["upload_type"] == "dataset"
    assert found["access_right"] == "open"
    assert found["license"] == "CC-BY-4.0"
    assert found["creators"] == [
        {"name": "Doe, Jane", "affiliation": "Example University", "orcid": "0000-0002-1825-0097"},
        {"name": "A Lab"},
    ]
    assert found["related_identifiers"] == [
        {"relation": "isSupplementTo", "identifier": "10.1234/abc"}
    ]
    claim_id = json.loads(content(TRAINING, "manifest.json"))["claimId"]
    assert claim_id in found["description"]
    assert claim_id in found["notes"]
    assert found["title"].startswith("dqn")


def test_the_command_names_the_file_as_one_word(tmp_path):
    bundle = tmp_path / "a'$(touch x).capsule.tar"
    shutil.copyfile(TRAINING, bundle)
    export_zenodo(bundle, NO_KEYS, DETAILS, tmp_path / "deposit")
    description = html.unescape(metadata(tmp_path / "deposit")["description"])
    command = description.partition("<code>")[2].partition("</code> (Capsule")[0]
    # The bundle of the corpus was made in a plain process, so it needs the option.
    options = ["--key", "KEY.pub", "--engine", "process"]
    assert shlex.split(command.rpartition("<code>")[2]) == [
        "capsule",
        "verify",
        bundle.name,
        *options,
    ]


def test_other_programs_find_every_file_complete(tmp_path):
    """The receipt beside the bundle is a part of the deposit."""
    export_zenodo(TRAINING, NO_KEYS, DETAILS, tmp_path / "deposit")
    files = tmp_path / "deposit" / "files"
    assert sorted(path.name for path in files.iterdir()) == [
        "SHA256SUMS",
        TRAINING.name,
        f"{TRAINING.name}.verifier.receipt.json",
    ]
    subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=files, check=True)
    subprocess.run(["md5sum", "--strict", "-c", "../MD5SUMS"], cwd=files, check=True)
    assert (files / TRAINING.name).read_bytes() == TRAINING.read_bytes()


def test_co_signatures_beside_the_bundle_are_a_part_of_the_deposit(tmp_path):
    bundle = tmp_path / "run.capsule.tar"
    shutil.copyfile(TRAINING, bundle)
    generate(tmp_path / "bob")
    bob = load_private(tmp_path / "bob")
    cosign(bundle, partial(sshsig.sign, key=bob), tmp_path / "run.capsule.tar.bob.sshsig")
    export_zenodo(bundle, NO_KEYS, DETAILS, tmp_path / "deposit")
    files = tmp_path / "deposit" / "files"
    assert sorted(path.name for path in files.iterdir()) == [
        "SHA256SUMS",
        "run.capsule.tar",
        "run.capsule.tar.bob.sshsig",
    ]
    description = metadata(tmp_path / "deposit")["description"]
    assert "--engine process --signature run.capsule.tar.bob.sshsig</code>" in description

    shutil.copyfile(STUDY, tmp_path / "study.capsule.tar")
    (tmp_path / "run.capsule.tar.bob.sshsig").rename(tmp_path / "study.capsule.tar.bob.sshsig")
    with pytest.raises(CapsuleError, match="CAP-B157") as raised:
        export_zenodo(tmp_path / "study.capsule.tar", NO_KEYS, DETAILS, tmp_path / "another")
    assert "study.capsule.tar.bob.sshsig' is not a signature of this" in raised.value.message
    assert not (tmp_path / "another").exists()


def test_a_study_is_deposited_with_its_own_claim_id(tmp_path):
    export_zenodo(STUDY, NO_KEYS, DETAILS, tmp_path / "deposit")
    claim_id = json.loads(content(STUDY, "manifest.json"))["claimId"]
    assert claim_id in metadata(tmp_path / "deposit")["notes"]
    assert "capsule study verify" in metadata(tmp_path / "deposit")["description"]


def test_the_description_is_html_whatever_the_name_of_the_file_is(tmp_path):
    bundle = tmp_path / "<b>&.capsule.tar"
    shutil.copyfile(TRAINING, bundle)
    export_zenodo(bundle, NO_KEYS, DETAILS, tmp_path / "deposit")
    assert "&lt;b&gt;&amp;.capsule.tar" in metadata(tmp_path / "deposit")["description"]


@pytest.mark.parametrize(
    ("details", "option"),
    [
        (Details(), "--creator"),
        (Details(creators=(Creator("A"),)), "--licence"),
        (Details(licence="MIT"), "--creator"),
    ],
)
def test_creators_and_a_licence_are_required(details, option, tmp_path):
    with pytest.raises(CapsuleError, match=option) as raised:
        export_zenodo(TRAINING, NO_KEYS, details, tmp_path / "deposit")
    assert raised.value.code == "CAP-P207"


@pytest.mark.parametrize(("name", "limit"), [("MAX_BYTES", 1000), ("MAX_FILES", 2)])
def test_more_than_zenodo_takes_is_refused(name, limit, tmp_path, monkeypatch):
    monkeypatch.setattr(zenodo, name, limit)
    with pytest.raises(CapsuleError) as raised:
        export_zenodo(TRAINING, NO_KEYS, DETAILS, tmp_path / "deposit")
    assert raised.value.code == "CAP-P208"
    assert not (tmp_path / "deposit").exists()


def test_a_damaged_bundle_is_not_deposited(tmp_path):
    damaged = tmp_path / TRAINING.name
    data = bytearray(TRAINING.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CapsuleError) as raised:
        export_zenodo(damaged, NO_KEYS, DETAILS, tmp_path / "deposit")
    assert raised.value.code.startswith("CAP-B")
    assert not (tmp_path / "deposit").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="names of files are Unicode there")
def test_a_name_that_is_not_utf_8_is_deposited(tmp_path):
    bundle = tmp_path / os.fsdecode(b"a\xff.capsule.tar")
    shutil.copyfile(TRAINING, bundle)
    export_zenodo(bundle, NO_KEYS, DETAILS, tmp_path / "deposit")
    files = tmp_path / "deposit" / "files"
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=files, check=True)
    assert "a\ufffd.capsule.tar" in html.unescape(metadata(tmp_path / "deposit")["description"])
