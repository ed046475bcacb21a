"""Event files of TensorBoard are compared record by record, without their times."""

import struct

from capsule.verification.content.events import record_checksum
from tests.verification.content.comparing import compare, event, framed


def test_the_checksum_of_records_is_crc32c():
    assert record_checksum(b"123456789") == (
        (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    ).to_bytes(4, "little")  # RFC 3720 has the value before the mask


def test_event_files_are_compared_without_their_times():
    def events(time, loss):
        return framed(b"\x09" + struct.pack("<d", time) + b"\x1a\x0dbrain.Event:2") + event(
            time + 1, 5, "loss", loss
        )

    found = compare(events(1.0, 0.5), events(2.0, 0.5))
    assert (found.format, found.nature) == ("TensorBoard events", "date")
    found = compare(events(1.0, 0.5), events(2.0, 0.25))
    last = found.parts[-1]
    assert (last.where, last.claimed) == ("record 2", "step 5, loss = 0.5")
    assert last.found == "step 5, loss = 0.25"
    found = compare(events(1.0, 0.5), events(1.0, 0.5) + event(3.0, 6, "loss", 0.1))
    assert (found.parts[0].where, found.parts[0].claimed) == ("record 3", "end of file")
    broken = events(2.0, 0.5)[:-1] + b"\0"
    assert compare(events(1.0, 0.5), broken).format == "bytes"
