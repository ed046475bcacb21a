"""A reader of bundles that was written from docs/, and imports nothing of Capsule.

It checks the archive, the signature, the manifest, the checksums, the claim id, the digest of the
lock, the chain of the trace, and the checkpoint, and returns what a bundle says.
"""

import base64
import hashlib
import json
import struct
from pathlib import Path

import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

BLOCK = 512
PAYLOAD_TYPE = "application/vnd.in-toto+json"
ENVELOPE, MANIFEST, SUMS = "signatures/run.sigstore.json", "manifest.json", "SHA256SUMS"


class RefusedError(Exception):
    """The bundle is not what docs/ describe."""


def demand(condition, what):
    if not condition:
        raise RefusedError(what)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def canonical(data):
    """Parse canonical JSON (documents.md)."""
    value = json.loads(data)
    demand(rfc8785.dumps(value) == data, "not canonical JSON")
    return value


# --- the archive (bundle-format.md, section 2) ----------------------------------------------------


def header(name, size):
    def field(text, width):
        return text.encode("ascii").ljust(width, b"\0")

    fields = [field(name, 100), b"0000644\0", b"0000000\0", b"0000000\0"]
    fields += [b"%011o\0" % size, b"0" * 11 + b"\0", b" " * 8, b"0", bytes(100), b"ustar\0", b"00"]
    fields += [bytes(32), bytes(32), b"0000000\0", b"0000000\0", bytes(155), bytes(12)]
    block = b"".join(fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def members(data):
    """Yield name and content of each member of an archive."""
    at = 0
    while data[at : at + BLOCK] != bytes(BLOCK):
        block = data[at : at + BLOCK]
        name = block[:100].rstrip(b"\0").decode("ascii")
        size = int(block[124:135], 8)
        demand(block == header(name, size), f"header of {name}")
        content = data[at + BLOCK : at + BLOCK + size]
        demand(len(content) == size, f"{name} is cut off")
        padding = -size % BLOCK
        at += BLOCK + size + padding
        demand(data[at - padding : at] == bytes(padding), f"padding of {name}")
        yield name, content
    demand(data[at:] == bytes(2 * BLOCK), "end of the archive")


# --- signature, manifest, checksums (sections 3 to 5) ---------------------------------------------


def pae(payload):
    """Return DSSE's pre-authentication encoding."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def signed_statement(envelope, line):
    """Check the signature with an OpenSSH Ed25519 public key, and return the statement."""
    blob = base64.b64decode(line.split()[1])
    dsse = canonical(envelope)["dsseEnvelope"]
    (signature,) = dsse["signatures"]
    fingerprint = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    demand(signature["keyid"] == f"SHA256:{fingerprint}", "signed by another key")
    demand(dsse["payloadType"] == PAYLOAD_TYPE, "payload type")
    payload = base64.b64decode(dsse["payload"], validate=True)
    key = Ed25519PublicKey.from_public_bytes(blob[-32:])
    key.verify(base64.b64decode(signature["sig"], validate=True), pae(payload))
    return canonical(payload)


def check_manifest(files, statement):
    manifest = canonical(files[MANIFEST])
    demand(manifest["schema"] == "capsule/bundle/v1", "schema of the manifest")
    demand(manifest["signatures"] == ["dsse"], "further signatures are not read here")
    listed = {MANIFEST: sha256(files[MANIFEST])}
    listed |= {file["path"]: file["sha256"] for file in manifest["files"]}
    demand(list(files) == [ENVELOPE, MANIFEST, SUMS, *list(listed)[1:]], "order of the members")
    for file in manifest["files"]:
        content = files[file["path"]]
        demand((len(content), sha256(content)) == (file["size"], file["sha256"]), file["path"])
    sums = "".join(f"{digest}  {path}\n" for path, digest in listed.items()).encode()
    demand(files[SUMS] == sums, SUMS)
    subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    demand(subjects == {MANIFEST: listed[MANIFEST], SUMS: sha256(sums)}, "the statement's subjects")
    return manifest


def check_claim_id(files, manifest, statement):
    (claims,) = [file["path"] for file in manifest["files"] if file["role"] == "claims"]
    found = {sha256(files[claims]), manifest["claimId"], statement["predicate"]["claimId"]}
    demand(len(found) == 1, "claim ids")
    return found.pop()


# --- what is claimed (documents.md, binary.md) ----------------------------------------------------


def trace_head(trace):
    """Return the number of records and the head of a trace's chain."""
    head, records, due = bytes(32), 0, False
    for line in trace.splitlines():
        fields = json.loads(line)
        if "records" in fields:
            demand(due and fields == {"head": head.hex(), "records": records}, "a segment's head")
            due = False
            continue
        demand(not due, "a segment's head")
        head = hashlib.sha256(head + hashlib.sha256(line).digest()).digest()
        records += 1
        due = records % 1024 == 0
    return {"records": records, "head": head.hex()}


def tensor_digest(dtype, shape, elements):
    return sha256(rfc8785.dumps({"dtype": dtype, "shape": shape}) + elements)


def elements_of(safetensors):
    """Return the elements of each tensor, by name."""
    return {name: elements for name, (_, elements) in parsed(safetensors).items()}


def tensors_of(safetensors):
    """Return the digest of each tensor, by name."""
    return {
        name: tensor_digest(header["dtype"], header["shape"], elements)
        for name, (header, elements) in parsed(safetensors).items()
    }


def parsed(safetensors):
    (length,) = struct.unpack("<Q", safetensors[:8])
    listed = json.loads(safetensors[8 : 8 + length])
    listed.pop("__metadata__", None)
    data = safetensors[8 + length :]
    return {name: (each, data[slice(*each["data_offsets"])]) for name, each in listed.items()}


def check_training(files, claims):
    demand(trace_head(files["run/trace.jsonl"]) == claims["trace"], "the trace")
    checkpoints = canonical(files["run/checkpoints.json"])["checkpoints"]
    digests = [
        {"step": each["step"], "digest": sha256(rfc8785.dumps(each))} for each in checkpoints
    ]
    demand(digests == claims["checkpoints"], "the checkpoints")
    last = checkpoints[-1]
    tensors = tensors_of(files[f"checkpoints/step-{last['step']:012d}.safetensors"])
    demand(tensors == last["tensors"], "the tensors of the last checkpoint")
    group = "parameters/"
    parameters = {n.removeprefix(group): digest for n, digest in tensors.items() if group in n}
    demand(sha256(rfc8785.dumps(parameters)) == claims["parameters"], "the parameters")


def stream_key(stream):
    name, _, index = stream["name"].partition("/")
    key = ["capsule/stream/v1", stream["seed"], name, int(index or 0)]
    return sha256(rfc8785.dumps(key))[:32]


def check_program(files, claims):
    for path, output in claims["outputs"].items():
        if output["target"] is None:
            content = files.get(f"workspace/{path}", files.get(f"outputs/{output['sha256']}"))
            demand(content is not None and sha256(content) == output["sha256"], f"output {path}")


def read(path, key):
    """Check a bundle with an OpenSSH public key; return its claim id and its files."""
    files = dict(members(Path(path).read_bytes()))
    statement = signed_statement(files[ENVELOPE], key)
    manifest = check_manifest(files, statement)
    claim_id = check_claim_id(files, manifest, statement)
    claims = canonical(files["claims.json"])
    demand(sha256(files["spec/lock.json"]) == claims["lock"], "the lock")
    check = {
        "capsule/claims/v1": check_training,
        "capsule/program-claims/v1": check_program,
    }
    check[claims["schema"]](files, claims)
    return claim_id, files
