"""Pinning data sets when a spec is locked: paths, addresses, and pins that no longer hold."""

import functools
import http.server
import os
import threading
from pathlib import Path

import pytest

from capsule.experiment.canonical import sha256_hex
from capsule.experiment.lock import Lock
from capsule.experiment.spec import DataSpec
from capsule.host.errors import CapsuleError
from capsule.image.cache import Cache
from capsule.image.data import capture as data_capture
from capsule.image.data.capture import capture_data
from capsule.image.data.listing import Meter, list_data, pin_of
from capsule.image.data.places import find_data, read_listing


def capture(spec, base, cache, earlier=(), told=None):
    said = (lambda _: None) if told is None else told.append
    return capture_data({"digits": DataSpec(**spec)}, base, cache, earlier, said)["digits"]


def lock_with(pin):
    return Lock.model_construct(data={"digits": pin})


def test_no_section_pins_nothing(tmp_path, cache):
    assert capture_data(None, tmp_path, cache, [], print) is None


def test_a_folder_is_pinned_and_found_again(folder, cache):
    pin = capture({"path": "digits"}, folder.parent, cache)
    assert pin == pin_of({"1.txt": f"file 2 {sha256_hex(b'1' + bytes([10]))}"})
    found = find_data(lock_with(pin), cache, print)["digits"]
    assert (found.path, found.below, found.url) == (folder, "", None)
    assert found.check("digits", print) == pin


@pytest.mark.parametrize(
    ("spec", "said"),
    [({}, "neither path nor url"), ({"path": "nowhere"}, "nowhere does not exist")],
)
def test_a_data_set_must_be_somewhere(tmp_path, cache, spec, said):
    with pytest.raises(CapsuleError, match=said) as caught:
        capture(spec, tmp_path, cache)
    assert caught.value.code == "CAP-L301"


def test_a_path_that_leads_nowhere_is_named(tmp_path, cache):
    (tmp_path / "loop").symlink_to("loop")
    for path, code, said in (
        ("loop", "CAP-L301", "loop does not exist"),
        ("a" * 300, "CAP-L305", "cannot be read: File name too long"),
    ):
        with pytest.raises(CapsuleError, match=said) as caught:
            capture({"path": path}, tmp_path, cache)
        assert caught.value.code == code
        assert f"data.digits.path '{path}'" in caught.value.message


@pytest.mark.parametrize("path", [".", "", "..", "../specs", "/"])
def test_a_data_set_does_not_hold_the_lock_that_pins_it(tmp_path, cache, path):
    (tmp_path / "specs").mkdir()
    with pytest.raises(CapsuleError, match="has the spec in it") as caught:
        capture({"path": path}, tmp_path / "specs", cache)
    assert caught.value.code == "CAP-L302"


def test_a_changed_file_is_named_until_it_is_pinned_again(folder, cache):
    pin = capture({"path": "digits"}, folder.parent, cache)
    (folder / "1.txt").write_text("2\n3\n")
    with pytest.raises(CapsuleError, match=r"1\.txt now has 4 bytes, and had 2") as caught:
        capture({"path": "digits"}, folder.parent, cache, [lock_with(pin)])
    assert caught.value.code == "CAP-L308"
    changed = capture({"path": "digits"}, folder.parent, cache)
    assert changed != pin
    assert capture({"path": "digits"}, folder.parent, cache, [lock_with(changed)]) == changed


def test_a_data_set_is_hashed_once_until_something_in_it_changes(folder, cache, monkeypatch):
    hashed = []
    monkeypatch.setattr(Meter, "sha256", lambda _, path: hashed.append(path.name) or "0" * 64)
    for _ in range(2):
        capture({"path": "digits"}, folder.parent, cache)
    assert hashed == ["1.txt"]
    os.utime(folder / "1.txt", ns=(0, 0))  # which changes the time of change, as any writing does
    capture({"path": "digits"}, folder.parent, cache)
    assert hashed == ["1.txt"] * 2
    for _ in range(2):
        capture({"path": "digits/1.txt"}, folder.parent, cache)
    assert hashed == ["1.txt"] * 3


def test_another_machine_names_the_digests(folder, cache, tmp_path):
    pin = capture({"path": "digits"}, folder.parent, cache)
    (folder / "1.txt").write_text("2\n")
    with pytest.raises(CapsuleError, match="its digest is"):
        capture({"path": "digits"}, folder.parent, Cache(tmp_path / "other"), [lock_with(pin)])


def test_a_study_may_give_a_name_to_other_data(folder, cache):
    pin = capture({"path": "digits"}, folder.parent, cache)
    (folder / "1.txt").write_text("2\n")
    spec = {"digits": DataSpec(path="digits")}
    earlier = [lock_with(pin)]
    found = capture_data(spec, folder.parent, cache, earlier, print, may_change=True)
    assert found["digits"] != pin


def test_the_expected_digest_is_of_the_file_or_of_the_listing(folder, cache):
    listing = pin_of(list_data("digits", folder, lambda _: sha256_hex(b"1\n"))).sha256
    for expected in (sha256_hex(b"1\n"), listing):
        capture({"path": "digits/1.txt", "sha256": expected}, folder.parent, cache)
    (folder / "2.txt").write_text("2\n")
    with pytest.raises(CapsuleError, match="but the data set has") as caught:
        capture({"path": "digits", "sha256": listing}, folder.parent, cache)
    assert caught.value.code == "CAP-L307"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and ``short``, which is promised to be longer than it is.

    It is busy when it is asked for something with ``busy`` in its query for the first time.
    """

    def end_headers(self):
        if self.path.endswith(".gz"):
            self.send_header("Content-Encoding", "gzip")  # as some servers say of such files
        super().end_headers()

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path.endswith("?busy") and self.server.asked.count(self.path) == 1:
            self.send_error(503)
            return
        if self.path != "/short":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", "9999")
        self.end_headers()
        self.wfile.write(b"short")

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def server(folder):
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        server.address = f"http://127.0.0.1:{server.server_port}"
        yield server
        server.shutdown()
        thread.join()


def test_a_file_is_downloaded_once(folder, cache, server):
    told = []
    (folder / "data set.csv.gz").write_bytes(b"\x1f\x8b, not decoded")
    spec = {"url": f"{server.address}/data%20set.csv.gz?version=1"}
    pin = capture(spec, folder.parent, cache, told=told)
    assert told == ["downloading the data set 'digits'"]
    name = "data set.csv.gz"
    assert read_listing(pin.sha256, cache) == {
        name: f"file 15 {sha256_hex(bytes([0x1F, 0x8B]) + b', not decoded')}"
    }
    found = find_data(lock_with(pin), cache, print)["digits"]
    assert (found.below, found.url) == (name, spec["url"])
    assert found.check("digits", print) == pin
    assert capture(spec, folder.parent, cache, [lock_with(pin)]) == pin
    assert len(server.asked) == 1


def test_a_server_that_is_busy_is_asked_again(folder, cache, server):
    pin = capture({"url": f"{server.address}/1.txt?busy"}, folder.parent, cache)
    assert (pin.size, len(server.asked)) == (2, 2)


def test_an_expected_file_in_the_cache_is_not_downloaded(folder, cache, server):
    spec = {"url": f"{server.address}/1.txt", "sha256": sha256_hex(b"1\n")}
    pin = capture(spec, folder.parent, cache)
    elsewhere = {**spec, "url": "http://127.0.0.1:1/1.txt"}
    for again in (spec, elsewhere):
        assert capture(again, folder.parent, cache) == pin
    assert len(server.asked) == 1
    # It was not downloaded from the other address.
    assert find_data(lock_with(pin), cache, print)["digits"].url == spec["url"]


def test_a_login_in_an_address_is_refused_before_anything_is_asked_for(folder, cache, server):
    address = server.address.replace("http://", "http://alice:secret@")
    with pytest.raises(CapsuleError, match="every bundle would publish") as caught:
        capture({"url": f"{address}/1.txt"}, folder.parent, cache)
    assert caught.value.code == "CAP-L306"
    assert server.asked == []


def test_a_file_that_vanishes_while_a_folder_is_looked_at_is_left_out(folder, cache, monkeypatch):
    def vanished(_):
        raise FileNotFoundError(2, "No such file or directory")

    expected = capture({"path": "digits"}, folder.parent, cache)
    monkeypatch.setattr(data_capture, "folder_state", vanished)
    assert capture({"path": "digits"}, folder.parent, cache) == expected


def test_a_folder_whose_name_is_not_text_is_pinned_and_not_remembered(folder, cache, tmp_path):
    base = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    base.mkdir()
    folder.rename(base / "digits")
    pin = capture({"path": "digits"}, base, cache)
    with pytest.raises(CapsuleError, match="is not on this machine"):
        find_data(lock_with(pin), cache, print)
    found = find_data(lock_with(pin), cache, print, {"digits": base / "digits"})["digits"]
    assert found.check("digits", print) == pin


def test_a_digest_of_the_listing_gives_the_file_that_it_lists(folder, cache, server):
    spec = {"url": f"{server.address}/1.txt"}
    pin = capture(spec, folder.parent, cache)
    assert capture({**spec, "sha256": pin.sha256}, folder.parent, cache) == pin
    assert len(server.asked) == 1
    found = find_data(lock_with(pin), cache, print)["digits"]
    assert found.path.read_bytes() == b"1\n"


def test_a_file_of_the_same_name_at_another_address_is_downloaded(folder, cache, server):
    pin = capture({"url": f"{server.address}/1.txt"}, folder.parent, cache)
    (folder / "newer").mkdir()
    (folder / "newer" / "1.txt").write_text("2\n")
    spec = {"url": f"{server.address}/newer/1.txt"}
    with pytest.raises(CapsuleError, match="has changed since it was locked") as caught:
        capture(spec, folder.parent, cache, [lock_with(pin)])
    assert caught.value.code == "CAP-L308"
    newer = capture(spec, folder.parent, cache)
    assert read_listing(newer.sha256, cache) == {
        "1.txt": f"file 2 {sha256_hex(b'2' + bytes([10]))}"
    }


def test_a_folder_may_become_a_download(folder, cache, server):
    pin = capture({"path": "digits"}, folder.parent, cache)
    spec = {"url": f"{server.address}/1.txt"}
    assert capture(spec, folder.parent, cache, [lock_with(pin)]) == pin


@pytest.mark.parametrize("tail", ["%2e%2e", "a%0Ab", "a%00", "%2F", ""])
def test_an_address_without_the_name_of_a_file_is_named(folder, cache, tail):
    url = f"http://127.0.0.1:1/{tail}"
    with pytest.raises(CapsuleError, match="is not the address of a file") as caught:
        capture({"url": url}, folder.parent, cache)
    assert caught.value.code == "CAP-L306"
    assert url in caught.value.message


def test_a_damaged_note_of_a_hashed_data_set_is_made_again(folder, cache):
    pin = capture({"path": "digits"}, folder.parent, cache)
    for note in (cache.data.root / "states").iterdir():
        note.write_bytes(b"\xff")
    assert capture({"path": "digits"}, folder.parent, cache) == pin


def test_a_file_that_changed_at_its_address_is_refused(folder, cache, server, tmp_path):
    spec = {"url": f"{server.address}/1.txt"}
    pin = capture(spec, folder.parent, cache)
    (folder / "1.txt").write_text("2\n")
    with pytest.raises(CapsuleError, match="has changed since it was locked") as caught:
        capture(spec, folder.parent, Cache(tmp_path / "other"), [lock_with(pin)])
    assert caught.value.code == "CAP-L308"


@pytest.mark.parametrize("path", ["nowhere", "short", ""])
def test_a_download_that_fails_names_the_address(folder, cache, server, path):
    with pytest.raises(
        CapsuleError, match=rf"data\.digits\.url '{server.address}/{path}'"
    ) as caught:
        capture({"url": f"{server.address}/{path}"}, folder.parent, cache)
    assert caught.value.code == "CAP-L306"
    assert not list(Path(cache.root).glob("data/objects/*/*"))


def test_a_server_that_does_not_answer_is_named(tmp_path, cache):
    with pytest.raises(CapsuleError, match="cannot be downloaded") as caught:
        capture({"url": "http://127.0.0.1:1/a"}, tmp_path, cache)
    assert caught.value.code == "CAP-L306"


def test_path_and_address_contradict_each_other():
    with pytest.raises(ValueError, match="contradict each other"):
        DataSpec(path="a", url="https://example.org/a")
