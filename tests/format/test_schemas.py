"""The published JSON Schemas: those of the models, and fit for real documents."""

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from scripts import schemas
from tests.hostile.genuine import outside, packed, program, training

ROOT = Path(__file__).parents[2]
# Files of a run directory that no bundle holds, and a file that comes with Capsule.
INTERMEDIATE = {"launch", "launch-failure", "ended", "failure", "instruments", "releases"}
RUNS = {
    "training": training,
    "program": program,
    "without an image": lambda: outside("training"),
}


def published(name):
    return json.loads((ROOT / "schemas" / f"{name}-v1.json").read_text())


def validator(name):
    return Draft202012Validator(published(name))


@pytest.mark.slow
def test_the_files_are_those_that_the_script_writes():
    found = {path.name: path.read_text() for path in (ROOT / "schemas").iterdir()}
    wanted = {f"{name}-v1.json": schemas.text_of(name) for name in schemas.NAMES}
    stale = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    assert not stale, "run: python scripts/schemas.py"


@pytest.mark.parametrize("name", schemas.NAMES)
def test_each_file_is_a_schema_that_says_its_own_name(name):
    schema = published(name)
    Draft202012Validator.check_schema(schema)
    own = schema.get("properties", {}).get("schema")
    assert own is None or own["const"] == f"capsule/{name}/v1"


def descriptions(node):
    """Yield every description of a schema."""
    if isinstance(node, dict):
        if isinstance(text := node.get("description"), str):
            yield text
        node = list(node.values())
    for child in node if isinstance(node, list) else ():
        yield from descriptions(child)


@pytest.mark.parametrize("name", schemas.NAMES)
def test_descriptions_are_plain_sentences_or_noun_phrases(name):
    """Readers of a schema see no Python: no roles of Sphinx, no parts of docstrings."""
    markup = re.compile(r":(attr|class|data|func|meth|mod):`|``|Attributes:|^Of |^(e\.g\.|E\.g\.)")
    found = {*descriptions(published(name))}
    assert found
    assert [text for text in found if markup.search(text) or not text.endswith(".")] == []


def test_every_document_that_has_a_schema_name_is_published():
    text = "".join(path.read_text() for path in (ROOT / "capsule").rglob("*.py"))
    named = set(re.findall(r'Literal\[\s*"capsule/([a-z-]+)/v1"\s*\] = Field', text))
    statement = {"run"}  # the predicate of the signed statement, in its schema
    assert named - INTERMEDIATE - statement == {
        name for name in schemas.MODELS if "schema" in published(name)["properties"]
    }


@pytest.mark.parametrize("run", RUNS)
def test_real_documents_fit(run):
    checked = set()
    for path, data in RUNS[run]().files.items():
        if not path.endswith(".json") or path.endswith(".cdx.json"):
            continue
        document = json.loads(data)
        if (name := document.get("schema", "").split("/")[1:2]) == []:
            continue
        validator(name[0]).validate(document)
        checked.add(name[0])
    assert {"lock", "observations", "job", "runtime", "mechanisms", "entropy", "ledger"} < checked
    assert checked & {"claims", "program-claims"}


RECORD = {"step": 4, "streams": "0" * 32, "loss": {"last": None, "digest": ""}}
SEGMENT = {"head": "0" * 64, "records": 2048}


@pytest.mark.parametrize(
    "line", [RECORD, SEGMENT, RECORD | {"later": [1]}, RECORD | {"unrolls": {"update 0": "0" * 16}}]
)
def test_a_line_of_a_trace_fits(line):
    validator("trace").validate(line)


@pytest.mark.parametrize(
    "line",
    [
        RECORD | {"step": 0},
        RECORD | {"head": "0" * 64, "records": 1024},
        RECORD | {"observations": "0" * 16},
        RECORD | {"streams": {"no-op": "0" * 64}},
        RECORD | {"loss": "0" * 32},
        RECORD | {"generations": {"generation 0, member 0": {"number": 0}}},
        SEGMENT | {"records": 5},
        SEGMENT | {"step": 4},
    ],
)
def test_other_lines_of_a_trace_do_not(line):
    with pytest.raises(ValidationError):
        validator("trace").validate(line)


def test_what_is_signed_fits(tmp_path):
    from tests.hostile.genuine import documents, manifest_of

    files = documents(manifest_of(training()))
    envelope = json.loads(files["signatures/run.sigstore.json"])
    validator("envelope").validate(envelope)
    validator("bundle").validate(json.loads(files["manifest.json"]))
    assert packed(training(), tmp_path / "b").stat().st_size > 0


@pytest.mark.parametrize(("name", "folder"), [("spec", "specs"), ("study", "specs/studies")])
def test_files_that_users_write_fit(name, folder):
    paths = [*(ROOT / folder).glob("*.yaml")]
    assert paths
    for path in paths:
        validator(name).validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "change",
    [
        # Keys of mappings whose keys have a pattern.
        lambda lock: lock.update(data={"A B": {"files": 1, "sha256": "0" * 64, "size": 1}}),
        # A stored document omits a field that was added later if it has the value of its absence.
        lambda lock: lock.update(data=None),
        lambda lock: lock["spec"]["accelerator"].update(cuda_build=False),
        lambda lock: lock.update(schema="capsule/lock/v2"),
        lambda lock: lock["spec"].pop("seeds"),
        lambda lock: lock.update(more=1),
        lambda lock: lock["image"].update(base="0"),
    ],
)
def test_other_documents_do_not(change):
    lock = json.loads(training().files["spec/lock.json"])
    change(lock)
    with pytest.raises(ValidationError):
        validator("lock").validate(lock)
