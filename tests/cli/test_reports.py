"""Reports in files: what is refused before anything runs, and what is lost afterwards."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.cli.reports import require_writable, tell, write_report
from capsule.host.errors import CapsuleError, ExitCode
from capsule.verification import diff as diff_module
from capsule.verification import verify as verification
from capsule.verification.verdict import Divergence
from tests.cli.conftest import capsule

VALUES = st.none() | st.integers() | st.floats(allow_nan=False) | st.lists(st.text(), max_size=2)
DOCUMENTS = st.dictionaries(st.text(max_size=9), VALUES, max_size=3)


def verify(bundle, report):
    words = ["--allow-untrusted", "--mode", "integrity", "--report", report, "--quiet"]
    return capsule("verify", bundle, *words)


@pytest.mark.parametrize("place", ["folder", "folder/file/report.json", "/proc/report.json"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_checked(
    bundle, tmp_path, monkeypatch, place
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    monkeypatch.setattr(verification, "open_bundle", lambda *_: pytest.fail("it was checked"))
    done = verify(bundle, tmp_path / place)
    assert done.exit_code == ExitCode.USAGE
    assert "CAP-V082" in done.output


def test_a_report_replaces_nothing_that_the_command_reads(bundle):
    before = bundle.read_bytes()
    done = verify(bundle, bundle)
    assert (done.exit_code, "CAP-X004" in done.output) == (ExitCode.USAGE, True)
    done = capsule("diff", bundle, bundle, "--report", bundle, "--quiet")
    assert (done.exit_code, "CAP-X004" in done.output) == (ExitCode.USAGE, True)
    assert bundle.read_bytes() == before


def test_a_comparison_replaces_no_device_or_pipe(bundle, tmp_path):
    """For root, /dev/null would be a file from then on."""
    os.mkfifo(tmp_path / "pipe")
    words = ["--allow-untrusted", "--report", tmp_path / "pipe", "--quiet"]
    done = capsule("diff", bundle, bundle, *words)
    assert (done.exit_code, "CAP-V082" in done.output) == (ExitCode.USAGE, True)
    assert (tmp_path / "pipe").is_fifo()


def test_a_verdict_is_printed_although_its_report_is_lost(bundle):
    done = verify(bundle, "/dev/full")
    assert done.exit_code == ExitCode.OK
    assert "CAP-V082" in done.output
    assert "intact" in done.output


def test_without_a_trusted_key_nothing_is_said_to_be_unchanged_since_it_was_signed(
    bundle, tmp_path
):
    done = verify(bundle, tmp_path / "report.json")
    assert "integrity        the files are those that the bundle lists" in done.stdout
    assert "intact  the files are those that the bundle lists, and its documents" in done.stdout
    assert "unchanged since" not in done.stdout


def test_a_comparison_is_printed_although_its_report_is_lost(tmp_path, monkeypatch):
    found = Divergence(a="one", b="two", equal=True)
    monkeypatch.setattr(diff_module, "diff", lambda *_: found)
    words = ["diff", "one", "two", "--quiet", "--report"]
    done = capsule(*words, "/dev/full")
    assert done.exit_code == ExitCode.OK
    assert "CAP-V082" in done.output
    assert "equal, bit for bit" in done.output
    refused = capsule(*words, tmp_path)
    assert (refused.exit_code, "CAP-V082" in refused.output) == (ExitCode.USAGE, True)


def test_the_check_leaves_an_earlier_report_and_makes_no_folder(tmp_path):
    (tmp_path / "report.json").write_text("an earlier report")
    require_writable(tmp_path / "report.json")
    require_writable(tmp_path / "new" / "report.json")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "an earlier report"


def test_an_unwritable_report_is_named_with_reason_and_remedy(tmp_path):
    with pytest.raises(CapsuleError) as caught:
        require_writable(tmp_path)
    assert caught.value.code == "CAP-V082"
    assert caught.value.message == (
        f"the report {str(tmp_path)!r} cannot be written: not a regular file"
    )
    assert "--report" in caught.value.fix


@settings(max_examples=20)  # each one waits for the disk
@given(DOCUMENTS)
def test_a_report_is_read_again_as_it_was_written(tmp_path_factory, document):
    path = tmp_path_factory.getbasetemp() / "written.json"
    write_report(path, document)
    data = path.read_bytes()
    assert json.loads(data) == document
    assert data.isascii()
    assert data.endswith(b"}\n")


def test_a_report_replaces_an_earlier_one_in_a_folder_that_is_made(tmp_path, capsys):
    path = tmp_path / "new" / "report.json"
    for verdict in ("first", "second"):
        write_report(path, {"verdict": verdict})
        assert json.loads(path.read_text()) == {"verdict": verdict}
    assert [each.name for each in path.parent.iterdir()] == ["report.json"]
    assert capsys.readouterr() == ("", "")


def test_a_lost_report_is_an_error_message_and_no_exception(tmp_path, capsys):
    write_report(tmp_path, {"verdict": "intact"})
    shown = capsys.readouterr()
    assert shown.out == ""
    first, second = shown.err.splitlines()
    assert first.startswith(f"CAP-V082: the report {str(tmp_path)!r} cannot be written: ")
    assert second.startswith("fix: Use --report ")


def test_an_error_that_is_shown_does_not_control_the_terminal(capsys):
    tell(CapsuleError("CAP-V082", "a\x1b[2Jb\nc", fix="d\u202ee"))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "CAP-V082: a\ufffd[2Jb\ufffdc\nfix: d\ufffde\n"
