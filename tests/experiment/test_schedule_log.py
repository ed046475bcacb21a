"""The schedule log: what is written is read, and nothing else is, whatever a file claims."""

import hashlib
import json
import tracemalloc
import zlib
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.schedule_log import MAX_HEADER_BYTES, ScheduleLog, parse_schedule

SPEC = "5" * 64


def log_of(actors, updates, spec=SPEC):
    """Make a log of updates, each ``[(actor, lag), ...]``."""
    played, lags = (array("H", [slot[i] for slots in updates for slot in slots]) for i in (0, 1))
    return ScheduleLog(spec, actors, len(updates[0]) if updates else 1, played, lags)


SMALL = log_of(5, [[(0, 0), (1, 0)], [(4, 1), (2, 0)], [(0, 1), (3, 2)]])


def refused(data):
    with pytest.raises(CapsuleError) as refusal:
        parse_schedule(data)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-T341", ExitCode.TAMPERED)
    assert refusal.value.fix
    return refusal.value.message


def written(log, level=9, **claims):
    """Return a log as another program may write it, with a digest that is right."""
    line, _, compressed = log.document().partition(b"\n")
    return assembled(json.loads(line) | claims, zlib.decompress(compressed), level)


def assembled(header, planes, level=9):
    """Put a file together, with a digest that is right."""
    content = hashlib.sha256(line_of(header | {"content": "0" * 64}) + planes).hexdigest()
    return line_of(header | {"content": content}) + zlib.compress(planes, level)


def line_of(header):
    return json.dumps(header, separators=(",", ":"), sort_keys=True).encode() + b"\n"


# --- what is written is read ----------------------------------------------------------------------


@st.composite
def logs(draw):
    actors = draw(st.sampled_from([1, 2, 255, 256, 257, 65_535, 65_536]) | st.integers(1, 65_536))
    batch = draw(st.integers(1, min(4, actors)))
    updates = draw(st.integers(0, 6))
    late = draw(st.sampled_from([0, 1, 255, 256, 300]))  # how large the first lags may be
    chosen = []
    for update in range(updates):
        ends = st.sampled_from([0, actors - 1]) | st.integers(0, actors - 1)
        names = draw(st.lists(ends, min_size=batch, max_size=batch, unique=True))
        chosen.append([(name, draw(st.integers(0, min(update, late)))) for name in names])
    log = log_of(actors, chosen, spec=f"{draw(st.integers(0, 2**256 - 1)):064x}")
    return log if updates else ScheduleLog(log.spec, actors, batch, log.played, log.lags)


@pytest.mark.slow
@settings(deadline=None)
@given(logs())
def test_a_log_is_read_as_it_was_written(log):
    document = log.document()
    assert parse_schedule(document) == log
    assert parse_schedule(document).document() == document
    assert log.updates == len(log.played) // log.batch


@pytest.mark.parametrize("actors", [1, 255, 256, 257, 65_535, 65_536])
@pytest.mark.parametrize("updates", [255, 256, 257, 700])
def test_numbers_above_255_take_two_bytes(actors, updates):
    """The last update has the largest lag that it can have: its version is the first."""
    late = [[(0, 0)]] * (updates - 1) + [[(actors - 1, updates - 1)]]
    log = log_of(actors, late)
    line, _, compressed = log.document().partition(b"\n")
    widths = [1 if actors <= 256 else 2, 1 if updates <= 256 else 2]
    assert json.loads(line)["bytes_of"] == widths
    assert len(zlib.decompress(compressed)) == updates * sum(widths)
    assert parse_schedule(log.document()) == log
    assert list(log.slots(updates - 1)) == [(actors - 1, 0)]


def test_the_longest_lag_is_65535():
    log = log_of(1, [[(0, 0)]] * 65_535 + [[(0, 65_535)]])
    assert list(parse_schedule(log.document()).slots(65_535)) == [(0, 0)]


def test_the_file_is_what_its_description_says():
    line, _, compressed = SMALL.document().partition(b"\n")
    assert json.loads(line) | {"content": None} == {
        "schema": "capsule/schedule/v1",
        "spec": SPEC,
        "actors": 5,
        "batch": 2,
        "updates": 3,
        "bytes_of": [1, 1],
        "content": None,
    }
    assert zlib.decompress(compressed) == bytes([0, 1, 4, 2, 0, 3, 0, 0, 1, 0, 1, 2])
    assert SMALL.document() == written(SMALL)
    wide = log_of(258, [[(257, 0)]])
    assert zlib.decompress(wide.document().partition(b"\n")[2]) == b"\x01\x01\x00"


def test_slots_are_actors_and_versions():
    assert [list(SMALL.slots(update)) for update in range(3)] == [
        [(0, 0), (1, 0)],
        [(4, 0), (2, 1)],
        [(0, 1), (3, 0)],
    ]


@pytest.mark.parametrize("level", range(10))
def test_the_digest_is_of_what_it_says_whatever_compressed_it(level):
    log = parse_schedule(written(SMALL, level))
    assert log == SMALL
    assert log.digest() == SMALL.digest()


def test_another_log_has_another_digest():
    others = [
        log_of(6, [[(0, 0), (1, 0)], [(4, 1), (2, 0)], [(0, 1), (3, 2)]]),
        log_of(5, [[(1, 0), (0, 0)], [(4, 1), (2, 0)], [(0, 1), (3, 2)]]),
        log_of(5, [[(0, 0), (1, 0)], [(4, 1), (2, 0)], [(0, 1), (3, 1)]]),
        log_of(5, [[(0, 0), (1, 0)], [(4, 1), (2, 0)]]),
        ScheduleLog(SPEC, 5, 1, SMALL.played, SMALL.lags),
        ScheduleLog("6" * 64, 5, 2, SMALL.played, SMALL.lags),
    ]
    assert len({log.digest() for log in [SMALL, *others]}) == 7


def test_a_plausible_log_of_256_actors_has_about_one_and_a_half_bytes_an_unroll():
    """Actors that take 1 +- 0.2 for an unroll, learned 32 at a time as they become ready."""
    random = np.random.default_rng(0)
    ready, version = random.lognormal(0, 0.2, 256), np.zeros(256, int)
    updates = []
    for update in range(2_000):
        first = np.argsort(ready)[:32]
        updates.append([(int(actor), update - int(version[actor])) for actor in first])
        ready[first] = ready[first].max() + random.lognormal(0, 0.2, 32)
        version[first] = update
    size = len(log_of(256, updates).document())
    assert 0.5 < size / (2_000 * 32) < 1.6


# --- what was changed is not ----------------------------------------------------------------------


def test_every_truncation_is_refused():
    document = SMALL.document()
    for size in range(len(document)):
        refused(document[:size])


def test_every_flipped_bit_is_refused_or_changes_nothing():
    """A compressed stream has bits that say nothing of its content."""
    document = SMALL.document()
    content = document.index(b"\n") + 1
    for place in range(len(document)):
        for bit in range(8):
            changed = bytearray(document)
            changed[place] ^= 1 << bit
            try:
                log = parse_schedule(bytes(changed))
            except CapsuleError as error:
                assert error.code == "CAP-T341"
            else:
                assert place >= content
                assert log == SMALL


@settings(deadline=None)
@given(st.data())
def test_any_other_byte_is_refused_or_changes_nothing(data):
    document = SMALL.document()
    changed = bytearray(document)
    for place in data.draw(st.sets(st.integers(0, len(document) - 1), min_size=1, max_size=3)):
        changed[place] = data.draw(st.integers(0, 255))
    try:
        assert parse_schedule(bytes(changed)) == SMALL
    except CapsuleError as error:
        assert error.code == "CAP-T341"


@pytest.mark.slow
@settings(deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_refused(data):
    refused(data)
    refused(SMALL.document() + data + b"\0")
    refused(SMALL.document().partition(b"\n")[0] + b"\n" + data)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ([[(0, 0), (1, 0)], [(2, 0), (2, 1)]], "has an actor twice in update 1"),
        ([[(0, 0), (5, 0)]], "has actor 5 in update 0, but there are 5"),
        ([[(0, 0), (1, 0)], [(2, 0), (3, 2)]], "has a version before the first in update 1"),
        ([[(0, 1), (1, 0)]], "has a version before the first in update 0"),
    ],
)
def test_what_no_run_can_have_done_is_refused(updates, message):
    assert message in refused(log_of(5, updates).document())


@pytest.mark.parametrize(
    "claims",
    [
        {"schema": "capsule/schedule/v2"},
        {"spec": "5" * 63},
        {"spec": "G" * 64},
        {"actors": 0},
        {"actors": 65_537},
        {"actors": True},
        {"actors": "5"},
        {"actors": 5.0},
        {"batch": 0},
        {"batch": -2},
        {"updates": -1},
        {"bytes_of": [1]},
        {"bytes_of": [1, 3]},
        {"bytes_of": [0, 1]},
        {"more": 1},
    ],
)
def test_a_header_of_another_form_is_refused(claims):
    assert "has a header of another form" in refused(written(SMALL, **claims))


def test_one_schedule_has_one_header():
    line, _, compressed = SMALL.document().partition(b"\n")
    wide = np.frombuffer(zlib.decompress(compressed), np.uint8).astype("<u2").tobytes()
    header = json.loads(line)
    assert "canonical" in refused(assembled(header | {"bytes_of": [2, 2]}, wide))
    spaced = json.dumps(header, sort_keys=True).encode()
    assert refused(spaced + b"\n" + compressed)
    twice = line[:-1] + b',"updates":3}'
    assert refused(twice + b"\n" + compressed)


def test_what_follows_the_planes_is_refused():
    refused(SMALL.document() + b"\0")
    refused(SMALL.document() + SMALL.document().partition(b"\n")[2])


# --- what claims too much -------------------------------------------------------------------------

HUGE = [10**6, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**30, 10**400]


def peak_of(action):
    """Return the most bytes that an action has at a time; one that counts to 10^400 never ends."""
    tracemalloc.start()
    action()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("batch", [2, *HUGE])
@pytest.mark.parametrize("updates", [0, 3, *HUGE])
def test_sizes_that_are_not_there_are_not_made(updates, batch):
    if (updates, batch) == (3, 2):
        return
    data = written(SMALL, updates=updates, batch=batch)
    assert peak_of(lambda: refused(data)) < 1 << 20


@pytest.mark.parametrize("claimed", [12, 1 << 20, 1 << 40])
def test_a_bomb_is_not_unpacked(claimed):
    bomb = zlib.compress(bytes(1 << 26), 9)
    header = json.loads(SMALL.document().partition(b"\n")[0])
    header |= {"batch": 2, "updates": claimed // 4, "actors": 2}
    assert peak_of(lambda: refused(line_of(header) + bomb)) < 8 << 20


def test_a_header_has_an_end():
    assert "has no header line" in refused(b" " * (MAX_HEADER_BYTES + 1) + SMALL.document())
    assert "has no header line" in refused(b"")
    refused(b'{"a":' * 100_000 + b"\n")
