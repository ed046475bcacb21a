"""A receipt that cannot be written, or a full disk, costs no verdict."""

import errno
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from capsule.bundle.keys import generate
from capsule.cli.main import app
from capsule.host.errors import CapsuleError, ExitCode
from capsule.image.cache import Cache
from capsule.machine.kind import MachineKind
from capsule.report.progress import SilentReporter
from capsule.verification import verify as verification
from capsule.verification.request import Mode, VerifyRequest
from capsule.verification.verdict import Report
from tests.hostile import genuine


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def sign(bundle, key, *others):
    arguments = ["verify", bundle, "--sign", key, "--allow-untrusted", "--report", "/dev/null"]
    return CliRunner().invoke(app, [*map(str, (*arguments, "--quiet", *others))])


@pytest.mark.parametrize("place", ["folder", "folder/file/receipt.json", "/proc/receipt.json"])
def test_a_receipt_that_cannot_be_written_is_refused_before_anything_is_executed(
    bundle, tmp_path, monkeypatch, place
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("kept")
    generate(tmp_path / "bob")
    monkeypatch.setattr(verification, "_verify", lambda *_: pytest.fail("it was executed"))
    done = sign(bundle, tmp_path / "bob", "--receipt", tmp_path / place)
    assert (done.exit_code, "CAP-B173" in done.output) == (ExitCode.USAGE, True)
    assert (tmp_path / "folder" / "file").read_text() == "kept"


def test_the_place_of_a_receipt_is_checked_without_changing_it(bundle, tmp_path, monkeypatch):
    generate(tmp_path / "bob")
    (tmp_path / "earlier.json").write_text("an earlier receipt")
    before = contents(tmp_path)
    seen = []

    def stop(*_):
        seen.append(contents(tmp_path))
        raise CapsuleError("CAP-E012", "interrupted", fix="Start it again.")

    monkeypatch.setattr(verification, "_verify", stop)
    for place in ("earlier.json", "new/receipt.json"):
        sign(bundle, tmp_path / "bob", "--receipt", tmp_path / place)
    assert seen == [before, before]


def test_a_receipt_does_not_replace_the_report(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "_verify", lambda *_: pytest.fail("it was executed"))
    generate(tmp_path / "bob")
    monkeypatch.chdir(tmp_path)
    places = ("--receipt", tmp_path / "one.json", "--report", "one.json")
    done = sign(bundle, tmp_path / "bob", *places)
    assert (done.exit_code, "CAP-X004" in done.output) == (ExitCode.USAGE, True)
    assert not (tmp_path / "one.json").exists()


def test_a_receipt_has_no_place_beside_a_bundle_in_proc(bundle, tmp_path, monkeypatch):
    generate(tmp_path / "bob")
    monkeypatch.setattr(verification, "_verify", lambda *_: pytest.fail("it was executed"))
    monkeypatch.chdir("/proc/self")
    done = sign("status", tmp_path / "bob")
    assert (done.exit_code, "CAP-B173" in done.output) == (ExitCode.USAGE, True)


def test_a_verdict_is_printed_although_its_receipt_is_lost(bundle, tmp_path, monkeypatch):
    generate(tmp_path / "bob")
    found = Report(
        bundle=bundle.name,
        mode="full",
        verdict="not-reproduced",
        summary="the runs differ",
        claim_id="0" * 64,
        manifest="0" * 64,
        expected_grade="bitwise",
        image_source="rebuilt",
        machine=MachineKind(
            processor="AuthenticAMD 25/1",
            processor_name="unknown",
            instructions=(),
            gpu=None,
            system="unknown",
            engine="docker",
        ),
        signer=genuine.SIGNER.public.fingerprint,
    )
    monkeypatch.setattr(verification, "verify", lambda *_: found)
    done = sign(bundle, tmp_path / "bob", "--receipt", "/dev/full")
    assert done.exit_code == ExitCode.DIFFERS
    assert "CAP-B173" in done.output
    assert "the runs differ" in done.output


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/scratch/x"), "/scratch/x"),
        (MemoryError(), "Cannot allocate memory"),
    ],
)
def test_a_full_disk_and_used_up_memory_decide_nothing_about_a_bundle(
    bundle, tmp_path, monkeypatch, error, reason
):
    monkeypatch.setattr(verification, "open_bundle", Mock(side_effect=error))
    request = VerifyRequest(bundle, (), Mode("full"))
    report = verification.verify(request, Cache(tmp_path), SilentReporter())
    assert (report.verdict, report.error["code"]) == ("inconclusive", "CAP-X003")
    assert reason in report.summary
