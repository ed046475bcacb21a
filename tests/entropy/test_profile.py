"""The profile's file: what goes in comes out, and whatever else is refused by name."""

import hashlib
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.entropy import profile as profile_module
from capsule.entropy.journal import FILE_NAME, Call, EntropyCall, Use
from capsule.entropy.profile import (
    Profile,
    ThreadProfile,
    check_consumed,
    check_room,
    merge,
    parse,
    serialize,
)
from capsule.experiment.errors import CapsuleError, ExitCode
from tests.entropy.journals import (
    CALL,
    COUNTER,
    THREAD,
    call_record,
    counter_record,
    describe,
    mismatch_record,
    recorded_run,
    thread_record,
    write_journal,
)


def kept(size):
    return st.binary(min_size=min(size, 32), max_size=min(size, 32))


sizes = st.integers(0, 100) | st.integers(0, 2**64 - 1)
sized = sizes.flatmap(lambda size: st.tuples(st.just(size), kept(size)))
calls = st.builds(
    lambda source, caller, sized: Call(source, caller, *sized),
    *(st.sampled_from(EntropyCall), st.text(max_size=20), sized),
)
paths = st.text("0123456789.-x", min_size=1, max_size=20)


@st.composite
def profiles(draw):
    keys = draw(st.lists(st.tuples(paths, paths), unique=True, max_size=4))
    return Profile(
        62,
        tuple(
            ThreadProfile(process, thread, tuple(draw(st.lists(calls, min_size=1, max_size=5))))
            for process, thread in sorted(keys)
        ),
    )


SAMPLE = Profile(
    62,
    (
        ThreadProfile(
            "0",
            "0",
            (
                Call(EntropyCall.GETRANDOM, "libpython3.11.so.1.0", 24, bytes(range(24))),
                Call(EntropyCall.GETRANDOM, "libpython3.11.so.1.0", 300, b"x" * 32),
            ),
        ),
        ThreadProfile("0.1x", "0-2", (Call(EntropyCall.DEVICE, "libc10.so", 8, b"12345678"),)),
    ),
)
DATA = serialize(SAMPLE)


def refused(data):
    with pytest.raises(CapsuleError) as caught:
        parse(data)
    return caught.value.code


def sealed(content):
    return content + hashlib.blake2s(content).digest()


@pytest.mark.slow
@given(profiles())
def test_what_is_written_is_read(profile):
    assert parse(serialize(profile)) == profile


@pytest.mark.parametrize("size", [32, 127, 128, 2**14 - 1, 2**14, 2**63, 2**64 - 1])
def test_a_size_is_read_as_it_was_written_where_it_needs_another_byte(size):
    written = serialize(profile_of(size))
    assert parse(written) == profile_of(size)
    more_bytes = -(-size.bit_length() // 7) - 1  # of seven bits each
    assert len(written) == len(serialize(profile_of(32))) + more_bytes


def profile_of(size):
    call = Call(EntropyCall.GETRANDOM, "libc.so.6", size, b"x" * 32)
    return Profile(62, (ThreadProfile("0", "0", (call,)),))


@given(position=st.integers(0, len(DATA) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_refused(position, flip):
    data = bytearray(DATA)
    data[position] ^= flip
    assert refused(bytes(data)) in {"CAP-R211", "CAP-R212", "CAP-R214"}


@given(size=st.integers(0, len(DATA) - 1))
def test_a_cut_off_profile_is_refused(size):
    assert refused(DATA[:size]) == ("CAP-R211" if size < len(b"CAPSPROF") else "CAP-R214")


def test_a_longer_profile_is_refused():
    assert refused(DATA + b"\0") == "CAP-R214"


@given(position=st.integers(12, len(DATA) - 33), flip=st.integers(1, 255))
def test_a_forged_profile_is_another_profile_or_refused(position, flip):
    content = bytearray(DATA[:-32])
    content[position] ^= flip
    data = sealed(bytes(content))
    try:
        assert serialize(parse(data)) == data
    except CapsuleError as error:
        assert error.code == "CAP-R215"


@given(st.binary(max_size=60))
def test_noise_under_a_right_checksum_is_refused_or_read(noise):
    data = sealed(DATA[:12] + noise)
    try:
        assert serialize(parse(data)) == data
    except CapsuleError as error:
        assert error.code == "CAP-R215"


def test_a_profile_has_as_many_calls_as_a_journal_may_have_and_no_more(monkeypatch):
    """Of all threads together; SAMPLE has three."""
    monkeypatch.setattr(profile_module, "MAX_CALLS", 3)
    assert parse(DATA) == SAMPLE
    monkeypatch.setattr(profile_module, "MAX_CALLS", 2)
    assert refused(DATA) == "CAP-R215"


def test_foreign_files_are_named_so():
    assert refused(b"") == "CAP-R211"
    assert refused(b"\x7fELF" + bytes(100)) == "CAP-R211"


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_is_named_so(version):
    header = struct.pack("<8s2H", b"CAPSPROF", version, 62)
    assert refused(sealed(header + b"\0\0")) == refused(header) == "CAP-R212"


def test_the_file_of_a_profile_is_the_documented_one():
    expected = (
        b"CAPSPROF\2\0\x3e\0\2\x09libc10.so\x14libpython3.11.so.1.0\2"
        b"\x010\x010\2\7\x38\1\1\x18\1\1\xac\2" + bytes(range(24)) + b"x" * 32
        + b"\x040.1x\x030-2\1\3\x08\5\0\x0812345678"
    )  # fmt: skip
    assert sealed(expected) == DATA


@pytest.mark.parametrize("size", [b"\xff" * 9 + b"\2", b"\xff" * 10 + b"\1"])
def test_a_size_beyond_64_bits_is_refused(size):
    content = b"CAPSPROF\2\0\x3e\0\1\1a\1\1" + b"0\1" + b"0\1"
    listed = b"\1\0" + size
    assert refused(sealed(content + bytes([len(listed), 32]) + listed + bytes(32))) == "CAP-R215"


def test_another_architecture_is_named_so():
    assert refused(serialize(Profile(183, SAMPLE.threads))) == "CAP-R213"


def test_threads_out_of_order_are_refused():
    assert refused(serialize(Profile(62, SAMPLE.threads[::-1]))) == "CAP-R215"
    assert refused(serialize(Profile(62, (SAMPLE.threads[0],) * 2))) == "CAP-R215"


def test_description_counts_calls_and_bytes_by_library():
    assert describe(SAMPLE) == (
        Use("0", "0", EntropyCall.GETRANDOM, "libpython3.11.so.1.0", 2, 324),
        Use("0.1x", "0-2", EntropyCall.DEVICE, "libc10.so", 1, 8),
    )


# ---- from a journal ----


def test_a_journal_becomes_a_profile(tmp_path):
    profile = parse(merge(recorded_run(tmp_path)))
    assert describe(profile) == (Use("0", "0", EntropyCall.GETRANDOM, "libc.so.6", 1, 8),)
    assert profile.threads[0].calls == (Call(EntropyCall.GETRANDOM, "libc.so.6", 8, b"12345678"),)


def test_of_a_large_call_32_bytes_are_kept(tmp_path):
    large = call_record(COUNTER, b"x" * 32, size=1 << 40)
    profile = parse(merge(write_journal(tmp_path, thread_record(), counter_record(THREAD), large)))
    assert profile.threads[0].calls == (
        Call(EntropyCall.GETRANDOM, "libc.so.6", 1 << 40, b"x" * 32),
    )


def code_of(function, *arguments):
    with pytest.raises(CapsuleError) as caught:
        function(*arguments)
    return caught.value.code


def test_a_run_that_wrote_nothing_down_is_named_so(tmp_path):
    assert code_of(merge, tmp_path) == "CAP-R201"
    assert code_of(merge, recorded_run(tmp_path, magic=b"anything")) == "CAP-R201"
    assert code_of(merge, recorded_run(tmp_path, version=1)) == "CAP-R201"


@given(position=st.integers(0, CALL + 40), value=st.integers(0, 255))
def test_a_journal_that_was_written_to_gives_no_traceback(tmp_path_factory, position, value):
    directory = tmp_path_factory.mktemp("journal")
    path = recorded_run(directory) / FILE_NAME
    data = bytearray(path.read_bytes().ljust(position + 1, b"\0"))
    data[position] = value
    path.write_bytes(data)
    try:
        parse(merge(directory))
    except CapsuleError as error:
        assert error.code.startswith(("CAP-R20", "CAP-R213"))


def test_a_full_journal_is_no_profile(tmp_path):
    assert code_of(merge, recorded_run(tmp_path, failed=2)) == "CAP-R203"


def test_only_a_full_journal_had_no_room(tmp_path):
    check_room(recorded_run(tmp_path))
    assert code_of(check_room, recorded_run(tmp_path, failed=2)) == "CAP-R203"


def test_two_threads_of_one_path_are_refused(tmp_path):
    second = CALL + len(call_record(0))
    third = second + len(thread_record())
    directory = write_journal(
        tmp_path,
        *(thread_record(), counter_record(THREAD), call_record(COUNTER)),
        *(thread_record(), counter_record(second), call_record(third)),
    )
    assert code_of(merge, directory) == "CAP-R204"


def replayed(directory, *, calls=1, derived=0):
    return write_journal(directory, thread_record(calls=calls, derived=derived))


def test_a_replay_that_consumed_all_is_one(tmp_path):
    profile = parse(merge(recorded_run(tmp_path)))
    assert check_consumed(replayed(tmp_path), profile) == ()


def test_a_replay_that_consumed_less_is_named_so(tmp_path):
    profile = parse(merge(recorded_run(tmp_path)))
    write_journal(tmp_path)
    with pytest.raises(CapsuleError, match="process 0, thread 0 made 0 of 1 call;") as caught:
        check_consumed(tmp_path, profile)
    assert caught.value.code == "CAP-R222"


def test_a_replay_that_was_given_fewer_bytes_is_named_so(tmp_path):
    profile = parse(merge(recorded_run(tmp_path)))
    longer = replace(profile.threads[0].calls[0], size=9, kept=bytes(9))
    thread = replace(profile.threads[0], calls=(longer,))
    with pytest.raises(CapsuleError, match="thread 0 was given 8 of 9 bytes") as caught:
        check_consumed(replayed(tmp_path), Profile(62, (thread,)))
    assert caught.value.code == "CAP-R222"


def test_a_replay_of_a_part_may_leave_some_over(tmp_path):
    profile = parse(merge(recorded_run(tmp_path)))
    write_journal(tmp_path)
    assert check_consumed(tmp_path, profile, partial=True) == ()


def test_a_replay_that_had_no_room_to_write_all_of_it_down_is_named_so(tmp_path):
    profile = parse(merge(recorded_run(tmp_path)))
    write_journal(tmp_path, thread_record(calls=1), failed=2)
    assert code_of(check_consumed, tmp_path, profile) == "CAP-R203"


def test_threads_with_derived_bytes_are_told(tmp_path):
    profile = parse(merge(recorded_run(tmp_path)))
    (thread,) = check_consumed(replayed(tmp_path, calls=3, derived=2), profile)
    assert (thread.process, thread.derived_calls, thread.derived_bytes) == ("0", 2, 16)


@pytest.mark.parametrize(
    ("reason", "recorded", "told"),
    [
        (1, (0, 0), "nothing was recorded for it"),
        (2, (0, 0), "only 3 calls were recorded"),
        (3, (5, 4), "recorded there: 4 bytes from /dev/urandom"),
    ],
)
def test_a_mismatch_is_told_exactly(tmp_path, reason, recorded, told):
    profile = parse(merge(recorded_run(tmp_path)))
    write_journal(tmp_path, mismatch_record(reason, recorded), failed=1)
    with pytest.raises(CapsuleError) as caught:
        check_consumed(tmp_path, profile)
    assert caught.value.code == "CAP-R221"
    assert (
        "process 0.1, thread 0-2 asked for 16 bytes from getrandom as its call 3, at offset 24"
        in str(caught.value)
    )
    assert told in str(caught.value)


def test_a_thread_without_calls_is_refused_as_no_writer_lists_it():
    data = serialize(Profile(62, (ThreadProfile("0", "0", ()),)))
    with pytest.raises(CapsuleError) as caught:
        parse(data)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-R215", ExitCode.TAMPERED)
