"""The journal: what processes wrote down is read, and what contradicts itself is rejected."""

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from capsule.entropy.journal import (
    FILE_NAME,
    Call,
    EntropyCall,
    Mismatch,
    Thread,
    ToldReport,
    Use,
    kept_size,
    read_journal,
    totals,
)
from capsule.experiment.errors import CapsuleError
from tests.entropy.journals import (
    CALL,
    COUNTER,
    THREAD,
    call_record,
    counter_record,
    mismatch_record,
    record,
    recorded_run,
    thread_record,
    told_record,
    write_journal,
)

PAGE = Path(__file__).parents[2] / "docs" / "random-profiles.md"


def refused(directory, code):
    """Return what is said of a journal that cannot be read."""
    with pytest.raises(CapsuleError) as caught:
        read_journal(directory)
    assert caught.value.code == code
    assert str(directory / FILE_NAME) in caught.value.message
    assert caught.value.fix.startswith("Start the run again")
    return caught.value.message


def changed(directory, offset, value):
    """Write bytes into a journal."""
    path = directory / FILE_NAME
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)
    return directory


# ---- what is read ----


def test_a_recorded_call_is_read_with_its_thread_and_library(tmp_path):
    journal = read_journal(recorded_run(tmp_path))
    call = Call(EntropyCall.GETRANDOM, "libc.so.6", 8, b"12345678")
    assert journal.threads == (Thread("0", "0", 1, 8, 0, 0, (call,)),)
    assert journal.uses == (Use("0", "0", EntropyCall.GETRANDOM, "libc.so.6", 1, 8),)
    assert (journal.machine, journal.told, journal.mismatch, journal.full) == (62, (), None, False)


def test_an_empty_journal_is_that_of_a_run_that_asked_for_nothing(tmp_path):
    journal = read_journal(write_journal(tmp_path))
    assert (journal.threads, journal.uses, journal.told) == ((), (), ())


@pytest.mark.parametrize(("failed", "full"), [(0, False), (1, False), (2, True)])
def test_a_journal_says_whether_it_was_full(tmp_path, failed, full):
    assert read_journal(recorded_run(tmp_path, failed=failed)).full is full


def test_threads_are_sorted_by_process_and_thread(tmp_path):
    paths = [(b"0.1x", b"0"), (b"0", b"0-2"), (b"0", b"0"), (b"0.10", b"0")]
    write_journal(tmp_path, *(thread_record(*each) for each in paths))
    found = [(each.process, each.thread) for each in read_journal(tmp_path).threads]
    assert found == [("0", "0"), ("0", "0-2"), ("0.10", "0"), ("0.1x", "0")]


def test_calls_of_two_threads_are_told_apart(tmp_path):
    second = COUNTER + len(counter_record(0))
    third = second + len(thread_record())
    write_journal(
        tmp_path,
        *(thread_record(), counter_record(THREAD)),
        *(thread_record(thread=b"0-1"), counter_record(second, source=5)),
        *(call_record(third, b"b"), call_record(COUNTER, b"a"), call_record(third, b"c")),
    )
    found = {each.thread: each.recorded for each in read_journal(tmp_path).threads}
    assert [call.kept for call in found["0"]] == [b"a"]
    assert [call.kept for call in found["0-1"]] == [b"b", b"c"]
    assert {call.source for call in found["0-1"]} == {EntropyCall.DEVICE}


def test_counters_of_one_source_and_library_are_added_up(tmp_path):
    write_journal(tmp_path, thread_record(), *(counter_record(THREAD, source=each) for each in
                  (2, 1, 2)))  # fmt: skip
    assert read_journal(tmp_path).uses == (
        Use("0", "0", EntropyCall.GETRANDOM, "libc.so.6", 1, 8),
        Use("0", "0", EntropyCall.GETENTROPY, "libc.so.6", 2, 16),
    )


@pytest.mark.parametrize("size", [0, 1, 32])
def test_small_calls_are_kept_whole(tmp_path, size):
    kept = bytes(range(size))
    write_journal(tmp_path, thread_record(), counter_record(THREAD), call_record(COUNTER, kept))
    (call,) = read_journal(tmp_path).threads[0].recorded
    assert (call.size, call.kept) == (size, kept)


def test_what_lies_beyond_the_used_part_is_not_read(tmp_path):
    directory = recorded_run(tmp_path)
    expected = read_journal(directory)
    with (directory / FILE_NAME).open("ab") as stream:
        stream.write(b"anything at all")
    assert read_journal(directory) == expected


def test_a_path_may_fill_its_field(tmp_path):
    name = b"0" * 192
    write_journal(tmp_path, thread_record(process=name))
    assert read_journal(tmp_path).threads[0].process == name.decode()


def test_the_name_of_a_library_is_any_bytes(tmp_path):
    counter = record(2, struct.pack("<4QI4x64s", THREAD, 0, 1, 8, 1, b"lib\xff\n.so"))
    write_journal(tmp_path, thread_record(), counter)
    assert read_journal(tmp_path).uses[0].caller == "lib\\xff\n.so"


def test_a_call_under_way_when_the_process_was_killed_does_not_count(tmp_path):
    records = thread_record(), counter_record(THREAD), call_record(COUNTER)
    write_journal(tmp_path, *records, call_record(COUNTER, ready=0), call_record(COUNTER, b"last"))
    assert [call.kept for call in read_journal(tmp_path).threads[0].recorded] == [
        b"12345678",
        b"last",
    ]


def test_what_processes_were_told_is_read(tmp_path):
    write_journal(tmp_path, told_record(), told_record(process=b"0", clock=0, cores=0))
    first, second = read_journal(tmp_path).told
    assert list(first.model_dump().values()) == ["0", "system", 10, 2, True, 3, None, 1]
    assert list(second.model_dump().values()) == ["0x", "virtual", 10, 2, True, 3, 4, 1]


def test_an_unfinished_record_of_any_kind_does_not_count(tmp_path):
    unfinished = [record(kind, bytes(400), ready=0) for kind in (1, 2, 3, 4, 5, 9)]
    records = thread_record(), counter_record(THREAD), call_record(COUNTER), *unfinished
    whole = read_journal(write_journal(tmp_path, *records))
    assert whole == read_journal(recorded_run(tmp_path))


# ---- replays ----


@pytest.mark.parametrize(
    ("reason", "recorded", "expected"),
    [
        (1, (0, 0), (None, False)),
        (2, (0, 0), (None, True)),
        (3, (5, 4), ((EntropyCall.DEVICE, 4), True)),
    ],
)
def test_the_call_at_which_a_replay_stopped_is_read(tmp_path, reason, recorded, expected):
    found = read_journal(write_journal(tmp_path, mismatch_record(reason, recorded))).mismatch
    assert (found.process, found.thread, found.call, found.offset) == ("0.1", "0-2", 3, 24)
    assert found.requested == (EntropyCall.GETRANDOM, 16)
    assert (found.recorded, found.known) == expected


def test_the_first_mismatch_stopped_the_run(tmp_path):
    others = mismatch_record(1, process=b"0.2"), mismatch_record(2, process=b"0.3")
    write_journal(tmp_path, mismatch_record(1), *others)
    assert read_journal(tmp_path).mismatch.process == "0.1"


@pytest.mark.parametrize(
    ("recorded", "known", "said"),
    [
        ((EntropyCall.DEVICE, 4), True, "recorded there: 4 bytes from /dev/urandom"),
        (None, True, "only 3 calls were recorded"),
        (None, False, "nothing was recorded for it"),
    ],
)
def test_a_mismatch_says_what_was_asked_for_and_what_was_recorded(recorded, known, said):
    mismatch = Mismatch("0.1", "0-2", 3, 24, (EntropyCall.GETRANDOM, 16), recorded, known)
    assert str(mismatch) == (
        "process 0.1, thread 0-2 asked for 16 bytes from getrandom as its call 3, at offset 24; "
        + said
    )


def test_a_mismatch_of_one_call_and_one_byte_is_written_in_the_singular():
    one = EntropyCall.GETRANDOM, 1
    assert str(Mismatch("0.1", "0-2", 1, 24, one, None, known=True)) == (
        "process 0.1, thread 0-2 asked for 1 byte from getrandom as its call 1, at offset 24; "
        "only 1 call was recorded"
    )
    recorded = str(Mismatch("0.1", "0-2", 1, 24, one, one, known=True))
    assert recorded.endswith("; recorded there: 1 byte from getrandom")


# ---- what is rejected ----


def test_a_run_without_a_journal_is_named_so(tmp_path):
    assert "cannot be read: No such file" in refused(tmp_path, "CAP-R201")


@pytest.mark.parametrize(
    "changes", [{"magic": b"anything"}, {"version": 2}, {"version": 4}, {"version": 0}]
)
def test_another_file_or_version_is_named_so(tmp_path, changes):
    message = refused(recorded_run(tmp_path, **changes), "CAP-R201")
    assert message.endswith("is not a journal of version 3")


@pytest.mark.parametrize(("size", "code"), [(0, "CAP-R201"), (8, "CAP-R201"), (24, "CAP-R202")])
def test_a_header_that_is_cut_off_is_no_journal(tmp_path, size, code):
    path = recorded_run(tmp_path) / FILE_NAME
    path.write_bytes(path.read_bytes()[:size])
    refused(tmp_path, code)


def test_a_journal_that_is_cut_off_is_refused_at_any_length(tmp_path):
    path = recorded_run(tmp_path) / FILE_NAME
    whole = path.read_bytes()
    for size in range(32, len(whole)):
        path.write_bytes(whole[:size])
        refused(tmp_path, "CAP-R202")


def test_only_a_file_is_read(tmp_path):
    """The program can write to the folder, and a link may lead anywhere."""
    (tmp_path / "other").mkdir()
    real = recorded_run(tmp_path / "other") / FILE_NAME
    (tmp_path / FILE_NAME).symlink_to(real)
    refused(tmp_path, "CAP-R201")
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    refused(tmp_path, "CAP-R201")


CAPACITY, USED, MACHINE = 16, 24, 12  # where the header has them


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (USED, struct.pack("<Q", 1 << 40)),
        (USED, struct.pack("<Q", 63)),
        (USED, struct.pack("<Q", 0)),
        (CAPACITY, struct.pack("<Q", 64)),
        (CAPACITY, struct.pack("<Q", (1 << 30) + 1)),
        (MACHINE, struct.pack("<I", 1 << 16)),
    ],
)
def test_a_journal_of_impossible_size_is_refused(tmp_path, offset, value):
    message = refused(changed(recorded_run(tmp_path), offset, value), "CAP-R202")
    assert message.endswith("states an impossible size or machine")


@pytest.mark.parametrize(
    "records",
    [
        (told_record(clock=3),),
        (told_record(is_sorted=2),),
        (told_record(cores=1025),),
        (counter_record(THREAD),),
        (thread_record(), call_record(THREAD)),
        (thread_record(process=b""),),
        (thread_record(), counter_record(THREAD, source=9)),
        (record(9, b"12345678"),),
        (record(1, b"12345678"),),
        (struct.pack("<3I4x", 0, 1, 1),),
        (thread_record(), struct.pack("<3I4x", 4096, 3, 1)),
        (
            thread_record(),
            counter_record(THREAD),
            record(3, struct.pack("<2Q", COUNTER, 1 << 60)),
        ),
    ],
)
def test_a_journal_that_contradicts_itself_is_refused(tmp_path, records):
    refused(write_journal(tmp_path, *records), "CAP-R202")


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ((record(9, b"12345678"),), "has an unknown record at 64"),
        ((record(1, b"12345678"),), "has an impossible record at 64"),
        ((record(9, b""), b"12345678"), "has an unknown record at 64"),
        ((record(9, b"", ready=0), b"12345678"), "is cut off at 80"),
        *(((record(kind, b""),), "has an impossible record at 64") for kind in range(1, 6)),
        # Records that would share the bytes of the ones after them.
        ((record(1, b"") * 50,), "has an impossible record at 64"),
        (
            (thread_record(), counter_record(THREAD), call_record(COUNTER, b"", size=8) * 9),
            f"has an impossible record at {CALL}",
        ),
        ((record(0, b""),), "has an unknown record at 64"),
        ((struct.pack("<3I4x", 12, 1, 1),), "has an impossible record at 64"),
        ((struct.pack("<3I4x", 20, 1, 0) + bytes(8),), "has an impossible record at 64"),
        ((counter_record(THREAD),), "has a count without a thread at 64"),
        ((thread_record(), counter_record(THREAD + 8)), f"a count without a thread at {COUNTER}"),
        ((thread_record(), call_record(THREAD)), f"has a call without a thread at {COUNTER}"),
        ((thread_record(thread=b""),), "has a record without a name"),
        ((thread_record(), counter_record(THREAD, source=8)), "names an unknown source, 8"),
        ((thread_record(), counter_record(THREAD, source=0)), "names an unknown source, 0"),
        ((mismatch_record(3, (9, 4)),), "names an unknown source, 9"),
        ((told_record(clock=3),), "has an impossible setting at 64"),
        (
            (thread_record(), counter_record(THREAD, size=1 << 53)),
            f"has an impossible count at {COUNTER}: 9,007,199,254,740,992",
        ),
        (
            (thread_record(), counter_record(THREAD, calls=2**64 - 1)),
            f"has an impossible count at {COUNTER}: 18,446,744,073,709,551,615",
        ),
        (
            (told_record(readings=1 << 51), told_record(readings=1 << 51)),
            f"has an impossible count at {64 + len(told_record())}: 2,251,799,813,685,248",
        ),
    ],
)
def test_the_place_of_a_contradiction_is_named(tmp_path, records, said):
    assert refused(write_journal(tmp_path, *records), "CAP-R202").endswith(said)


def test_no_more_calls_are_read_than_a_profile_can_contain(tmp_path, monkeypatch):
    monkeypatch.setattr("capsule.entropy.journal.MAX_CALLS", 3)
    records = thread_record(), counter_record(THREAD)
    write_journal(tmp_path, *records, *[call_record(COUNTER)] * 3)
    assert len(read_journal(tmp_path).threads[0].recorded) == 3
    write_journal(tmp_path, *records, *[call_record(COUNTER)] * 4)
    with pytest.raises(CapsuleError, match="asked for randomness more than 3 times") as caught:
        read_journal(tmp_path)
    assert caught.value.code == "CAP-R203"


@pytest.mark.parametrize("ready", [0, 1])
def test_a_journal_with_too_many_records_is_named_so(tmp_path, monkeypatch, ready):
    """Also those that no process finished take their time."""
    monkeypatch.setattr("capsule.entropy.journal.MAX_RECORDS", 3)
    more = record(5, bytes(32) + bytes(16) + b"0".ljust(192, b"\0"), ready=ready)
    read_journal(write_journal(tmp_path, *[more] * 3))
    with pytest.raises(CapsuleError, match="more than 3 records") as caught:
        read_journal(write_journal(tmp_path, *[more] * 4))
    assert caught.value.code == "CAP-R115"


@given(st.binary(max_size=120))
def test_any_bytes_behind_a_header_give_a_journal_or_a_coded_error(tmp_path_factory, data):
    directory = tmp_path_factory.getbasetemp()
    try:
        read_journal(write_journal(directory, data))
    except CapsuleError as error:
        assert error.code == "CAP-R202"


# ---- sources and sums ----


def test_sources_have_the_numbers_of_the_documentation():
    text = " ".join(PAGE.read_text().split())
    listed = text.partition("Sources: ")[2].partition(". Requests")[0]
    numbers = dict(re.findall(r"(\d) `?(a device|the name|[\w:]+)", listed))
    assert numbers == {
        "1": "getrandom",
        "2": "getentropy",
        "3": "arc4random",
        "4": "syscall",
        "5": "a device",
        "6": "std::random_device",
        "7": "the name",
    }
    assert {str(each.value) for each in EntropyCall} == numbers.keys()
    for number in "12346":
        assert numbers[number] in EntropyCall(int(number)).label


def test_every_source_has_a_name_of_its_own_in_reports():
    assert len({each.label for each in EntropyCall}) == len(EntropyCall) == 7


@given(st.integers(0, 2**64 - 1))
def test_no_more_than_32_bytes_are_kept(size):
    assert 0 <= kept_size(size) <= 32
    assert (kept_size(size) == size) is (size <= 32)


uses = st.builds(
    Use,
    process=st.sampled_from(["0", "0.1x"]),
    thread=st.sampled_from(["0", "0-2"]),
    source=st.sampled_from(EntropyCall),
    caller=st.sampled_from(["libc.so.6", "libcrypto.so.3"]),
    calls=st.integers(0, 9),
    bytes=st.integers(0, 99),
)


def key(use):
    return (use.process, use.thread, use.source, use.caller)


@examples(max_examples=40)
@given(st.lists(uses, max_size=8), st.randoms())
def test_totals_keep_the_sums_and_do_not_depend_on_the_order(given_uses, random):
    shuffled = random.sample(given_uses, len(given_uses))
    found = totals(given_uses)
    assert totals(shuffled) == totals(iter(found)) == found
    assert [key(each) for each in found] == sorted({key(each) for each in given_uses})
    for each in found:
        same = [use for use in given_uses if key(use) == key(each)]
        assert each.calls == sum(use.calls for use in same)
        assert each.bytes == sum(use.bytes for use in same)


# ---- answers ----


@pytest.mark.parametrize("cores", [1, 1024])
def test_a_number_of_processors_is_read(tmp_path, cores):
    (told,) = read_journal(write_journal(tmp_path, told_record(cores=cores))).told
    assert told.cores == cores
    assert ToldReport.parse(told.document()) == told


@pytest.mark.parametrize(("number", "clock"), [(0, "system"), (1, "fixed"), (2, "virtual")])
def test_clocks_have_the_numbers_of_the_interposer(tmp_path, number, clock):
    header = PAGE.parents[1] / "capsule/native/source/interposer/interposer.h"
    names = re.search(r"enum clock \{([^}]*)\}", header.read_text()).group(1)
    assert clock.upper() in names.split(",")[number]
    (told,) = read_journal(write_journal(tmp_path, told_record(clock=number))).told
    assert told.clock == clock
