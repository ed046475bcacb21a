"""Data sets in real runs: every engine sees the same, and what changes is noticed and named."""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import time

import pytest

from capsule.experiment import contract
from capsule.host.errors import ExitCode
from capsule.image.cache import Cache
from tests.end_to_end.conftest import capsule, forge, run
from tests.hostile.genuine import edit_json

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.xdist_group("programs")]

SPEC = """\
schema: capsule/spec/v1
name: reader
image: {packages: []}
code: {path: tree}
data:
  digits: {path: digits}
  label: {path: label.csv}
trainer: {command: [python, reader.py]}
limits: {memory_mb: 1024, minutes: 20}
"""
PROGRAM = """\
import hashlib, os
from pathlib import Path

folder = Path(os.environ["CAPSULE_DATA"])
for path in sorted(folder.rglob("*")):
    digest = path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest()
    print(path.relative_to(folder), digest)
"""
# It ends when it sees that a file has changed, which only the machine can do.
WAITING = """\
import time
from pathlib import Path

while Path("/data/digits/one").read_bytes() != b"changed":
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def folder(workplace):
    folder = workplace / "reader"
    (folder / "tree").mkdir(parents=True)
    (folder / "digits").mkdir()
    (folder / "reader.yaml").write_text(SPEC)
    (folder / "tree" / "reader.py").write_text(PROGRAM)
    (folder / "digits" / "one").write_bytes(bytes(range(256)) * 4096)
    (folder / "digits" / "link").symlink_to("one")
    (folder / "label.csv").write_text("1,2\n")
    for path in (folder / "digits", folder / "digits" / "one", folder / "label.csv"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="module")
def made(workplace, folder):
    return run(workplace, "--engine", "docker", "--embed-data", spec="reader/reader.yaml")


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """A cache with everything but data sets, as of another machine."""
    usual, other = Cache().root, tmp_path / "cache"
    other.mkdir()
    for path in usual.iterdir():
        if path.name not in ("data", "locks", "scratch", "use"):
            (other / path.name).symlink_to(path)
    monkeypatch.setenv("CAPSULE_CACHE", str(other))


def test_what_was_read_is_claimed_and_read_back(made, folder):
    one = hashlib.sha256((folder / "digits" / "one").read_bytes()).hexdigest()
    label = hashlib.sha256(b"1,2\n").hexdigest()
    printed = (made.directory / "work" / contract.STANDARD_OUTPUT).read_text()
    assert printed.splitlines() == [
        "digits False",
        f"digits/link {one}",
        f"digits/one {one}",
        "label False",
        f"label/label.csv {label}",
    ]
    with tarfile.open(made.bundle) as bundle:
        documents = {
            name: bundle.extractfile(name).read()
            for name in ("claims.json", "data/digits.json", "run/mechanisms.json", "run/data.json")
        }
    listed = {"link": "symlink one", "one": f"file {1 << 20} {one}"}
    assert json.loads(documents["data/digits.json"]) == listed
    claimed = json.loads(documents["claims.json"])["data"]
    assert claimed["digits"] == hashlib.sha256(documents["data/digits.json"]).hexdigest()
    read = json.loads(documents["run/data.json"])["sets"]
    assert claimed == {name: pin["sha256"] for name, pin in read.items()}
    assert json.loads(documents["run/mechanisms.json"])["surroundings"]["data"] == "read-only"


@pytest.mark.parametrize("engine", ["bwrap", "process"])
def test_every_engine_shows_a_run_the_same(made, workplace, tmp_path, engine):
    words = ("--engine", engine, "--output", tmp_path)
    again = run(workplace, *words, spec="reader/reader.yaml")
    printed = [each.directory / "work" / contract.STANDARD_OUTPUT for each in (made, again)]
    assert printed[0].read_bytes() == printed[1].read_bytes()
    assert (made.claim_id == again.claim_id) is (engine == "bwrap")


def test_a_bundle_that_carries_its_data_needs_nothing_else(made, workplace, empty_cache):
    done = made.verify(made.bundle, cwd=workplace)
    assert done.document["verdict"] == "reproduced-bitwise", done.errors


def test_a_bundle_that_names_its_data_asks_for_it(made, folder, workplace, tmp_path, empty_cache):
    def remove(files):
        for name in ("digits", "label"):
            del files[f"data/{name}.tar.zst"]

    named = forge(made, remove, tmp_path / "named.capsule.tar")
    done = made.verify(named, cwd=workplace)
    assert done.document["verdict"] == "inconclusive"
    assert done.document["error"]["code"] == "CAP-E046"
    shutil.copytree(folder / "digits", tmp_path / "digits", symlinks=True)
    shutil.copy(folder / "label.csv", tmp_path / "renamed")
    places = [f"digits={tmp_path / 'digits'}", f"label={tmp_path / 'renamed'}"]
    words = [word for place in places for word in ("--data", place)]
    done = made.verify(named, *words, cwd=workplace)
    assert done.document["verdict"] == "reproduced-bitwise", done.errors
    (tmp_path / "digits" / "one").write_bytes(b"changed")
    done = made.verify(named, *words, cwd=workplace)
    assert done.document["verdict"] == "inconclusive"
    assert "one now has 7 bytes, and had 1,048,576" in done.document["error"]["message"]


def test_a_forged_listing_or_archive_is_tampering(made, workplace, tmp_path):
    def lie(files):
        edit_json(files, "data/label.json", lambda listing: listing.update(other="folder"))

    def swap(files):
        files["data/label.tar.zst"] = files["data/digits.tar.zst"]

    for number, (change, code) in enumerate(((lie, "CAP-V040"), (swap, "CAP-V004"))):
        forged = forge(made, change, tmp_path / f"{number}.capsule.tar")
        done = made.verify(forged, "--mode", "integrity", cwd=workplace)
        assert done.document["verdict"] == "tampered"
        assert done.document["error"]["code"] == code


def test_a_changed_file_stops_a_run_before_it_begins(made, folder, workplace, tmp_path):
    shutil.copytree(folder, tmp_path / "copy", symlinks=True)
    (tmp_path / "copy" / "label.csv").write_text("3,4\n")
    words = ("run", "reader.yaml", "--key", made.key, "--output", tmp_path / "runs")
    done = capsule(*words, cwd=tmp_path / "copy")
    assert done.status == ExitCode.USAGE
    assert "label.csv now has the SHA-256" in done.errors
    lock = tmp_path / "copy" / "reader.lock.json"
    place = f"label={tmp_path / 'copy' / 'label.csv'}"
    words = ("run", lock, "--key", made.key, "--output", tmp_path / "runs", "--data", place)
    done = capsule(*words, cwd=workplace)
    assert done.status == ExitCode.BUILD_FAILED
    assert "label.csv now has the SHA-256" in done.errors
    done = capsule("lock", "reader.yaml", "--refresh-data", cwd=tmp_path / "copy")
    assert done.status == 0, done.errors


def test_a_file_that_changes_during_a_run_is_named_and_nothing_is_signed(made, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy", symlinks=True)
    (tmp_path / "copy" / "tree" / "reader.py").write_text(WAITING)
    words = ("run", "reader.yaml", "--key", made.key, "--output", tmp_path / "runs", "--quiet")
    command = [sys.executable, "-m", "capsule", *map(str, words)]
    with subprocess.Popen(
        command, cwd=tmp_path / "copy", stderr=subprocess.PIPE, text=True
    ) as process:
        while not list(tmp_path.glob("runs/*/work/runtime.json")):  # written before it starts
            assert process.poll() is None
            time.sleep(0.05)
        (tmp_path / "copy" / "digits" / "one").write_bytes(b"changed")
        _, errors = process.communicate()
    assert process.returncode == ExitCode.BUILD_FAILED
    assert "one now has 7 bytes, and had 1,048,576" in errors
    assert not list(tmp_path.glob("runs/*/*.capsule.tar"))


@pytest.mark.soak
def test_half_a_gigabyte_is_hashed_mounted_and_embedded(made, workplace, tmp_path):
    """Incompressible data, which is neither copied by a run nor read into memory."""
    folder = tmp_path / "large"
    (folder / "digits").mkdir(parents=True)
    with (folder / "digits" / "noise").open("wb") as stream:
        for number in range(500):
            stream.write(hashlib.shake_256(str(number).encode()).digest(1 << 20))
    shutil.copytree(workplace / "reader" / "tree", folder / "tree")
    (folder / "reader.yaml").write_text(SPEC.replace("  label: {path: label.csv}\n", ""))
    large = run(
        workplace, "--embed-data", "--output", tmp_path / "runs", spec=folder / "reader.yaml"
    )
    assert large.bundle.stat().st_size > 500 << 20
    shutil.rmtree(folder / "digits")
    done = made.verify(large.bundle, cwd=workplace)
    assert done.document["verdict"] == "reproduced-bitwise", done.errors
