"""Layers are made once, several at a time, and used again only while nobody wrote to them."""

import hashlib
import json
import os
import shutil
import tarfile
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.canonical import sha256_file
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.image.archives.layers import TarEntry, file_entry
from capsule.image.assembly import making
from capsule.image.assembly.assemble import assemble
from capsule.image.assembly.making import Layer, Plan, find_layer, layer_key, make_layers


def plan(name, made=None, content=b"content"):
    """Plan a layer of one file; its name is added to ``made`` when it is made."""

    def entries(_stack):
        if made is not None:
            made.append(name)
        return [file_entry(f"etc/{name}", "a test", content)]

    return Plan(name, layer_key(name, [content.hex()]), entries)


def files_of(layer):
    with tarfile.open(layer.path) as archive:
        return {each.name: archive.extractfile(each).read() for each in archive if each.isfile()}


def kept(cache):
    return sorted(path.name for path in cache.folder("derived").iterdir())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)


@given(one=JSON, other=JSON)
def test_equal_inputs_alone_have_equal_keys(one, other):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (layer_key("wheels", one) == layer_key("wheels", other)) is same
    assert layer_key("wheels", one) != layer_key("code", one)


def test_the_order_of_names_is_no_part_of_a_key():
    assert layer_key("a", {"x": 1, "y": 2}) == layer_key("a", {"y": 2, "x": 1})
    assert layer_key("a", [1, 2]) != layer_key("a", [2, 1])


def test_layers_are_returned_in_the_order_of_their_plans(cache):
    names, said, made = ["b", "a", "d", "c", "f", "e"], [], []
    found = make_layers([plan(name, made) for name in names], cache, said.append)
    assert said == [f"assembling layer {name}" for name in names]
    assert sorted(made) == sorted(names)
    for name, (layer, facts) in zip(names, found, strict=True):
        data = layer.path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        assert layer == Layer(name, f"sha256:{digest}", layer.path, len(data))
        assert files_of(layer) == {f"etc/{name}": b"content"}
        content = hashlib.sha256(b"content").hexdigest()
        assert facts == {"etc": "directory", f"etc/{name}": f"file 0644 {content}"}


def test_only_layers_that_are_new_are_made(cache):
    made, said = [], []
    first = make_layers([plan("a", made)], cache, said.append)
    both = make_layers([plan("b", made), plan("a", made)], cache, said.append)
    assert both[1] == first[0]
    assert made == ["a", "b"]
    assert said == ["assembling layer a", "assembling layer b"]
    assert make_layers([], cache, said.append) == []


def test_a_layer_with_other_inputs_is_another(cache):
    ((one, _), (two, _)) = make_layers([plan("a"), plan("a", content=b"other")], cache, print)
    assert one.diff_id != two.diff_id
    assert (files_of(one), files_of(two)) == ({"etc/a": b"content"}, {"etc/a": b"other"})


def test_a_layer_is_found_without_writing_anything(cache):
    assert find_layer(plan("a"), cache) is None
    assert not cache.root.exists()
    ((layer, _),) = make_layers([plan("a")], cache, print)
    before = {path: path.stat().st_ctime_ns for path in cache.root.rglob("*")}
    assert find_layer(plan("a"), cache) == layer
    assert find_layer(plan("b"), cache) is None
    assert {path: path.stat().st_ctime_ns for path in cache.root.rglob("*")} == before


@pytest.mark.parametrize("damage", ["archive", "record", "fields", "list", "no archive"])
def test_a_layer_that_was_written_to_is_not_found_but_made_again(cache, damage):
    ((layer, facts),) = make_layers([plan("a")], cache, print)
    (record,) = cache.folder("derived").glob("*.json")
    if damage == "archive":
        layer.path.write_bytes(layer.path.read_bytes()[:-1] + b"x")
    elif damage == "no archive":
        layer.path.unlink()
    else:
        record.write_text({"record": "{", "fields": "{}", "list": "[]"}[damage])
    assert find_layer(plan("a"), cache) is None
    made = []
    assert make_layers([plan("a", made)], cache, print) == [(layer, facts)]
    assert made == ["a"]
    assert find_layer(plan("a"), cache) == layer


def test_a_layer_that_fails_leaves_nothing_and_stops_the_others(cache):
    def fail(_stack):
        raise CapsuleError("CAP-I108", "a device", fix="None.")

    def slow():
        for _ in range(400):
            time.sleep(0.01)
            yield b"x"

    endless = TarEntry("etc/slow", "a test", "file", size=400, content=slow)
    plans = [
        Plan("bad", layer_key("bad", []), fail),
        Plan("slow", layer_key("slow", []), lambda _: [endless]),
    ]
    with pytest.raises(CapsuleError, match="CAP-I108"):
        make_layers(plans, cache, print)
    assert kept(cache) == []
    assert [*cache.folder("scratch").iterdir()] == []
    # The layer that was stopped can be made later.
    assert len(make_layers([plan("slow")], cache, print)) == 1


def test_a_layer_that_cannot_be_written_names_its_folder(cache, monkeypatch):
    def full(_entries, _write):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(making, "write_tar", full)
    with pytest.raises(CapsuleError) as caught:
        make_layers([plan("a")], cache, print)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-I111", ExitCode.BUILD_FAILED)
    folder = cache.root / "derived"
    expected = f"layer a cannot be written to {folder}: No space left on device"
    assert caught.value.message == expected
    assert "CAPSULE_CACHE" in caught.value.fix
    assert kept(cache) == []


# --- with real packages ---------------------------------------------------------------------------


def test_a_layer_that_was_copied_is_hashed_and_not_made_again(tiny):
    """A cache that was restored from elsewhere has other inodes and times."""
    first, told = tiny.assemble(), []
    shutil.copytree(tiny.cache.root, tiny.folder / "copy")
    shutil.rmtree(tiny.cache.root)
    (tiny.folder / "copy").rename(tiny.cache.root)
    supplied = {"code": tiny.code_layer}
    assert assemble(tiny.lock(), tiny.cache, supplied=supplied, progress=told.append) == first
    assert told == []


@pytest.mark.parametrize("damage", ["truncate", "remove", "record", "change"])
def test_a_damaged_layer_is_made_again(tiny, damage):
    first = tiny.assemble()
    path = first.layers[0].path
    if damage == "truncate":
        os.truncate(path, 1000)
    elif damage == "remove":
        path.unlink()
    elif damage == "change":  # with its size and its date
        times = path.stat()
        data = path.read_bytes()
        path.write_bytes(data[:-2000] + b"x" + data[-1999:])
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    else:
        path.with_suffix(".json").write_text('{"size": "what')
    assert tiny.assemble() == first
    assert sha256_file(path) == first.layers[0].diff_id.removeprefix("sha256:")


def test_a_full_cache_folder(tiny, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    lock = tiny.lock()
    monkeypatch.setattr(making, "write_tar", full)
    with pytest.raises(CapsuleError, match="No space left on device") as caught:
        tiny.assemble_lock(lock)
    assert caught.value.code == "CAP-I111"
