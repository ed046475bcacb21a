"""Random streams: the published algorithm, independence, and resumption."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import SeedsSpec
from capsule.training.state.streams import Stream, make_streams

MASK = 2**64 - 1

# Counter words, key words, output words: the philox4x64 10 lines of Random123's kat_vectors.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (MASK, MASK, MASK, MASK),
        (MASK, MASK),
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


def philox4x64_10(counter, key):
    """Philox4x64-10 in Python integers, written from Salmon et al. 2011, section 3.3."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = x0 * 0xD2E7470EE14C6C93, x2 * 0xCA5A826395121157
        x0, x1, x2, x3 = (
            (second >> 64) ^ x1 ^ k0,
            second & MASK,
            (first >> 64) ^ x3 ^ k1,
            first & MASK,
        )
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return x0, x1, x2, x3


def key_words(stream):
    key = bytes.fromhex(stream.key)
    return int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")


def expected_words(stream, count):
    blocks = [philox4x64_10((n, 0, 0, 0), key_words(stream)) for n in range(count // 4 + 1)]
    return [word for block in blocks for word in block][:count]


def drawn_words(stream, count):
    """The top 53 bits of the next words."""
    return [int(value * 2**53) for value in stream.uniforms(count)]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_reference_gives_the_known_answers(counter, key, output):
    assert philox4x64_10(counter, key) == output


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_numpy_gives_the_known_answers(counter, key, output):
    before = (sum(word << (64 * i) for i, word in enumerate(counter)) - 1) % 2**256
    generator = np.random.Philox(key=key[0] | key[1] << 64, counter=before)
    assert tuple(int(word) for word in generator.random_raw(4)) == output


def test_words_are_the_counter_mode_of_the_key():
    stream = Stream("exploration", 7, 3)
    assert drawn_words(stream, 11) == [word >> 11 for word in expected_words(stream, 11)]


def test_key_is_the_documented_hash():
    text = json.dumps(["capsule/stream/v1", 7, "exploration", 3], separators=(",", ":"))
    assert Stream("exploration", 7, 3).key == hashlib.sha256(text.encode()).hexdigest()[:32]


def test_known_stream_never_changes():
    stream = Stream("environment", 0)
    drawn = [stream.integer(1000) for _ in range(4)]
    assert drawn == [int((word >> 11) * 2.0**-53 * 1000) for word in expected_words(stream, 4)]
    assert (stream.key, drawn) == KNOWN_STREAM


KNOWN_STREAM = ("6b15caba0bd87f0e4f29530fc4f7b8b3", [354, 26, 482, 386])


def test_digest_chains_the_words_of_each_call():
    stream = Stream("minibatch", 1)
    words = expected_words(stream, 5)
    stream.uniform()
    stream.integers(10, 4)
    head = bytes(32)
    for call in (words[:1], words[1:]):
        data = b"".join(word.to_bytes(8, "little") for word in call)
        head = hashlib.sha256(head + data).digest()
    assert (stream.draws, stream.digest) == (5, head.hex())


def test_one_draw_and_many_draws_give_the_same_values():
    one, many = Stream("s", 5), Stream("s", 5)
    assert [one.uniform() for _ in range(9)] == many.uniforms(9).tolist()
    assert [one.integer(17) for _ in range(9)] == many.integers(17, 9).tolist()


@given(st.integers(1, 2**53))
@settings(deadline=None, max_examples=200)
def test_largest_uniform_stays_below_every_bound(bound):
    assert int((1 - 2.0**-53) * bound) < bound


def test_draws_lie_in_range_and_reach_every_value():
    stream = Stream("s", 0)
    values = stream.integers(6, 6000)
    assert values.dtype == np.int64
    assert np.bincount(values, minlength=6).min() > 850
    assert len(np.bincount(values)) == 6
    uniforms = stream.uniforms(6000)
    assert uniforms.dtype == np.float64
    assert 0 <= uniforms.min() < 0.01
    assert 0.99 < uniforms.max() < 1


@pytest.mark.parametrize("bound", [0, -1, 2**53 + 1])
def test_impossible_bounds_are_refused(bound):
    stream = Stream("s", 0)
    with pytest.raises(ValueError, match="bound"):
        stream.integer(bound)
    with pytest.raises(ValueError, match="bound"):
        stream.integers(bound, 2)
    assert stream.draws == 0


def test_name_seed_and_index_each_give_another_stream():
    streams = [Stream("a", 1, 1), Stream("b", 1, 1), Stream("a", 2, 1), Stream("a", 1, 2)]
    assert len({stream.key for stream in streams}) == 4
    assert len({stream.uniform() for stream in streams}) == 4


def test_drawing_from_one_stream_never_shifts_another():
    untouched, used = make_streams(SeedsSpec(root=3)), make_streams(SeedsSpec(root=3))
    used["environment"].uniforms(1000)
    assert used["minibatch"].uniforms(8).tolist() == untouched["minibatch"].uniforms(8).tolist()


def test_an_override_changes_its_stream_alone():
    plain = make_streams(SeedsSpec(root=3))
    other = make_streams(SeedsSpec(root=3, streams={"no-op": 4}))
    changed = {name for name in plain if plain[name].key != other[name].key}
    assert changed == {"no-op"}
    assert other["no-op"].key == Stream("no-op", 4).key


def draw(stream, calls):
    results = []
    for kind, size in calls:
        if kind == "one":
            results.append(stream.uniform())
        elif kind == "many":
            results.append(stream.uniforms(size).tolist())
        else:
            results.append(stream.integers(size + 1, size).tolist())
    return results


CALLS = st.lists(
    st.tuples(st.sampled_from(["one", "many", "below"]), st.integers(0, 9)), max_size=12
)


@given(before=CALLS, after=CALLS, seed=st.integers(0, 2**53 - 1))
@settings(deadline=None, max_examples=100)
def test_restoring_at_any_point_continues_equal(before, after, seed):
    whole = Stream("s", seed)
    draw(whole, before)
    state = json.loads(json.dumps(whole.state()))
    resumed = Stream("s", seed)
    resumed.uniforms(3)
    resumed.restore(state)
    assert draw(resumed, after) == draw(whole, after)
    assert resumed.profile() == whole.profile()


def test_state_of_another_stream_is_refused():
    with pytest.raises(CapsuleError, match=r"CAP-T201 stream 's'"):
        Stream("s", 1).restore(Stream("s", 2).state())


def test_profile_says_what_was_drawn():
    stream = Stream("no-op", 9)
    stream.uniforms(6)
    profile = stream.profile()
    assert (profile.name, profile.seed, profile.draws) == ("no-op", 9, 6)
    assert (profile.key, profile.digest) == (stream.key, stream.digest)
