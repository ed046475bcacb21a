import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.bundle import archive
from capsule.bundle.bundle import Content, open_bundle, pack
from capsule.bundle.envelope import BundleStatement, sign
from capsule.bundle.manifest import Manifest
from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.fields import Model

TEXT = "text/plain"


class Claims(Model):
    schema_id: str
    returns: tuple[str, ...]


@pytest.fixture
def packed(tmp_path, contents, claim_id, alice):
    """Pack the small bundle with some files changed."""

    def pack_with(**changes: Content) -> Path:
        return pack({**contents, **changes}, claim_id, alice, tmp_path / "new.capsule.tar")

    return pack_with


def reseal(files: dict[str, bytes], manifest: dict, key, statement: dict | None = None) -> bytes:
    """Write a canonical archive around any manifest, signed as it is."""
    document = canonical_json(manifest)
    sums = [(hashlib.sha256(document).hexdigest(), "manifest.json")]
    sums += [(file["sha256"], file["path"]) for file in manifest["files"]]
    checksums = "".join(f"{digest}  {path}\n" for digest, path in sums).encode()
    base = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": name, "digest": {"sha256": hashlib.sha256(data).hexdigest()}}
            for name, data in (("manifest.json", document), ("SHA256SUMS", checksums))
        ],
        "predicateType": "https://capsule-rl.dev/run/v1",
        "predicate": {"schema": "capsule/run/v1", "claimId": manifest["claimId"]},
    }
    signed = sign(
        BundleStatement.model_validate_json(json.dumps({**base, **(statement or {})})), key
    )
    members = {
        "signatures/run.sigstore.json": signed,
        "manifest.json": document,
        "SHA256SUMS": checksums,
        **files,
    }
    stream = io.BytesIO()
    archive.write(stream, [(name, len(data), data) for name, data in members.items()])
    return stream.getvalue()


@pytest.fixture
def parts(bundle, alice) -> tuple[dict[str, bytes], dict]:
    with open_bundle(bundle, [alice.public]) as opened:
        files = {path: staged.read_bytes() for path, staged in opened.files.items()}
        return files, json.loads(opened.manifest.document())


def refusal(data: bytes, folder: Path, keys) -> str:
    path = folder / "evil.capsule.tar"
    path.write_bytes(data)
    with pytest.raises(CapsuleError) as caught:
        open_bundle(path, keys)
    assert caught.value.exit_code == ExitCode.TAMPERED
    return caught.value.code


# Packing


def test_a_bundle_gives_back_what_was_packed(bundle, contents, claim_id, alice):
    with open_bundle(bundle, [alice.public]) as opened:
        assert opened.claim_id == claim_id
        assert list(opened.files) == sorted(contents)
        for path, content in contents.items():
            assert opened.files[path].read_bytes() == content.source


def test_equal_input_gives_equal_bytes(bundle, tmp_path, contents, claim_id, alice):
    backwards = dict(reversed(contents.items()))
    assert pack(backwards, claim_id, alice, tmp_path / "b").read_bytes() == bundle.read_bytes()


def test_equal_bytes_in_another_process(bundle, contents, tmp_path):
    # Another hash seed, time zone, umask and clock: nothing of them gets in.
    for path, content in contents.items():
        (tmp_path / "in" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / path).write_bytes(content.source)
    roles = {path: content[1:] for path, content in contents.items()}
    code = f"""
import hashlib, os, pathlib
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from capsule.bundle.bundle import Content, pack
from capsule.bundle.keys import PrivateKey
os.umask(0o077)
root = pathlib.Path({str(tmp_path)!r})
files = {{path: Content(root / "in" / path, *rest) for path, rest in {roles!r}.items()}}
claim_id = hashlib.sha256((root / "in/claims.json").read_bytes()).hexdigest()
key = PrivateKey(Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32))
pack(files, claim_id, key, root / "other.capsule.tar")
"""
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONHASHSEED": "7",
        "TZ": "Asia/Tokyo",
    }
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)
    assert (tmp_path / "other.capsule.tar").read_bytes() == bundle.read_bytes()
    assert stat.S_IMODE((tmp_path / "other.capsule.tar").stat().st_mode) == 0o600


def test_another_key_changes_only_the_envelope(bundle, tmp_path, contents, claim_id, mallory):
    other = pack(contents, claim_id, mallory, tmp_path / "b").read_bytes()
    same = bundle.read_bytes()
    assert other != same
    start = same.index(b"manifest.json\0")  # the first header after the envelope
    assert other[start:] == same[start:]


def test_a_bundle_replaces_an_older_one_at_once(packed):
    first = packed()
    inode = first.stat().st_ino
    assert packed() == first
    assert first.stat().st_ino != inode
    assert [path.name for path in first.parent.iterdir()] == [first.name]


@pytest.mark.parametrize(
    "path",
    [
        *("../x", "/x", "a b", ".x", "x" * 101, "", "manifest.json", "SHA256SUMS"),
        *("signatures/x", "CLAIMS.json", "run", "run/trace.jsonl/x"),
    ],
)
def test_paths_that_cannot_be_bundled(path, packed, tmp_path):
    with pytest.raises(CapsuleError) as caught:
        packed(**{path: Content(b"", "run", TEXT)})
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B141", ExitCode.USAGE)
    assert not any(tmp_path.iterdir())
    packed(**{"run/x": Content(b"", "run", TEXT)})


@pytest.mark.parametrize(
    ("role", "media_type"), [("other", TEXT), ("run", "text"), ("claims", TEXT)]
)
def test_facts_that_cannot_be_bundled(role, media_type, packed):
    with pytest.raises(CapsuleError, match="CAP-B141"):
        packed(x=Content(b"", role, media_type))


def test_the_claim_id_is_the_digest_of_the_claims(contents, alice, tmp_path):
    with pytest.raises(CapsuleError, match="CAP-B141"):
        pack(contents, "0" * 64, alice, tmp_path / "b")
    assert not any(tmp_path.iterdir())


def test_only_regular_files_are_packed(packed, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "missing", "."):
        with pytest.raises(CapsuleError) as caught:
            packed(x=Content(tmp_path / name, "run", TEXT))
        assert (caught.value.code, caught.value.exit_code) == ("CAP-B142", ExitCode.USAGE)
    packed(x=Content(secret, "run", TEXT))


@pytest.mark.parametrize("change", ["rewritten", "shortened", "removed", "none"])
def test_a_file_that_changes_while_it_is_packed(change, tmp_path, monkeypatch, packed):
    source = tmp_path / "source"
    source.write_bytes(b"before")
    write = archive.write

    def write_later(stream, members):
        if change == "removed":
            source.unlink()
        elif change != "none":
            source.write_bytes({"rewritten": b"after!", "shortened": b"bef"}[change])
        return write(stream, members)

    monkeypatch.setattr(archive, "write", write_later)
    if change == "none":
        assert packed(x=Content(source, "run", TEXT)).exists()
        return
    with pytest.raises(CapsuleError, match="CAP-B142"):
        packed(x=Content(source, "run", TEXT))
    assert {path.name for path in tmp_path.iterdir()} <= {"source"}


def test_a_destination_that_cannot_be_written(tmp_path, contents, claim_id, alice):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    for destination in (tmp_path / "file" / "b", tmp_path / "folder"):
        with pytest.raises(CapsuleError) as caught:
            pack(contents, claim_id, alice, destination)
        assert (caught.value.code, caught.value.exit_code) == ("CAP-B143", ExitCode.USAGE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_what_no_reader_would_accept_is_not_signed(
    bundle, tmp_path, contents, claim_id, alice, monkeypatch
):
    size, place = bundle.stat().st_size, tmp_path / "large.capsule.tar"
    limits = {"MAX_ARCHIVE": size, "MAX_FILES": len(contents)}
    for name, limit in limits.items():
        monkeypatch.setattr(archive, name, limit)
    pack(contents, claim_id, alice, place)
    place.unlink()
    for name, limit in limits.items():
        monkeypatch.setattr(archive, name, limit - 1)
        with pytest.raises(CapsuleError, match="no reader accepts more than") as caught:
            pack(contents, claim_id, alice, place)
        assert (caught.value.code, caught.value.exit_code) == ("CAP-B163", ExitCode.USAGE)
        monkeypatch.setattr(archive, name, limit)
    monkeypatch.setattr(archive, "MAX_SIZE", 1)
    with pytest.raises(CapsuleError, match=r"CAP-B163 .* has [0-9,]+ bytes, and no reader"):
        pack(contents, claim_id, alice, place)
    assert not place.exists()


# Opening


def test_staged_copies_are_private_and_go_away(bundle, alice):
    with open_bundle(bundle, [alice.public]) as opened:
        assert stat.S_IMODE(opened.directory.stat().st_mode) == 0o700
        assert not any(opened.directory.iterdir())  # nobody has asked for one
        staged = {opened.member(path) for path in opened.files}
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in staged)
        assert {path for path in opened.directory.rglob("*") if path.is_file()} == staged
        assert [opened.member(path) for path in opened.files] == list(opened.files.values())
    assert not opened.directory.exists()


def test_a_refused_bundle_leaves_nothing_behind(bundle, tmp_path, alice, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "staging"))
    (tmp_path / "staging").mkdir()
    data = bundle.read_bytes()
    assert refusal(data[:-1], tmp_path, [alice.public]) == "CAP-B104"
    assert not any((tmp_path / "staging").iterdir())


def test_a_bundle_that_is_replaced_or_grows_stays_what_it_was(packed, alice):
    path = packed()
    with open_bundle(path, [alice.public]) as opened:
        with path.open("ab") as stream:
            stream.write(b"evil")
        path.with_name("other").write_bytes(b"evil")
        path.with_name("other").replace(path)
        assert opened.content("REPRODUCING.md") == b"# How\n"
        path.unlink()
        assert opened.member("REPRODUCING.md").read_bytes() == b"# How\n"


@pytest.mark.parametrize("change", ["rewritten", "shortened"])
def test_a_bundle_that_is_written_to_in_place_is_noticed(change, packed, alice):
    path = packed()
    data = path.read_bytes()
    with open_bundle(path, [alice.public]) as opened:
        staged = opened.member("claims.json").read_bytes()
        evil = data.replace(b"# How\n", b"# Pay\n") if change == "rewritten" else data[:-4096]
        path.write_bytes(evil)
        for use in (opened.content, opened.member):
            with pytest.raises(CapsuleError) as caught:
                use("run/trace.jsonl" if change == "shortened" else "REPRODUCING.md")
            assert (caught.value.code, caught.value.exit_code) == ("CAP-B108", ExitCode.TAMPERED)
        assert opened.member("claims.json").read_bytes() == staged
        assert sum(path.is_file() for path in opened.directory.rglob("*")) == 1


def test_a_file_too_large_to_be_a_document(bundle, contents, alice):
    size = len(contents["claims.json"].source)
    with open_bundle(bundle, [alice.public]) as opened:
        assert opened.content("claims.json", size) == contents["claims.json"].source
        with pytest.raises(CapsuleError) as caught:
            opened.content("claims.json", size - 1)
        assert (caught.value.code, caught.value.exit_code) == ("CAP-B160", ExitCode.TAMPERED)


def test_documents_are_read_strictly(packed, alice):
    good = canonical_json({"schema_id": "x", "returns": ["1"]})
    path = packed(
        **{
            "good.json": Content(good, "run", "application/json"),
            "spaced.json": Content(good + b"\n", "run", "application/json"),
            "other.json": Content(b'{"schema_id":1}', "run", "application/json"),
            "binary.json": Content(b"\xff", "run", "application/json"),
        }
    )
    with open_bundle(path, [alice.public]) as opened:
        assert opened.read("good.json", Claims) == Claims(schema_id="x", returns=("1",))
        for name in ("spaced.json", "other.json", "binary.json", "missing.json"):
            with pytest.raises(CapsuleError, match=name.split(".")[0]) as caught:
                opened.read(name, Claims)
            assert (caught.value.code, caught.value.exit_code) == ("CAP-B144", ExitCode.TAMPERED)


def test_no_room_for_copies_is_not_tampering(bundle, alice, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(CapsuleError) as caught:
        open_bundle(bundle, [alice.public])
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B110", ExitCode.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("MAX_FILES", 3), ("MAX_ENVELOPE", 500), ("MAX_MANIFEST", 500), ("MAX_ARCHIVE", 5000)],
)
def test_limits(name, limit, bundle, alice, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, name, limit)
    assert refusal(bundle.read_bytes(), tmp_path, [alice.public]) == "CAP-B105"


def test_a_bundle_with_as_many_files_as_allowed_is_opened(bundle, alice, monkeypatch):
    monkeypatch.setattr(archive, "MAX_FILES", 4)
    open_bundle(bundle, [alice.public]).close()


# Documents that contradict each other (cases 17, 18, 21)


def test_resealing_unchanged_gives_the_bundle(bundle, parts, alice):
    files, manifest = parts
    assert reseal(files, manifest, alice) == bundle.read_bytes()


def test_a_file_the_manifest_lacks(parts, alice, tmp_path):
    files, manifest = parts
    evil = reseal({**files, "zzz": b""}, manifest, alice)
    assert refusal(evil, tmp_path, [alice.public]) == "CAP-B109"


def test_a_file_only_the_manifest_has(parts, alice, tmp_path):
    files, manifest = parts
    del files["run/trace.jsonl"]
    assert refusal(reseal(files, manifest, alice), tmp_path, [alice.public]) == "CAP-B104"


def test_contents_swapped_between_names(parts, alice, tmp_path):
    files, manifest = parts
    files["REPRODUCING.md"], files["claims.json"] = files["claims.json"], files["REPRODUCING.md"]
    assert refusal(reseal(files, manifest, alice), tmp_path, [alice.public]) == "CAP-B107"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, None),
        ({"schema": "capsule/bundle/v2"}, "CAP-B111"),
        ({"note": 1}, "CAP-B111"),
        ({"signatures": ["dsse", "sshsig"]}, "CAP-B107"),
        ({"signatures": ["dsse", "x509"]}, "CAP-B111"),
        ({"signatures": []}, "CAP-B111"),
        ({"claimId": "0" * 64}, "CAP-B111"),
    ],
)
def test_signed_manifests_that_break_the_rules(change, code, parts, alice, tmp_path):
    files, manifest = parts
    evil = reseal(files, {**manifest, **change}, alice)
    path = tmp_path / "b"
    path.write_bytes(evil)
    if code is None:
        open_bundle(path, [alice.public]).close()
    else:
        assert refusal(evil, tmp_path, [alice.public]) == code


def test_a_signed_manifest_that_leaves_a_field_out(parts, alice, tmp_path):
    files, manifest = parts
    del manifest["signatures"]
    assert refusal(reseal(files, manifest, alice), tmp_path, [alice.public]) == "CAP-B111"


@pytest.mark.parametrize("index", [0, 1])
def test_a_signed_digest_of_something_else(index, parts, alice, tmp_path):
    files, manifest = parts
    good = BundleStatement.about(Manifest.model_validate_json(canonical_json(manifest)))
    subject = good.model_dump(mode="json", by_alias=True)["subject"]
    assert reseal(files, manifest, alice, {"subject": subject}) == reseal(files, manifest, alice)
    subject[index]["digest"]["sha256"] = "0" * 64
    evil = reseal(files, manifest, alice, {"subject": subject})
    assert refusal(evil, tmp_path, [alice.public]) == ("CAP-B112", "CAP-B113")[index]


def test_a_signed_claim_id_of_another_run(parts, alice, tmp_path):
    files, manifest = parts
    predicate = {"schema": "capsule/run/v1", "claimId": "0" * 64}
    evil = reseal(files, manifest, alice, {"predicate": predicate})
    assert refusal(evil, tmp_path, [alice.public]) == "CAP-B113"


def test_parts_of_another_valid_bundle(bundle, packed, alice, tmp_path):
    # The envelope of one bundle in front of the rest of another, both signed by the same key.
    good, other = bundle.read_bytes(), packed(x=Content(b"", "run", TEXT)).read_bytes()
    start = good.index(b"manifest.json\0"), other.index(b"manifest.json\0")
    evil = good[: start[0]] + other[start[1] :]
    assert refusal(evil, tmp_path, [alice.public]) == "CAP-B112"
    assert refusal(evil, tmp_path, []) == "CAP-B112"


# Every byte counts


@pytest.fixture(scope="module")
def attack(bundle, alice):
    """Open other bytes as a bundle; tell the code of the refusal, or None if accepted."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    with tempfile.TemporaryDirectory(dir=memory) as folder, pytest.MonkeyPatch.context() as patch:
        path, staging = Path(folder, "evil.capsule.tar"), Path(folder, "staging")
        staging.mkdir()
        patch.setattr(tempfile, "tempdir", str(staging))

        def open_as(data: bytes) -> str | None:
            path.write_bytes(data)
            try:
                open_bundle(path, [alice.public]).close()
            except CapsuleError as error:
                noise = error.code == "CAP-B114"  # nothing that reminds of a bundle
                assert noise or error.exit_code == ExitCode.TAMPERED
                assert error.code != "CAP-B125"  # never mistaken for a merely unknown signer
                assert error.message.isprintable()
                return error.code
            return None

        yield open_as
        assert not any(staging.iterdir())


@pytest.mark.slow
def test_every_flipped_byte_is_refused(bundle, attack):
    good = bundle.read_bytes()
    assert attack(good) is None
    assert len(good) > 8_000
    accepted = []
    for position in range(len(good)):
        evil = bytearray(good)
        evil[position] ^= 1 << position % 8
        if attack(bytes(evil)) is None:
            accepted.append(position)
    assert accepted == []


def test_every_truncation_is_refused(bundle, attack):
    good = bundle.read_bytes()
    lengths = {*range(0, len(good), 97), *range(0, len(good), 512), len(good) - 1}
    assert [length for length in sorted(lengths) if attack(good[:length]) is None] == []


def test_every_insertion_and_deletion_is_refused(bundle, attack):
    good = bundle.read_bytes()
    for position in range(0, len(good), 211):
        for evil in (
            good[:position] + b"\0" + good[position:],
            good[:position] + bytes(512) + good[position:],
            good[:position] + good[position + 1 :],
            good[:position] + good[position + 512 :],
        ):
            assert attack(evil) is not None


def test_anything_appended_is_refused(bundle, attack):
    good = bundle.read_bytes()
    for tail in (b"\0", b"\n", bytes(512), bytes(10240), good, good[:1024]):
        assert attack(good + tail) is not None


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_spliced_and_overwritten_bundles_are_refused(bundle, attack, data):
    good = bundle.read_bytes()
    start = data.draw(st.integers(0, len(good) - 1))
    piece = data.draw(st.binary(min_size=1, max_size=600))
    evil = good[:start] + piece + good[start + len(piece) :]
    if evil != good:
        assert attack(evil) is not None


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=3000))
def test_noise_is_refused(attack, data):
    assert attack(data) is not None
