"""Images as folders."""

import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.image.archives.layers import EPOCH, TarEntry, file_entry, write_tar
from capsule.image.assembly.making import Layer
from capsule.image.assembly.unpack import unpack, unpacked_root
from capsule.image.cache import Cache


@pytest.fixture
def make(tmp_path):
    """Return a function that makes an image of layers, each a list of entries."""

    def image(*layers):
        return SimpleNamespace(layers=tuple(layer(n, entries) for n, entries in enumerate(layers)))

    def layer(number, entries):
        path = tmp_path / f"{number}.tar"
        with path.open("wb") as stream:
            write_tar(entries, stream.write)
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        return Layer(str(number), f"sha256:{digest}", path, len(data))

    return image


def link(path, target):
    return TarEntry(path, "a test", "symlink", 0o777, target=target)


def test_layers_lie_over_one_another(make, tmp_path):
    lower = [file_entry("usr/bin/tool", "a", b"tool", 0o755), link("bin", "usr/bin")]
    upper = [file_entry("usr/share/text", "b", b"text"), link("etc/localtime", "/usr/share/text")]
    unpack(make(lower, upper), tmp_path / "root")
    root = tmp_path / "root"
    assert (root / "bin/tool").read_text() == "tool"
    assert (root / "etc/localtime").readlink() == Path("/usr/share/text")
    assert (root / "usr/bin/tool").stat().st_mode & 0o7777 == 0o755
    for name in ("usr", "usr/bin/tool", "etc", "out"):
        assert (root / name).stat().st_mtime == EPOCH
    assert {path.name for path in root.iterdir()} == {
        *("bin", "usr", "etc", "bytecode", "data", "dev", "out", "proc", "sys", "tmp")
    }
    assert "127.0.0.1 localhost" in (root / "etc/hosts").read_text()


@pytest.mark.parametrize(
    "layers",
    [
        ([link("etc", "/outside")], [file_entry("etc/passwd", "b", b"x")]),
        ([link("out", "/outside")],),
        ([file_entry("etc", "a", b"x")],),
        ([file_entry("usr/.wh.bin", "a", b"")],),
        ([file_entry("a/b", "a", b"x")], [file_entry("a", "b", b"x")]),
    ],
)
def test_no_link_is_followed_and_nothing_is_taken_away(make, tmp_path, layers):
    with pytest.raises(CapsuleError) as refused:
        unpack(make(*layers), tmp_path / "root")
    assert refused.value.code == "CAP-I107"


def test_a_layer_that_changed_since_it_was_made(make, tmp_path):
    image = make([file_entry("text", "a", b"one")])
    image.layers[0].path.write_bytes(b"other")
    with pytest.raises(CapsuleError) as refused:
        unpacked_root(image, Cache(tmp_path / "cache"), lambda _: None)
    assert refused.value.code == "CAP-E004"
    assert not list((tmp_path / "cache" / "roots").glob("*.state"))


def test_a_root_is_made_once_and_again_when_it_was_changed(make, tmp_path):
    image, cache, said = make([file_entry("text", "a", b"one")]), Cache(tmp_path / "cache"), []
    root = unpacked_root(image, cache, said.append)
    assert unpacked_root(image, cache, said.append) == root
    assert len(said) == 1
    (root / "text").write_text("two")
    unpacked_root(image, cache, said.append)
    assert (root / "text").read_text() == "one"
    root.with_name(f"{root.name}.state").unlink()  # as after an interruption
    unpacked_root(image, cache, said.append)
    assert len(said) == 3


def test_several_processes_unpack_one_image_once(make, tmp_path):
    image, said = make([file_entry("text", "a", b"one")]), []
    threads = [
        threading.Thread(target=unpacked_root, args=(image, Cache(tmp_path / "cache"), said.append))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 1
