"""Every case of the corpus: the flawed bundle is refused, its twin is not, and nothing happens."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capsule.cli.main import app
from capsule.verification.execution import admission
from tests.hostile.case import Case
from tests.hostile.corpus import CASES

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
STARTING = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn"}
CONNECTING = {"socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo"}
PAGE = Path(__file__).parents[2] / "docs" / "hostile-bundles.md"
READING_CODE = {"pickle.find_class", "ctypes.dlopen"}
TWO_PATHS = {"os.rename", "os.link", "os.symlink", "shutil.move"}
CHANGING = {
    *("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.truncate"),
    *("os.chmod", "os.chown", "os.utime", "shutil.rmtree", "shutil.move"),
}


@dataclass
class Watch:
    """What the interpreter itself reports while it is on (PEP 578)."""

    on: bool = False
    allowed: tuple[str, ...] = ()
    seen: list[str] = field(default_factory=list)

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.on:
            return
        if event in STARTING | CONNECTING | READING_CODE:
            self.seen.append(f"{event} {arguments!r:.200}")
        elif event in CHANGING or (event == "open" and self._writes(arguments)):
            paths = arguments[: 2 if event in TWO_PATHS else 1]
            named = [os.fsdecode(p) for p in paths if isinstance(p, str | bytes | os.PathLike)]
            if not all(map(self._allows, named)):
                self.seen.append(f"{event} {arguments!r:.200}")

    def _writes(self, arguments: tuple[object, ...]) -> bool:
        flags = arguments[2]
        return isinstance(flags, int) and bool(flags & WRITING)

    def _allows(self, path: str) -> bool:
        # Names without a folder are relative to a descriptor of the staging folder: the working
        # folder is looked at afterwards.
        return "/" not in path or path.startswith(self.allowed)


WATCH = Watch()
sys.addaudithook(WATCH.hook)


@dataclass(frozen=True)
class Outcome:
    status: int
    document: dict
    shown: str


@pytest.fixture
def ask(tmp_path, monkeypatch) -> Iterator[object]:
    """Present a case to ``capsule verify``, in an empty folder, and look at what it did."""
    opened: list[object] = []
    monkeypatch.setattr(admission, "open_engine", lambda *choice, **_: opened.append(choice))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    places = {name: tmp_path / name for name in ("case", "work", "home", "staging", "report")}
    for path in places.values():
        path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places["staging"]))
    monkeypatch.setenv("HOME", str(places["home"]))
    monkeypatch.chdir(places["work"])

    def ask(case: Case, *, hostile: bool) -> Outcome:
        shown = case.present(places["case"], hostile)
        before = _facts(places["case"])
        WATCH.allowed = (str(places["staging"]), str(places["report"]))
        # A flawed bundle is asked for everything, so that only its flaw stands in the way.
        mode = "full" if hostile else "integrity"
        report = places["report"] / "report.json"
        arguments = ["verify", str(shown.bundle), *shown.options, "--mode", mode, "--quiet"]
        WATCH.on, WATCH.seen = True, []
        try:
            done = CliRunner().invoke(app, [*arguments, "--report", str(report)])
        finally:
            WATCH.on = False
        assert WATCH.seen == []
        assert opened == []
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert _facts(places["case"]) == before
        for name in ("work", "home", "staging"):
            assert list(places[name].iterdir()) == [], name
        document = json.loads(report.read_text()) if report.exists() else {}
        return Outcome(done.exit_code, document, done.output)

    return ask


def _facts(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {path.name: path.lstat() for path in folder.iterdir()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def _name(case: Case) -> str:
    return f"{case.number:02d}-{case.name}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_flawed_bundle_is_refused(case, ask):
    outcome = ask(case, hostile=True)
    assert case.code in outcome.shown
    if outcome.document:
        assert outcome.document["error"]["code"] == case.code
        newer = case.code == "CAP-B145"  # what it says may be known to a later version
        verdicts = ("inconclusive",) if newer else ("tampered", "untrusted")
        assert outcome.document["verdict"] in verdicts
        assert outcome.status == (4 if newer else 3)
    else:  # the reader's own file or option is wrong
        assert outcome.status == 2
    assert all(line.isprintable() for line in outcome.shown.split("\n"))


@pytest.fixture(scope="module")
def intact() -> set[bytes]:
    """Digests of the bundles that were found intact, with their options: many cases share one."""
    return set()


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_its_twin_is_intact(case, ask, intact, tmp_path):
    (tmp_path / "twin").mkdir()
    shown = case.present(tmp_path / "twin", False)
    options = [option.replace(str(tmp_path), "") for option in shown.options]
    digest = hashlib.sha256(repr(options).encode() + shown.bundle.read_bytes()).digest()
    if digest in intact:
        return
    outcome = ask(case, hostile=False)
    assert (outcome.status, outcome.document["verdict"]) == (0, "intact"), outcome.shown
    intact.add(digest)


def test_names_are_unique():
    assert [name for name, count in Counter(map(_name, CASES)).items() if count > 1] == []


def test_the_page_names_the_code_of_every_case():
    rows = re.findall(r"^\| (\d[\d, ]*) \|[^|]*\|([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    codes = {int(number): cell for numbers, cell in rows for number in numbers.split(",")}
    missing = [case for case in CASES if case.code.removeprefix("CAP-") not in codes[case.number]]
    assert missing == []


@pytest.mark.slow
def test_the_generator_is_repeatable_and_says_what_to_expect(tmp_path):
    chosen = [case for case in CASES if case.number in (1, 9, 16, 19)]
    # Where Capsule was installed from a wheel, the checkout is not among the places of modules.
    code = (
        "import runpy, sys, pathlib, capsule\n"
        "sys.path[:] = [place for place in sys.path if place != {root!r}]\n"
        "script = runpy.run_path({root!r} + '/tests/hostile/generate.py')\n"
        "for case in script['CASES']:\n"
        "    if case.number in (1, 9, 16, 19): script['write'](case, pathlib.Path({folder!r}))"
    )
    root = str(Path(__file__).parents[2])
    for folder in (tmp_path / "one", tmp_path / "two"):
        text = code.format(root=root, folder=str(folder))
        subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, cwd=tmp_path)
    found = {path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*")}
    assert {path.parts[0] for path in found} == {_name(case) for case in chosen}
    for case in chosen:
        flawed, passing = (
            (tmp_path / "one" / _name(case) / f"{name}.capsule.tar").read_bytes()
            for name in ("flawed", "passing")
        )
        assert flawed != passing or case.number == 16  # whose flaw is in the reader's own spec
        readme = (tmp_path / "one" / _name(case) / "README.md").read_text()
        assert case.code in readme
        named = re.findall(r"(?:flawed|passing)[\w.-]+", readme)
        assert all((tmp_path / "one" / _name(case) / name).is_file() for name in named)


def test_the_watch_sees(tmp_path):
    WATCH.allowed, WATCH.seen = (str(tmp_path / "allowed"),), []
    (tmp_path / "allowed").mkdir()
    WATCH.on = True
    try:
        (tmp_path / "allowed" / "file").write_text("")
        assert WATCH.seen == []
        (tmp_path / "file").write_text("")
        (tmp_path / "folder").mkdir()
        (tmp_path / "link").symlink_to("x")
        subprocess.run(["true"], check=True)
    finally:
        WATCH.on = False
    assert [line.split()[0] for line in WATCH.seen[:3]] == ["open", "os.mkdir", "os.symlink"]
    assert any(line.startswith("subprocess.Popen") for line in WATCH.seen)
