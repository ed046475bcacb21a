"""Standard streams that nothing reads to their end, or that cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CORPUS = Path(__file__).parents[1] / "corpus"
BIG = "for i in range(100_000): print(i)"
ENDING = "raise SystemExit(3)"


def ended(script, output, **options):
    """Run a block under ``lossy_standard_output`` and return its status and standard error."""
    body = "\n".join(f"    {line}" for line in script)
    program = f"from capsule.cli.output import *\nwith lossy_standard_output():\n{body}\n"
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=output, stderr=subprocess.PIPE, text=True, **options
    )
    return done.returncode, done.stderr


@pytest.fixture
def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("printed", [BIG, "print(1)"])
def test_a_closed_pipe_changes_no_status_and_is_silent(closed_pipe, printed):
    assert ended([printed, ENDING], closed_pipe) == (3, "")
    assert ended([printed], closed_pipe) == (0, "")


@pytest.mark.slow
def test_rich_prints_into_a_closed_pipe_without_changing_the_status(closed_pipe):
    script = ["from rich.console import Console", "Console().print('x\\n' * 40_000)", ENDING]
    assert ended(script, closed_pipe) == (3, "")


def test_a_full_device_is_reported_and_is_no_success():
    with Path("/dev/full").open("wb") as full:
        status, said = ended(["print(1)"], full)
        assert status == 2
        assert said.startswith("CAP-X002: standard output cannot be written: No space left")
        assert ended([BIG, ENDING], full)[0] == 3


def test_what_is_printed_arrives():
    done = subprocess.run(
        [sys.executable, "-m", "capsule", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("capsule ")


@pytest.mark.slow
def test_a_tampered_bundle_costs_its_status_whatever_the_reader_does(tmp_path, closed_pipe):
    bundle = tmp_path / "x.capsule.tar"
    bundle.write_bytes(b"signatures/run.sigstore.json")  # cut off
    command = [sys.executable, "-m", "capsule", "verify", str(bundle), "--mode", "integrity"]
    for extra in (["--json"], []):
        done = subprocess.run(
            [*command, "--allow-untrusted", *extra],
            cwd=tmp_path,
            stdout=closed_pipe,
            stderr=subprocess.PIPE,
        )
        assert done.returncode == 3


def verified(bundle, folder, **options):
    """Return the status of a verification whose standard error is as given."""
    command = [sys.executable, "-m", "capsule", "verify", str(bundle), "--mode", "integrity"]
    words = ["--key", str(CORPUS / "author.pub"), "--report", "report.json"]
    return subprocess.call([*command, *words], cwd=folder, stdout=subprocess.DEVNULL, **options)


@pytest.mark.slow
def test_standard_error_that_cannot_be_written_changes_no_status(tmp_path, closed_pipe):
    intact, tampered = CORPUS / "dqn.capsule.tar", tmp_path / "x.capsule.tar"
    tampered.write_bytes(intact.read_bytes()[:-20_000])
    with Path("/dev/full").open("wb") as full:
        for bundle, status in ((intact, 0), (tampered, 3)):
            for errors in (closed_pipe, full):
                assert verified(bundle, tmp_path, stderr=errors) == status
            assert verified(bundle, tmp_path, preexec_fn=lambda: os.close(2)) == status


def test_a_library_that_prints_much_on_a_closed_standard_error_does_not_raise(closed_pipe):
    program = (
        "import sys\nfrom capsule.cli.output import *\nwith lossy_standard_error():\n"
        f"    for i in range(100_000): print(i, file=sys.stderr)\n    {ENDING}"
    )
    assert subprocess.call([sys.executable, "-c", program], stderr=closed_pipe) == 3


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_standard_stream_that_is_closed_from_the_start_is_an_empty_one(descriptor):
    program = (
        "import sys\nfrom capsule.cli.output import *\n"
        "with standard_input(), lossy_standard_error(), lossy_standard_output():\n"
        "    for stream in sys.stdin, sys.stdout, sys.stderr: stream.isatty()\n"
        f"    assert {descriptor} or sys.stdin.read() == ''\n    print(1)\n    {ENDING}"
    )
    done = subprocess.run([sys.executable, "-c", program], preexec_fn=lambda: os.close(descriptor))
    assert done.returncode == 3


@pytest.mark.slow
def test_a_command_with_a_table_or_a_question_accepts_closed_streams(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secret").chmod(0o600)

    def status(descriptor, *words):
        command = [sys.executable, "-m", "capsule", *words]
        return subprocess.call(command, cwd=tmp_path, preexec_fn=lambda: os.close(descriptor))

    bundle = str(CORPUS / "dqn.capsule.tar")
    assert status(1, "scores", bundle) == 0
    assert status(1, "list", ".") == 0
    assert status(0, "keygen", "key", "--passphrase-file", "secret") == 0
    assert status(0, "sign", bundle, "--key", "key", "-o", "signature") == 2
