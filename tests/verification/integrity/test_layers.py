"""Unpacking layers: the work is bounded by what was signed, whatever the bytes are."""

import hashlib
import io

import pytest
import zstandard

from capsule.bundle.run_bundle import ALWAYS_UNPACKED_BYTES, MAX_RATIO, largest_unpacked
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.verification.integrity.layers import MAX_LAYER_BYTES, check_size, unpack

PIECE = 1 << 20  # how much is made at a time


class Counting(io.RawIOBase):
    """Counts what is written to it, and keeps nothing."""

    count = 0

    def writable(self):
        return True

    def write(self, data):
        self.count += len(data)
        return len(data)


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """Ten gibibytes of zeros in less than a megabyte: 160 frames that do not tell their size."""
    parameters = zstandard.ZstdCompressionParameters.from_level(3, write_content_size=False)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(64 << 20))
    packed = frame * 160
    assert len(packed) < 1 << 20
    return packed


@pytest.mark.parametrize("size", [0, 1, 1024, 3 << 20])
def test_a_bomb_is_refused_as_soon_as_it_is_larger_than_the_layer(bomb, size):
    target, source = Counting(), io.BytesIO(bomb)
    with pytest.raises(CapsuleError) as caught:
        unpack(source, target, size, "layer")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V004", ExitCode.TAMPERED)
    assert target.count <= size + PIECE
    assert source.tell() <= 256 << 10  # nor was more of it read


def test_a_bomb_whose_size_is_claimed_is_refused_before_its_first_byte(bomb):
    with pytest.raises(CapsuleError, match="CAP-V004"):
        check_size("layer", len(bomb), 10 << 30)
    with pytest.raises(CapsuleError, match="CAP-V004"):
        check_size("layer", len(bomb), MAX_LAYER_BYTES)
    check_size("layer", MAX_LAYER_BYTES // MAX_RATIO + 1, MAX_LAYER_BYTES)


def test_what_a_packer_may_write_a_verifier_takes():
    assert largest_unpacked(0) == ALWAYS_UNPACKED_BYTES
    assert largest_unpacked(1 << 30) == MAX_RATIO << 30


def test_the_layer_itself_is_taken_and_any_other_is_not():
    data = bytes(range(256)) * 999
    packed = zstandard.compress(data)
    target = io.BytesIO()
    digest = unpack(io.BytesIO(packed), target, len(data), "layer")
    assert target.getvalue() == data
    assert digest == hashlib.sha256(data).hexdigest()
    for evil in (
        packed[:-5],
        packed + zstandard.compress(b"x"),
        packed + b"tail",
        zstandard.compress(data[:-1]),
        data,
        b"",
    ):
        with pytest.raises(CapsuleError, match="CAP-V004"):
            unpack(io.BytesIO(evil), io.BytesIO(), len(data), "layer")


def test_a_window_that_would_take_much_memory_is_refused():
    data = bytes(1 << 10)
    for log, refused in ((23, False), (27, True)):
        parameters = zstandard.ZstdCompressionParameters.from_level(
            3, window_log=log, write_content_size=False
        )
        packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        packed = packer.compress(data) + packer.flush()
        if refused:
            with pytest.raises(CapsuleError, match="CAP-V004"):
                unpack(io.BytesIO(packed), io.BytesIO(), len(data), "layer")
        else:
            unpack(io.BytesIO(packed), io.BytesIO(), len(data), "layer")
