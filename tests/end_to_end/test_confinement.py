"""A stranger's program, verified in real containers: what it tries, and what becomes of it.

``hostile_program/`` is its source tree. Its seed chooses the deed, so that one image serves all:
each bundle is the first run's with another seed, signed again.
"""

import io
import json
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.claims import ProgramClaims
from capsule.bundle.keys import load_public
from capsule.bundle.trust import TrustPolicy
from capsule.engine import supervise
from capsule.engine.connection import connect
from capsule.experiment import beneath, contract
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.errors import CapsuleError
from capsule.image.cache import Cache
from capsule.report.progress import PlainReporter, SilentReporter
from capsule.report.terminal import show_report
from capsule.verification.execution.grading import SIGNERS
from capsule.verification.request import Mode, VerifyRequest
from capsule.verification.verify import verify
from tests.end_to_end.conftest import forge, run
from tests.end_to_end.hostile_program.attempts import ATTEMPTS, LISTENER, REFUSED, SECRET
from tests.hostile.genuine import edit_json

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.xdist_group("programs")]

PROGRAM = Path(__file__).parent / "hostile_program"
SPEC = """\
schema: capsule/spec/v1
name: hostile
image: {packages: []}
code: {path: tree}
trainer: {command: [python, main.py, "{seed}"]}
seeds: {root: 0}
limits: {memory_mb: 256, processes: 32, disk_mb: 64, minutes: 20, temporary_mb: 16}
"""
SAFE = {*range(0x20, 0x7F), ord("\n")}


@pytest.fixture(scope="module")
def machine():
    """Something of the machine's that a program could get hold of: a socket, a variable."""
    patch = pytest.MonkeyPatch()
    patch.setenv(SECRET, "of the machine")
    with socket.socket(socket.AF_UNIX) as listener:
        with suppress(OSError):  # another session's listener serves as well
            listener.bind(LISTENER)
            listener.listen()
        yield
    patch.undo()


@pytest.fixture(scope="module")
def attempted(machine, workplace):
    """The run that tries everything which should fail."""
    folder = workplace / "hostile"
    shutil.copytree(PROGRAM, folder / "tree", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "hostile.yaml").write_text(SPEC)
    return run(workplace, "--engine", "docker", "--embed-image", spec="hostile/hostile.yaml")


@pytest.fixture(scope="module")
def deed(attempted, tmp_path_factory):
    """Return a function that verifies the bundle of a deed: the report, and what was printed."""

    def verify_deed(number, engine="docker", on_event=lambda: None, **limits):
        class Watched(PlainReporter):
            def event(self, event):
                on_event()
                super().event(event)

        def choose(files):
            for name in (run_bundle.LOCK, run_bundle.JOB):
                edit_json(files, name, lambda it: it["spec"]["seeds"].update(root=number))
            digest = sha256_hex(files[run_bundle.LOCK])
            edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(lock=digest))

        folder = tmp_path_factory.mktemp("deed")
        bundle = forge(attempted, choose, folder / "bundle.tar")
        printed = io.StringIO()
        request = VerifyRequest(
            bundle=bundle,
            trust=TrustPolicy(keys=(load_public(attempted.public),)),
            mode=Mode.parse("full"),
            engine=engine,
            limits=limits,
        )
        return verify(request, Cache(), Watched(printed)), printed.getvalue()

    return verify_deed


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """After each test: no container, and nothing where re-executions take place."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield
    assert list(tmp_path.glob("capsule-verify-*")) == []
    client = connect("docker")
    try:
        ours = {"label": "capsule.run"}
        found = client.containers.list(all=True, filters=ours, ignore_removed=True)
        assert not [it for it in found if str(tmp_path) in str(it.attrs["Mounts"])]
    finally:
        client.close()


def refusal(report):
    assert report.verdict == "inconclusive", report
    return report.error["code"], report.error["message"]


def outcomes(made):
    """Return what became of each attempt in a run."""
    with open_bundle(made.bundle, [load_public(made.public)]) as bundle:
        return json.loads(bundle.files[run_bundle.WORKSPACE + "attempts.json"].read_bytes())


def test_every_attempt_is_refused(attempted):
    assert outcomes(attempted) == dict.fromkeys(ATTEMPTS, REFUSED)


def test_under_bubblewrap_nothing_succeeds_but_to_execute_what_is_in_memory(attempted, workplace):
    assert attempted
    made = run(workplace, "--engine", "bwrap", spec="hostile/hostile.yaml")
    found = outcomes(made)
    assert {name for name in ATTEMPTS if found[name] != REFUSED} == {
        "execute: in /tmp",
        "execute: in /dev/shm",
        "execute: code mapped from /tmp",
    }


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_every_attempt_is_refused_in_verification(deed, engine):
    if engine == "podman":
        try:
            connect("podman").close()
        except CapsuleError as error:
            pytest.skip(error.message)
    report, _ = deed(0, engine)
    assert report.verdict == "reproduced-bitwise", report.summary  # everything refused again


def test_the_signers_own_image_is_loaded_without_a_name_and_said_to_be_his(attempted):
    trusted = [load_public(attempted.public)]
    with open_bundle(attempted.bundle, trusted) as bundle:
        identity = bundle.read(run_bundle.CLAIMS, ProgramClaims).image.config
    client = connect("docker")
    try:
        client.images.remove(identity, force=True)
        request = VerifyRequest(
            bundle=attempted.bundle,
            trust=TrustPolicy(keys=tuple(trusted)),
            mode=Mode.parse("full"),
            engine="docker",
            image="embedded",
        )
        report = verify(request, Cache(), SilentReporter())
        assert client.images.get(identity).tags == []
    finally:
        client.close()
    assert report.verdict == "reproduced-bitwise"
    assert report.summary.endswith(SIGNERS["embedded"])
    assert (report.image_source, report.image_rebuilt) == ("embedded", False)


def test_a_fork_bomb_that_floods_the_log_and_never_ends_is_ended(deed, monkeypatch, tmp_path):
    monkeypatch.setattr(supervise, "GRACE_SECONDS", 0.2)
    for module in ("supervise", "containers"):
        monkeypatch.setattr(f"capsule.engine.{module}.LOG_BYTES", 1 << 20)
    children = []

    def let_time_be_up():
        for path in tmp_path.glob("capsule-verify-*/run/workspace/children"):
            children.append(int(path.read_text()))
            monkeypatch.setattr(supervise, "MINUTE", 0)

    logs = []
    original = supervise.write_log
    monkeypatch.setattr(
        "capsule.engine.containers.write_log",
        lambda chunks, path: (original(chunks, path), logs.append(path.stat().st_size)),
    )
    report, _ = deed(1, on_event=let_time_be_up, processes=20)
    code, message = refusal(report)
    assert (code, "its time ran out" in message) == ("CAP-E010", True)
    assert 0 < children[0] < 20  # the verifier's limit; the bundle's is 32
    assert [0 < size <= 1 << 20 for size in logs] == [True]


def test_a_full_disk_and_used_up_memory_end_a_program(deed):
    code, message = refusal(deed(2)[0])
    assert (code, "disk space ran out" in message) == ("CAP-E010", True)
    report, _ = deed(3)
    assert report.verdict == "inconclusive"
    assert report.error["code"] in {"CAP-E010", "CAP-T302"}  # the whole of it, or the child only
    assert "137" in report.error["message"] or "signal 9" in report.error["message"]


def test_folders_deeper_than_a_path_are_refused_and_removed(deed):
    code, message = refusal(deed(4)[0])
    assert (code, "deep" in message) == ("CAP-E040", True)


def test_more_files_than_can_be_watched_are_refused_and_removed(deed, monkeypatch):
    monkeypatch.setattr(beneath, "MAX_ENTRIES", 2_500)
    code, message = refusal(deed(5)[0])
    assert (code, "2,500 entries" in message) == ("CAP-E040", True)


def test_a_pipe_where_a_document_belongs_is_refused_by_name_and_not_waited_for(deed):
    code, message = refusal(deed(6)[0])
    assert (code, contract.ENTROPY_PROFILE in message) == ("CAP-E041", True)


def test_a_program_that_kills_all_it_can_only_ends_itself(deed):
    assert refusal(deed(8)[0])[0] == "CAP-E010"


def test_oddities_are_told_apart_and_shown_inert(deed, tmp_path):
    modes = set()

    def look():
        modes.update(path.stat().st_mode & 0o777 for path in tmp_path.glob("capsule-verify-*"))

    report, printed = deed(7, on_event=look)
    assert report.verdict == "not-reproduced"
    assert modes == {0o700}  # nobody else gets at what it left there, whatever it did to its own
    assert 0 < printed.count("click") <= 50  # of 2,000 events
    assert len({item.component for item in report.differences}) > 3
    shown = io.StringIO()
    show_report(report, Console(file=shown, width=120, force_terminal=False))
    for text in (shown.getvalue(), printed):
        assert {ord(character) for character in text} <= {*SAFE, 0xFFFD, ord("…")}
    assert "[bold]" in shown.getvalue()
