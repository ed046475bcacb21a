import hashlib
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capsule.bundle.archive import MAX_SIZE
from capsule.bundle.manifest import Manifest, parse_document
from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode

ZERO = "0" * 64


def entry(path="run/a", *, size=1, sha256=ZERO, role="run", **more):
    media_type = more.pop("mediaType", "text/plain")
    return {"path": path, "size": size, "sha256": sha256, "role": role, "mediaType": media_type} | (
        more
    )


CLAIMS = entry("claims.json", role="claims")


def manifest(*files, **changes) -> bytes:
    document = {
        "schema": "capsule/bundle/v1",
        "claimId": ZERO,
        "files": [CLAIMS, *files],
        "signatures": ["dsse"],
    }
    return canonical_json({**document, **changes})


def parse(data: bytes) -> Manifest:
    return parse_document(data, Manifest, "manifest.json", "CAP-B111")


ACCEPTED = {
    "claims only": manifest(),
    "one more": manifest(entry()),
    "ascending": manifest(entry("run/a"), entry("run/b")),
    "name that only begins like a folder": manifest(entry("run"), entry("run-a")),
    "equal content under two names": manifest(entry("run/a"), entry("run/b")),
    "no bytes": manifest(entry(size=0)),
    "largest size": manifest(entry(size=MAX_SIZE)),
    "longest name": manifest(entry("x" * 100)),
    "upper case": manifest(entry("run/A")),
    "two kinds of signature": manifest(signatures=["dsse", "sshsig"]),
    "structured media type": manifest(entry(mediaType="application/vnd.cyclonedx+json")),
}

REFUSED = {
    # names (cases 21, 23, 28)
    "same path twice": manifest(entry("run/a"), entry("run/a")),
    "descending": manifest(entry("run/b"), entry("run/a")),
    "equal but for case": manifest(entry("run/A"), entry("run/a")),
    "file and folder": manifest(entry("run"), entry("run/a")),
    "file and folder but for case": manifest(entry("RUN/a"), entry("run")),
    "manifest itself": manifest(entry("manifest.json")),
    "manifest but for case": manifest(entry("manifest.JSON")),
    "checksums": canonical_json(json.loads(manifest()) | {"files": [entry("SHA256SUMS"), CLAIMS]}),
    "signature": manifest(entry("signatures/x")),
    "file called signatures": manifest(entry("signatures")),
    **{
        f"path {path!a}": manifest(entry(path))
        for path in (
            *("", "../a", "/a", "x/../a", "./a", "x//a", "x\\a", "C:a", "x\0", "x\n", "-a"),
            *(".a", "x/.a", "é", "e\u0301", "x\u202e", "x" * 101),
        )
    },
    # facts
    "negative size": manifest(entry(size=-1)),
    "size beyond ustar": manifest(entry(size=MAX_SIZE + 1)),
    "size as text": manifest(entry(size="1")),
    "fractional size": manifest(entry(size=1.5)),
    "true as size": manifest(entry(size=True)),
    "short digest": manifest(entry(sha256="0" * 63)),
    "upper-case digest": manifest(entry(sha256="A" * 64)),
    "unknown role": manifest(entry(role="script")),
    "media type with parameters": manifest(entry(mediaType="text/html; charset=x")),
    "unknown field of a file": manifest(entry(mode=0o755)),
    # claims
    "no claims": manifest(files=[entry()]),
    "two claims": manifest(entry("run/a", role="claims")),
    "claim id of something else": manifest(claimId="1" * 64),
    # versions and closed fields (cases 13, 17)
    "next major version": manifest(schema="capsule/bundle/v2"),
    "unknown field": manifest(note="hello"),
    "no signature declared": manifest(signatures=[]),
    "unknown kind": manifest(signatures=["dsse", "x509"]),
    "kinds in another order": manifest(signatures=["sshsig", "dsse"]),
    "no envelope": manifest(signatures=["sshsig"]),
    "kind twice": manifest(signatures=["dsse", "dsse"]),
    "null": b"null",
    "list": b"[]",
    # JSON (case 15)
    "duplicate key": manifest().replace(b'"claimId"', b'"claimId":"x","claimId"', 1),
    "white space": manifest() + b"\n",
    "byte order mark": b"\xef\xbb\xbf" + manifest(),
    "key order": b'{"schema":"capsule/bundle/v1","claimId":"' + ZERO.encode() + b'"}',
    "not UTF-8": manifest().replace(b"claims.json", b"claims\xff"),
    "NaN": manifest().replace(b'"size":1', b'"size":NaN'),
    "integer beyond 2^53": manifest().replace(b'"size":1', b'"size":9007199254740993'),
    "exponent": manifest().replace(b'"size":1', b'"size":1e0'),
    "five thousand digits": manifest().replace(b'"size":1', b'"size":' + b"1" * 5000),
    "lone surrogate": manifest().replace(b"claims.json", b"\\ud800"),
    "escaped letter": manifest().replace(b"claims.json", b"\\u0063laims.json"),
    "depth bomb": b"[" * 100_000 + b"]" * 100_000,
    "unclosed depth bomb": b'{"a":' * 100_000,
    "nothing": b"",
    "cut off": manifest()[:-1],
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    assert parse(ACCEPTED[name]).document() == ACCEPTED[name]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(CapsuleError) as caught:
        parse(REFUSED[name])
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B111", ExitCode.TAMPERED)
    assert caught.value.message.isprintable()


def test_the_error_names_the_field():
    with pytest.raises(CapsuleError, match=r"'files\.1\.size': Input should be greater"):
        parse(manifest(entry(size=-1)))


def test_hostile_keys_are_never_printed():
    with pytest.raises(CapsuleError) as caught:
        parse(manifest(**{"\x1b[2J": 1}))
    assert "\x1b" not in str(caught.value)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
@example(manifest()[:50])
def test_noise_is_refused_in_order(data):
    with pytest.raises(CapsuleError, match="CAP-B111"):
        parse(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["schema", "claimId", "files", "signatures", "other"]), JSON)
def test_foreign_values_are_refused_in_order(field, value):
    document = json.loads(manifest()) | {field: value}
    with pytest.raises(CapsuleError, match="CAP-B111"):
        parse(json.dumps(document).encode())


def test_checksums_are_what_sha256sum_writes():
    found = parse(manifest(entry("run/b", sha256="b" * 64)))
    digest = hashlib.sha256(found.document()).hexdigest()
    assert found.checksums.decode().splitlines() == [
        f"{digest}  manifest.json",
        f"{ZERO}  claims.json",
        f"{'b' * 64}  run/b",
    ]
