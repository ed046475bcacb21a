"""The temporary run directory of a re-execution, and what it may not decide."""

import stat
from types import SimpleNamespace

import pytest

from capsule.engine.interface import Exit
from capsule.experiment import contract
from capsule.experiment.trace import read_trace
from capsule.host.errors import IMAGE_CODES, CapsuleError, ExitCode
from capsule.outcome import outcome, reported_failure
from capsule.verification.analysis.divergence import compare_sides
from capsule.verification.analysis.runs import directory_side
from capsule.verification.content.tensor_comparison import compare_tensors
from capsule.verification.execution.reexecution import reexecution_folder
from tests.verification.runs import Machine


def test_a_reexecution_has_a_folder_that_only_the_verifier_may_enter(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    notes = []
    with reexecution_folder(notes.append) as folder:
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "file").touch()
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as refusing, reexecution_folder(notes.append) as folder:
        folder.mkdir()
        refusing.setattr("os.rmdir", refuse)
        refusing.setattr("pathlib.Path.rmdir", refuse)
    assert ["cannot be removed" in note for note in notes] == [True]


@pytest.mark.parametrize(
    "code",
    [code for code, status in IMAGE_CODES.items() if status in (ExitCode.TAMPERED, ExitCode.USAGE)],
)
def test_no_code_that_a_program_may_name_convicts_a_bundle_or_its_verifier(code, tmp_path):
    report = contract.Failure(code=code, message="of a program", fix="Do as it says.", step=None)
    (tmp_path / contract.FAILURE).write_bytes(report.document())
    with pytest.raises(CapsuleError) as caught, reexecution_folder(print):
        raise reported_failure(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V049", ExitCode.INCONCLUSIVE)


def refuse(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_what_a_reexecution_left_convicts_no_bundle(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    with pytest.raises(CapsuleError) as direct:
        list(read_trace(trace))
    assert direct.value.exit_code == ExitCode.TAMPERED
    with pytest.raises(CapsuleError) as caught, reexecution_folder(print):
        list(read_trace(trace))
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V049", ExitCode.INCONCLUSIVE)
    assert caught.value.message.startswith("of the re-execution: CAP-T141 ")
    refused = pytest.raises(CapsuleError, match="CAP-V049 of the re-execution: CAP-T344 another")
    with refused, reexecution_folder(print):
        raise CapsuleError("CAP-T344", "another run's log", fix="")
    checkpoint = tmp_path / "step.safetensors"
    checkpoint.write_bytes(b"\xff" * 9)
    with pytest.raises(CapsuleError) as direct:
        compare_tensors(checkpoint, checkpoint)
    assert (direct.value.code, direct.value.exit_code) == ("CAP-V011", ExitCode.TAMPERED)
    for unreadable in (checkpoint, tmp_path / "missing"):
        with pytest.raises(CapsuleError, match="CAP-V049"), reexecution_folder(print):
            compare_tensors(unreadable, unreadable)
    with pytest.raises(CapsuleError, match=r"CAP-V049 .* CAP-V071"), reexecution_folder(print):
        directory_side(tmp_path, "the re-execution")
    kinds = SimpleNamespace(name="a", training=object()), SimpleNamespace(name="b", training=None)
    with pytest.raises(CapsuleError, match=r"CAP-V049 .* CAP-V073"), reexecution_folder(print):
        compare_sides(*kinds)
    with pytest.raises(CapsuleError) as caught, reexecution_folder(print):
        raise CapsuleError("CAP-B108", "of the bundle", fix="")
    assert caught.value.exit_code == ExitCode.TAMPERED


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("out-of-memory", "use a machine with more of it; remove --limit memory_mb"),
        ("timed-out", "remove --limit minutes"),
        ("disk-full", "set TMPDIR to a folder on a disk with more of it"),
        ("exited", "the files of the re-execution are not kept"),
    ],
)
def test_the_remedy_for_a_failed_reexecution_is_one_that_a_verifier_has(reason, remedy, tmp_path):
    (tmp_path / contract.LOG).write_text("the last line\n")
    with pytest.raises(CapsuleError) as caught, reexecution_folder(print):
        outcome(SimpleNamespace(trainer=None), tmp_path, Exit(137, reason))
    error = caught.value
    assert (error.code, error.exit_code) == ("CAP-E010", ExitCode.TRAINING_FAILED)
    assert "the last line" in error.message
    assert remedy in error.fix
    # Neither the lock nor the files of the re-execution are the verifier's to change or to read.
    for impossible in ("Raise", "resume", "trainer.", contract.LOG):
        assert impossible not in error.fix


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("CAP-E006", "capsule doctor"),
        ("CAP-T116", "--gpu"),
        ("CAP-T302", "send the report to the signer"),
        ("CAP-T131", "TMPDIR"),
        ("CAP-T331", "memory"),
        ("CAP-R114", "--limit minutes"),
    ],
)
def test_remedies_of_coded_failures_are_a_verifiers_too(code, remedy):
    with pytest.raises(CapsuleError) as caught, reexecution_folder(print):
        raise CapsuleError(code, "it failed", fix="Resume the run; see output.log.")
    assert (caught.value.code, caught.value.message) == (code, "it failed")
    assert remedy in caught.value.fix
    with pytest.raises(CapsuleError, match="CAP-M001") as caught, reexecution_folder(print):
        raise CapsuleError("CAP-M001", "no GPU", fix="Use a machine with one.")
    assert caught.value.fix == "Use a machine with one."


@pytest.mark.slow
@pytest.mark.xdist_group("verification")  # they share runs
def test_a_failed_reexecution_is_no_difference(verified, honest_bundle):
    class Short(Machine):
        def run(self, task, **options):
            super().run(task, **options)
            (task.run_directory / contract.RESULT).unlink()
            return Exit(137, "out-of-memory")

    report = verified(honest_bundle, machine=Short())
    assert report.verdict == "inconclusive"
    assert (report.differences, report.first_difference, report.divergence) == ((), None, None)
    assert report.error["code"] == "CAP-E010"
    assert "--limit memory_mb" in report.error["fix"]
