"""Repositories for Hugging Face's hub."""

import hashlib
import json
import re
import shlex

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from ruamel.yaml import YAML

from capsule.bundle.bundle import Content, open_bundle, pack
from capsule.bundle.keys import PrivateKey
from capsule.bundle.trust import TrustPolicy
from capsule.experiment.canonical import sha256_hex
from capsule.export.deposit import Creator, Details
from capsule.export.huggingface import export_huggingface
from capsule.host.errors import CapsuleError
from capsule.report.markdown import code
from capsule.verification.integrity import consistency
from tests.export.conftest import PROGRAM, STUDY, TRAINING, content, returns

NO_KEYS = TrustPolicy.of([])


def card(folder):
    """Return the metadata and the text of a model card, as the hub parts them."""
    start, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    assert start == ""
    return YAML(typ="safe").load(metadata), text


def test_the_card_has_the_results_where_the_hub_reads_them(tmp_path):
    export_huggingface(TRAINING, NO_KEYS, Details(licence="Apache-2.0"), tmp_path / "repository")
    metadata, text = card(tmp_path / "repository")
    assert metadata["license"] == "apache-2.0"
    assert "reinforcement-learning" in metadata["tags"]
    (model,) = metadata["model-index"]
    (result,) = model["results"]
    last = returns()[max(returns())]
    assert result["dataset"]["name"] == "CartPole-v1"
    assert result["metrics"] == [{"type": "mean_reward", "value": sum(last) / len(last)}]
    assert f"capsule verify {TRAINING.name}" in text
    assert json.loads(content(TRAINING, "manifest.json"))["claimId"] in text


def test_the_files_are_those_of_the_bundle(tmp_path):
    export_huggingface(TRAINING, NO_KEYS, Details(), tmp_path / "repository")
    manifest = json.loads(content(TRAINING, "manifest.json"))
    signed = {file["path"]: file["sha256"] for file in manifest["files"]}
    found = {
        str(path.relative_to(tmp_path / "repository")): hashlib.sha256(path.read_bytes())
        for path in (tmp_path / "repository").rglob("*")
        if path.is_file()
    }
    own = {"README.md", ".gitattributes", TRAINING.name}
    assert {name: digest.hexdigest() for name, digest in found.items() if name not in own} == {
        name: signed[name] for name in found if name not in own
    }
    assert "checkpoints/step-000000000400.safetensors" in found
    assert (tmp_path / "repository" / TRAINING.name).read_bytes() == TRAINING.read_bytes()


def test_members_of_another_capsules_bundle_replace_no_file(tmp_path, monkeypatch):
    # Another Capsule may write other members, which are therefore not rejected.
    monkeypatch.setattr(consistency, "package_digest", lambda: "0" * 64)
    with open_bundle(TRAINING, []) as opened:
        members = {
            file.path: Content(opened.content(file.path), file.role, file.media_type)
            for file in opened.manifest.files
        }
    for name in ("README.md", "hostile.capsule.tar"):
        members[name] = Content(b"another file", "output", "text/markdown")
    bundle, key = tmp_path / "hostile.capsule.tar", PrivateKey(Ed25519PrivateKey.generate())
    pack(members, sha256_hex(members["claims.json"].source), key, bundle)
    export_huggingface(bundle, NO_KEYS, Details(), tmp_path / "repository")
    assert card(tmp_path / "repository")
    assert (tmp_path / "repository" / bundle.name).read_bytes() == bundle.read_bytes()
    assert (tmp_path / "repository" / "checkpoints" / "step-000000000400.safetensors").is_file()


def test_a_program_has_its_outputs_and_no_results(tmp_path):
    export_huggingface(PROGRAM, NO_KEYS, Details(), tmp_path / "repository")
    metadata, _ = card(tmp_path / "repository")
    assert not {"model-index", "license"} & metadata.keys()
    assert (tmp_path / "repository" / "workspace" / "scores.json").is_file()


def test_the_card_states_what_the_options_say(tmp_path):
    details = Details(
        creators=(Creator("Doe, Jane", "Lab"), Creator("Roe")),
        licence="MIT",
        related=(("cites", "10.1/x_y"),),
    )
    export_huggingface(TRAINING, NO_KEYS, details, tmp_path / "repository")
    _, text = card(tmp_path / "repository")
    assert "- Developed by: Doe, Jane (Lab); Roe\n" in text
    assert "- Licence: MIT\n" in text
    assert "- Citation and contact: cites 10.1/x\\_y\n" in text


@pytest.mark.parametrize("name", ["a'$(touch x).capsule.tar", "x`y|z<b>.capsule.tar"])
def test_a_file_name_is_text_in_the_card_and_one_word_of_the_command(name, tmp_path):
    (tmp_path / name).write_bytes(TRAINING.read_bytes())
    export_huggingface(tmp_path / name, NO_KEYS, Details(), tmp_path / "repository")
    _, text = card(tmp_path / "repository")
    (command,) = re.findall(r"^    (capsule verify .*)$", text, flags=re.MULTILINE)
    assert shlex.split(command)[2] == name
    assert f"that {code(name)} records" in text


def test_the_bundle_of_a_study_is_refused(tmp_path):
    with pytest.raises(CapsuleError) as raised:
        export_huggingface(STUDY, NO_KEYS, Details(), tmp_path / "repository")
    assert raised.value.code == "CAP-B146"
    assert not (tmp_path / "repository").exists()
