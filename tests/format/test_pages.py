"""The pages of the format: examples computed without Capsule, and a reader written by them."""

import hashlib
import json
import re
import struct
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import pytest
import rfc8785
import xxhash
from cryptography.exceptions import InvalidSignature
from jsonschema import Draft202012Validator

from capsule.experiment.trace import COMPONENTS
from tests.format import reader
from tests.hostile.genuine import (
    SIGNER,
    STRANGER,
    documents,
    manifest_of,
    outside,
    packed,
    program,
    training,
)

ROOT = Path(__file__).parents[2]
PAGES = "".join(path.read_text() for path in (ROOT / "docs" / "format").glob("*.md"))
BLOCKS = dict(re.findall(r"^```([a-z-]+)\n(.+?)\n```$", PAGES, re.MULTILINE | re.DOTALL))
RUNS = [training, program, lambda: outside("training"), lambda: outside("program")]


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_the_claim_id_of_the_example():
    claims = BLOCKS["claims"].encode()
    assert rfc8785.dumps(json.loads(claims)) == claims
    assert sha256(claims) == BLOCKS["claim-id"]


def test_capsule_reads_the_example_as_claims():
    from capsule.bundle.claims import ProgramClaims

    assert ProgramClaims.parse(BLOCKS["claims"].encode()).claim_id() == BLOCKS["claim-id"]


def test_the_tensor_trace_checkpoint_and_stream_of_the_examples():
    tensor = reader.tensor_digest("F32", [2], struct.pack("<2f", 1, 2))
    assert tensor == BLOCKS["tensor"]
    schema = json.loads((ROOT / "schemas" / "trace-v1.json").read_text())
    for line in BLOCKS["trace"].splitlines():
        Draft202012Validator(schema).validate(json.loads(line))
    trace = reader.trace_head(BLOCKS["trace"].encode() + b"\n")
    assert trace == {"records": 2, "head": BLOCKS["trace-head"]}
    checkpoint = {"step": 8, "tensors": {"weight": tensor}, "trace_head": trace["head"]}
    assert sha256(rfc8785.dumps(checkpoint)) == BLOCKS["checkpoint"]
    key = sha256(rfc8785.dumps(["capsule/stream/v1", 7, "exploration", 3]))[:32]
    assert key == BLOCKS["stream-key"]


def test_the_keys_of_a_record_are_listed_in_their_order():
    section = PAGES.partition("A record has\n\n")[2].partition("\n\n")[0]
    keys = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in section.splitlines()[2:]]
    assert [*chain(*keys)] == ["step", *COMPONENTS]


@pytest.mark.parametrize("name", ["dqn", "r2d2", "impala", "impala-recorded"])
def test_the_reader_finds_the_digests_of_real_bundles(name):
    corpus = ROOT / "tests" / "corpus"
    _, files = reader.read(corpus / f"{name}.capsule.tar", (corpus / "author.pub").read_text())
    for stream in json.loads(files["profiles/streams.json"])["streams"]:
        assert reader.stream_key(stream) == stream["key"]
    first, second, *_, last = map(json.loads, files["run/trace.jsonl"].splitlines())
    (path,) = [path for path in files if path.startswith("checkpoints/")]
    elements = reader.elements_of(files[path])
    for group in {"parameters", "target", "optimizer"} & {*last}:
        assert last[group] == {
            tensor: xxhash.xxh3_128_hexdigest(elements[f"{group}/{tensor}"])
            for tensor in last[group]
        }
    # The streams of the learner are not used between the first two records of IMPALA.
    if name.startswith("impala"):
        streams = json.dumps(first["streams"]).encode("ascii")
        assert xxhash.xxh3_128_hexdigest(streams) == second["streams"]


@pytest.mark.parametrize("run", RUNS)
def test_the_roles_and_media_types_are_listed(run):
    page = (ROOT / "docs" / "bundle-format.md").read_text()
    table = page.partition("The roles and media types are:\n\n")[2].partition("\n\n")[0]
    rows = [
        [re.findall(r"`([^`]+)`", part) for part in cell.split(";")]
        for line in table.splitlines()[2:]
        for cell in line.strip("|").split("|")
    ]
    kinds = {}
    for members, roles, types in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        for number, patterns in enumerate(members):
            for place, pattern in enumerate(patterns):
                role = roles[0][place % len(roles[0])]
                kinds[pattern.replace("NAME", "*")] = (role, types[number % len(types)][0])
    files = json.loads(documents(manifest_of(run()))["manifest.json"])["files"]
    for file in files:
        found = next(kind for name, kind in kinds.items() if fnmatch(file["path"], name))
        assert found == (file["role"], file["mediaType"]), file["path"]


def test_the_reader_imports_nothing_of_capsule():
    assert "capsule" not in re.findall(
        r"^(?:from|import) (\w+)", Path(reader.__file__).read_text(), re.MULTILINE
    )


@pytest.mark.parametrize("run", RUNS)
def test_the_reader_accepts_genuine_bundles(run, tmp_path):
    path = packed(run(), tmp_path / "b")
    claim_id, files = reader.read(path, SIGNER.public.openssh())
    assert claim_id == sha256(run().files["claims.json"])
    assert {name: files[name] for name in run().files} == run().files


@pytest.mark.parametrize(
    ("at", "what"), [(148, "header"), (257, "header"), (-400, "end of the archive")]
)
def test_the_reader_refuses_another_byte(at, what, tmp_path):
    path = packed(training(), tmp_path / "b")
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(reader.RefusedError, match=what):
        reader.read(path, SIGNER.public.openssh())


def test_the_reader_refuses_other_keys_and_contradictions(tmp_path):
    path = packed(training(), tmp_path / "b")
    with pytest.raises(reader.RefusedError, match="another key"):
        reader.read(path, STRANGER.public.openssh())
    data = path.read_bytes()
    signature = data.index(b'"sig":"') + 8
    path.write_bytes(data[:signature] + bytes([data[signature] ^ 1]) + data[signature + 1 :])
    with pytest.raises((InvalidSignature, reader.RefusedError, ValueError)):
        reader.read(path, SIGNER.public.openssh())

    def shorter(files):
        lines = files["run/trace.jsonl"].splitlines(keepends=True)
        files["run/trace.jsonl"] = lines[0]

    with pytest.raises(reader.RefusedError, match="the trace"):
        reader.read(packed(training(), tmp_path / "c", shorter), SIGNER.public.openssh())
