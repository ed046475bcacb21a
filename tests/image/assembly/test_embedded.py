"""An image that a bundle carries whole: taken back as Capsule wrote it, refused with any change."""

import hashlib
import io
import json
import tarfile
from dataclasses import replace
from functools import partial

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capsule.experiment.canonical import sha256_file
from capsule.experiment.errors import ExitCode
from capsule.image.archives.layers import file_entry, write_tar
from capsule.image.assembly.assemble import archive_chunks, image_of
from capsule.image.assembly.embedded import unpack_image
from tests import refusals
from tests.image.conftest import Member, build_tar


@pytest.fixture
def own(tiny):
    return tiny.assemble()


@pytest.fixture
def read(tiny, tmp_path):
    """Return a function that reads an archive back as the image that it must be."""

    def read_back(archive, image, *, compress=zstandard.compress):
        packed = tmp_path / "image.tar.zst"
        packed.write_bytes(compress(archive))
        (tmp_path / "layers").mkdir(exist_ok=True)
        layers = tuple(
            replace(layer, path=tmp_path / "layers" / layer.diff_id[7:]) for layer in image.layers
        )
        return unpack_image(packed, image_of(tiny.lock(), layers), tiny.lock())

    return read_back


def archive_of(image):
    return b"".join(archive_chunks(image))


refused = partial(refusals.refused, status=ExitCode.TAMPERED)


def test_what_capsule_wrote_is_taken_back_and_names_nothing(read, own):
    image = read(archive_of(own), own)
    assert (image.config_digest, image.manifest_digest) == (own.config_digest, own.manifest_digest)
    assert [sha256_file(la.path) for la in image.layers] == [la.diff_id[7:] for la in own.layers]
    with tarfile.open(fileobj=io.BytesIO(archive_of(image))) as archive:
        members = {info.name: archive.extractfile(info).read() for info in archive}
    assert json.loads(members["manifest.json"])[0]["RepoTags"] == []
    assert "annotations" not in json.loads(members["index.json"])["manifests"][0]


@pytest.mark.slow
@settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_other_byte_is_refused(read, own, data):
    archive = bytearray(archive_of(own))
    position = data.draw(st.integers(0, len(archive) - 1))
    archive[position] ^= data.draw(st.integers(1, 255))
    refused("CAP-V053", read, bytes(archive), own)


def test_other_layouts_of_the_same_image_are_refused(read, own):
    archive = archive_of(own)
    end = bytes(1024)
    blob = build_tar([Member("blobs/sha256/" + "0" * 64, b"nobody refers to it")])
    renamed = replace(own, reference="python:3.12")
    for flaw in (
        archive.removesuffix(end) + blob,
        archive + archive,
        archive + b"\0",
        archive[:-1],
        archive[: len(archive) // 2],
        archive_of(renamed),
        archive_of(replace(own, reference=None)),
        build_tar([Member("layer.tar", kind=tarfile.SYMTYPE, target="../x.tar")]) + archive,
    ):
        refused("CAP-V053", read, flaw, own)


@pytest.mark.parametrize(
    "members",
    [
        [Member("bin/su", b"x", mode=0o4755)],
        [Member("dev/mem", kind=tarfile.CHRTYPE)],
        [Member("pipe", kind=tarfile.FIFOTYPE)],
        [Member("a", b"x"), Member("b", kind=tarfile.LNKTYPE, target="a")],
        [Member("../escape", b"x")],
        [Member("plain", b"x")],  # for its owner and time: not the canonical form
    ],
)
def test_a_layer_that_capsule_would_not_write_is_refused(read, tiny, own, tmp_path, members):
    refused("CAP-V053", read, *with_base(tiny, own, tmp_path, build_tar(members)))


def test_a_layer_with_a_whiteout_or_a_collision_is_refused(read, tiny, own, tmp_path):
    with tarfile.open(own.layers[-1].path) as archive:
        code = next(info.name for info in archive if info.isreg())
    for path in ("etc/.wh.passwd", ".wh..wh..opq", code):
        layer = bytearray()
        write_tar([file_entry(path, "test", b"x")], layer.extend)
        refused("CAP-V053", read, *with_base(tiny, own, tmp_path, bytes(layer)))
    layer = bytearray()
    write_tar([file_entry("etc/passwd", "test", b"x")], layer.extend)
    read(*with_base(tiny, own, tmp_path, bytes(layer)))  # the signer's own, in the right form


def test_other_training_code_is_refused(read, tiny, own, tmp_path):
    layer = bytearray()
    write_tar([file_entry("usr/evil.py", "test", b"x")], layer.extend)
    message = refused("CAP-V053", read, *with_layer(tiny, own, tmp_path, -1, bytes(layer)))
    assert "code" in message


def test_what_would_unpack_to_too_much_is_refused_before_it_is_unpacked(read, tiny, own):
    layers = (replace(own.layers[0], size=10 << 30), *own.layers[1:])
    huge = image_of(tiny.lock(), layers)
    size = sum(layer.size for layer in layers)
    assert f"{size} bytes" in refused("CAP-V054", read, archive_of(own), huge)


def test_a_bomb_is_cut_off_where_the_image_ends(read, own):
    def bomb(archive):
        packer = zstandard.ZstdCompressor()
        stream = io.BytesIO()
        with packer.stream_writer(stream, closefd=False) as out:
            out.write(archive)
            for _ in range(256):
                out.write(bytes(1 << 20))
        return stream.getvalue()

    assert "follows" in refused("CAP-V053", read, archive_of(own), own, compress=bomb)


def test_a_window_larger_than_bundles_need_is_refused(read, own):
    def wide(archive):
        parameters = zstandard.ZstdCompressionParameters(window_log=27)
        packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        return packer.compress(archive) + packer.flush()

    refused("CAP-V053", read, archive_of(own), own, compress=wide)


def with_base(tiny, own, folder, data):
    return with_layer(tiny, own, folder, 0, data)


def with_layer(tiny, own, folder, index, data):
    """Return an archive, and the image that it is consistently of, with one layer of a stranger."""
    digest = hashlib.sha256(data).hexdigest()
    path = folder / digest
    path.write_bytes(data)
    layers = list(own.layers)
    layers[index] = replace(layers[index], diff_id=f"sha256:{digest}", path=path, size=len(data))
    image = image_of(tiny.lock(), tuple(layers))
    return archive_of(image), image
