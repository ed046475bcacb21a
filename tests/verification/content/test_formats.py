"""Files whose bytes differ, compared by what they say: made by the real libraries, then bent."""

import gzip
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save as save_safetensors

from capsule.verification.content.formats import compare_content
from capsule.verification.content.parts import MAX_DEPTH, Context
from tests.verification.content.comparing import (
    CONTEXT,
    TIMES,
    compare,
    event,
    npy,
    npz,
    saved,
    summary,
    zipped,
)

SEEDS = [
    zipped({"a": b"1"}),
    saved({"w": torch.ones(2)}),
    pickle.dumps({"a": [1, 2.5, "x", b"y"]}),
    gzip.compress(b"text\n"),
    npy(np.ones(3)),
    npz(a=np.ones(2)),
    save_safetensors({"a": np.ones(2)}, {"k": "v"}),
    event(1.0, 2, "loss", 0.5),
    b'{"a": [1, {"b": "c"}]}',
    b"a,b\n1,2\n",
]


@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    st.integers(0, 40),
)
def test_no_bent_file_breaks_the_comparison_or_is_taken_for_equal(seed, changes, cut):
    bent = bytearray(seed[: max(1, len(seed) - cut)])
    for place, value in changes:
        bent[place % len(bent)] = value
    for left, right in ((seed, bytes(bent)), (bytes(bent), seed)):
        found = compare(left, right, "x.csv")
        assert found.count >= 1
        assert found.parts


@given(st.binary(max_size=200), st.binary(max_size=200), st.sampled_from([s[:6] for s in SEEDS]))
def test_no_bytes_break_the_comparison(left, right, magic):
    assert compare(magic + left, magic + right).parts


@pytest.mark.parametrize(
    ("make", "name", "chosen"),
    [
        (lambda n: zipped({"a": b"%d" % n}), "file", "zip"),
        (lambda n: saved({"w": torch.tensor([float(n)])}), "file", "zip"),
        (lambda n: npz(a=np.array([n])), "file.csv", "zip"),
        (lambda n: gzip.compress(b"%d" % n, mtime=0), "file", "gzip"),
        (lambda n: npy(np.array([n])), "file", "numpy array"),
        (lambda n: pickle.dumps([n]), "file", "pickle"),
        (lambda n: save_safetensors({"a": np.array([n])}), "file", "safetensors"),
        (lambda n: event(1.0, 2, "loss", float(n)), "file", "TensorBoard events"),
        (lambda n: b'{"a": %d}' % n, "file", "JSON"),
        (lambda n: b"[%d]" % n, "file", "JSON"),
        (lambda n: b'{"a": %d}\n{"a": 0}\n' % n, "file", "JSON lines"),
        (lambda n: b"a,b\n%d,2\n" % n, "file.csv", "CSV"),
        (lambda n: b"a,b\n%d,2\n" % n, "file.txt", "text"),
        (lambda n: b"\xff%d" % n, "file", "bytes"),
    ],
)  # fmt: skip
def test_the_bytes_of_both_files_choose_the_format(make, name, chosen):
    assert compare(make(1), make(2), name).format == chosen


@pytest.mark.parametrize(
    ("left", "right", "chosen"),
    [
        (b'{"a": 1}', b"[1]", "text"),  # each begins otherwise
        (b'{"a": 1', b'{"a": 2', "text"),
        (b"PK\x03\x04 1", b"PK\x03\x04 2", "text"),
        (b"\x1f\x8b\x08\xff1", b"\x1f\x8b\x08\xff2", "bytes"),
        (b"\x80\x02N.1", b"\x80\x02N.2", "bytes"),
        (b"[" * 100_000, b"[" * 99_999, "text"),  # too deep to be read
        (b"", b"1", "text"),
        (b"a\n1\n", b"a\n2\n", "text"),
    ],
)
def test_files_that_are_not_of_the_format_are_compared_in_a_looser_one(left, right, chosen):
    assert compare(left, right, "x.csv").format == chosen
    assert compare(right, left, "x.csv").format == chosen


def nested(depth, data):
    for _ in range(depth):
        data = gzip.compress(data, mtime=0)
    return data


@pytest.mark.parametrize("depth", range(MAX_DEPTH + 3))
def test_files_within_files_are_compared_up_to_a_depth(depth):
    found = compare(nested(depth, b"a\nb\n"), nested(depth, b"a\nc\n"))
    where = found.parts[0].where
    assert where.count("content") == min(depth, MAX_DEPTH + 1)
    # The file at the greatest depth is compared as bytes.
    assert ("line 2" in where) == (depth <= MAX_DEPTH)
    assert summary(found) == [(where, "content")]


def test_a_file_at_a_greater_depth_is_compared_as_bytes():
    for depth, chosen in ((MAX_DEPTH, "JSON"), (MAX_DEPTH + 1, "bytes")):
        context = Context(TIMES, compare_content, CONTEXT.budget, depth)
        assert compare_content("x", b"[1]", b"[2]", context).format == chosen
