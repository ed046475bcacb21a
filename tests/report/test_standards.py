"""What other tools and forms get: RO-Crate, checklists, model card."""

import json
import re
import subprocess

import pytest
from rocrate.rocrate import ROCrate

from capsule.bundle.bundle import Content, open_bundle, pack
from capsule.bundle.crate import CRATE, PROFILE
from capsule.bundle.keys import load_private
from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.report.checklists import artifact_appendix, neurips
from capsule.report.model_card import model_card
from tests.report.conftest import read
from tests.report.runs import hostile_bundle

KINDS = ["dqn", "r2d2", "impala", "own"]
FORMS = {"neurips": neurips, "acm": artifact_appendix, "model-card": model_card}


@pytest.fixture
def crate(bundles, tmp_path):
    """A function that unpacks a bundle and reads it as an RO-Crate, with somebody else's reader."""

    def unpack(kind):
        (tmp_path / kind).mkdir()
        subprocess.run(["tar", "-xf", bundles[kind], "-C", tmp_path / kind], check=True)
        return ROCrate(tmp_path / kind)

    return unpack


# --- RO-Crate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_unpacked_bundle_is_a_process_run_crate(bundles, crate, kind):
    """The rules of the profile's table "Requirements", version 0.5, and of RO-Crate 1.1."""
    subject, read_crate = read(bundles[kind]), crate(kind)
    root = read_crate.root_dataset
    assert root["conformsTo"].id == PROFILE
    assert read_crate.dereference(PROFILE).type == "CreativeWork"
    assert root["identifier"] == subject.claims.claim_id()
    assert all(root[name] for name in ("name", "description", "datePublished", "license"))
    action = root["mentions"]
    assert action.type == "CreateAction"
    assert action["instrument"].type == "SoftwareApplication"
    assert action["instrument"]["name"]
    assert action["startTime"] <= action["endTime"]
    assert action["actionStatus"] == "http://schema.org/CompletedActionStatus"
    assert {each.type for each in action["object"]} <= {"File", "PropertyValue"}
    assert "NVIDIA H200" in [each.get("value") for each in action["object"]]
    assert {each.type for each in action["result"]} == {"File"}
    assert "claims.json" in [each.id for each in action["result"]]
    assert "agent" not in action  # nobody knows


@pytest.mark.parametrize("kind", KINDS)
def test_the_crate_lists_the_files_that_are_there_and_names_nothing_else(crate, kind, tmp_path):
    read_crate = crate(kind)
    parts = {part.id for part in read_crate.root_dataset["hasPart"]}
    there = {str(path.relative_to(tmp_path / kind)) for path in (tmp_path / kind).rglob("*")
             if path.is_file()}  # fmt: skip
    assert parts == there - {CRATE}
    graph = json.loads((tmp_path / kind / CRATE).read_text())["@graph"]
    identities = [entity["@id"] for entity in graph]
    assert len(identities) == len(set(identities))
    referred = set(re.findall(r'\{"@id":"([^"]*)"\}', json.dumps(graph, separators=(",", ":"))))
    outside = {"https://w3id.org/ro/crate/1.1"}
    assert referred <= set(identities) | outside


def root_of(crate):
    return next(entity for entity in crate["@graph"] if entity["@id"] == "./")


@pytest.mark.parametrize(
    "change",
    [
        lambda crate: root_of(crate).update(identifier="f" * 64),
        lambda crate: root_of(crate)["hasPart"].pop(),
        lambda crate: root_of(crate)["hasPart"].append({"@id": "more"}),
        lambda crate: root_of(crate).pop("hasPart"),
        lambda crate: root_of(crate).update(hasPart=[[]]),
        lambda crate: crate.update({"@graph": ["./"]}),
        lambda crate: crate.pop("@graph"),
        None,
    ],
)
def test_a_crate_that_is_about_something_else_is_a_contradiction(bundles, tmp_path, change):
    original = bundles["dqn"]
    with open_bundle(original, []) as opened:
        files = {
            file.path: Content(opened.files[file.path].read_bytes(), file.role, file.media_type)
            for file in opened.manifest.files
        }
        claim_id = opened.claim_id
    crate = json.loads(files[CRATE].source)
    data = b"not JSON"
    if change is not None:
        change(crate)
        data = canonical_json(crate)
    files[CRATE] = files[CRATE]._replace(source=data)
    key = load_private(original.parent / "alice")
    forged = pack(files, claim_id, key, tmp_path / "forged.capsule.tar")
    with pytest.raises(CapsuleError, match=CRATE) as caught:
        read(forged, trusted=False)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V046", ExitCode.TAMPERED)


# --- forms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_that_is_cited_is_in_the_bundle(bundles, kind, form):
    subject = read(bundles[kind])
    document = FORMS[form](subject)
    cited = set(re.findall(r"`([A-Za-z]+/?[\w./-]*\.(?:json|jsonl|md|safetensors|zst))`", document))
    assert cited
    assert cited <= {file.path for file in subject.files} | {"manifest.json"}
    assert subject.claims.claim_id() in document or form == "acm"


@pytest.mark.parametrize("form", FORMS)
def test_what_a_bundle_cannot_know_is_left_to_a_person(bundles, form):
    document = FORMS[form](read(bundles["own"]))
    assert document.count("**TODO**") >= 8


@pytest.mark.parametrize("form", FORMS)
def test_text_from_a_stranger_stays_text_in_markdown(tmp_path, form):
    document = FORMS[form](read(hostile_bundle(tmp_path)))
    assert "\x1b" not in document
    assert "\u202e" not in document
    outside = re.sub(r"`[^`]*`|^    .*$", "", document, flags=re.MULTILINE)  # code is inert
    assert not re.search(r"(?<!\\)<", outside)
