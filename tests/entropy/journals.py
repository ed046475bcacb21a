"""What starts leave behind, made by hand: journals as in journal.h, and the launcher's report."""

import json
import struct

from capsule.entropy.journal import FILE_NAME, Use, totals
from capsule.entropy.report import REPORT
from capsule.experiment.contract import FIRST_PROCESS


def record(kind, body, ready=1):
    body += bytes(-len(body) % 8)
    return struct.pack("<3I4x", 16 + len(body), kind, ready) + body


def thread_record(process=b"0", thread=b"0", calls=1, derived=0):
    return record(1, struct.pack("<4Q192s192s", calls, 8, derived, 8 * derived, process, thread))


def counter_record(thread, source=1, calls=1, size=8):
    facts = (thread, 0, calls, size, source, b"libc.so.6")
    return record(2, struct.pack("<4QI4x64s", *facts))


def call_record(counter, kept=b"12345678", ready=1, size=None):
    return record(3, struct.pack("<2Q", counter, len(kept) if size is None else size) + kept, ready)


def told_record(process=b"0x", clock=2, is_sorted=1, cores=4, readings=10):
    facts = (readings, 2, 3, 1, clock, is_sorted, cores, process)
    return record(5, struct.pack("<4Q3I4x192s", *facts))


def write_journal(directory, *records, failed=0, version=3, used=None, magic=b"CAPSJRNL"):
    body = b"".join(records)
    used = 64 + len(body) if used is None else used
    header = struct.pack("<8s2I2Q2I24x", magic, version, 62, 1 << 20, used, failed, 0)
    (directory / FILE_NAME).write_bytes(header + body)
    return directory


def recorded_run(directory, **options):
    records = thread_record(), counter_record(THREAD), call_record(COUNTER)
    return write_journal(directory, *records, **options)


# Where the first thread of a journal, its first counter and its first call are.
THREAD = 64
COUNTER = THREAD + len(thread_record())
CALL = COUNTER + len(counter_record(THREAD))


def mismatch_record(reason, recorded=(0, 0), process=b"0.1", thread=b"0-2"):
    """Return a call for 16 bytes from getrandom, the fourth, where others were recorded."""
    facts = (reason, 1, recorded[0], 3, 24, 16, recorded[1], process, thread)
    return record(4, struct.pack("<3I4x4Q192s192s", *facts))


def write_launch_report(directory, **changes):
    """Write what the launcher leaves of a run whose programs it did not have to answer."""
    facts = {
        "schema": "capsule/launch/v1",
        "mode": "virtual",
        "clock": "system",
        "supervised": True,
        "fixed_addresses": True,
        "own_numbers": True,
        "first_process": FIRST_PROCESS,
        "status": 0,
        "processes": 1,
        "outlived": 0,
        "programs": [],
    }
    (directory / REPORT).write_text(json.dumps(facts | changes))


def describe(profile):
    """Add up a profile's calls and bytes by process, thread, source and calling library."""
    return totals(
        Use(thread.process, thread.thread, call.source, call.caller, 1, call.size)
        for thread in profile.threads
        for call in thread.calls
    )
