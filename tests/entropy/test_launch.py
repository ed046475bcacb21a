"""The launcher: how a spec becomes its options, what it refuses, and what it leaves to be read."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.entropy.launch import launch_arguments, root_key
from capsule.entropy.report import FAILURE, REPORT, collect, launch_failure
from capsule.experiment.contract import FIRST_PROCESS, PROGRAM_PROCESS
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import Spec, relaxations
from capsule.native import native_part

SOURCES = Path(__file__).parents[2] / "capsule" / "native" / "source"
KEY = "ab" * 32
INTERPOSER = native_part("libcapsule-entropy.so")


def spec(numerics="native", determinism=None, **entropy):
    return Spec.model_validate_json(
        json.dumps(
            {
                "schema": "capsule/spec/v1",
                "name": "test",
                "accelerator": {"kind": "cpu", "numerics": numerics},
                "determinism": determinism or {},
                "entropy": entropy,
                "seeds": {"root": 7},
                "environment": {"suite": "gymnasium", "id": "CartPole-v1"},
                "trainer": {"algorithm": "dqn", "network": "mlp"},
            }
        )
    )


@pytest.fixture
def directory(tmp_path):
    folder = tmp_path / "directory"
    folder.mkdir()
    return folder


def launch(directory, *words, key=KEY, timeout=600):
    command = [native_part("capsule-launch"), "--entropy", "virtual", "--key", key]
    command += ["--directory", directory, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def failure(directory, *words, **settings):
    ended = launch(directory, *words, **settings)
    assert ended.returncode == 87
    assert ended.stdout == ""
    assert re.fullmatch(r"capsule-launch: CAP-R\d{3} [^\n]+\n", ended.stderr)
    return ended.stderr.split()[1]


def words(*arguments, **settings):
    return launch_arguments(spec(*arguments, **settings), native="/n", directory="/d", replay=False)


def test_the_root_key_is_the_documented_digest():
    expected = hashlib.sha256(b'["capsule/entropy/v1",7]').hexdigest()
    assert root_key(7).hex() == expected
    assert expected in words()
    assert root_key(8).hex() in words(seed=8)


def test_a_spec_becomes_options():
    assert words() == [
        *("/n/capsule-launch", "--entropy", "virtual", "--directory", "/d"),
        *("--key", root_key(7).hex(), "--clock", "system", "--sort-listings", "--cores", "4"),
        *("--preload", "/n/libcapsule-entropy.so", "--"),
    ]
    relaxed = {"cores": None, "sorted_listings": False}
    randomized = {"supervised": False, "address_randomization": True, "clock": "fixed"}
    weaker = words(mode="system", **randomized, determinism=relaxed)
    assert weaker == [
        *("/n/capsule-launch", "--entropy", "system", "--directory", "/d", "--clock", "fixed"),
        *("--no-supervisor", "--keep-address-randomization"),
        *("--preload", "/n/libcapsule-entropy.so", "--"),
    ]
    assert "--preload" not in words(mode="system", determinism=relaxed)
    assert "--preload" in words(mode="system", determinism=relaxed | {"cores": 1})
    assert "--time-limit" not in words()
    limited = launch_arguments(spec(), native="/n", directory="/d", replay=False, seconds=90)
    assert limited[limited.index("--time-limit") + 1] == "90"


@pytest.mark.parametrize(
    ("given", "trainer", "clock"),
    [
        (None, {"command": ["true"]}, "virtual"),
        (None, {"algorithm": "dqn", "network": "mlp"}, "system"),
        ("fixed", {"command": ["true"]}, "fixed"),
        ("virtual", {"algorithm": "dqn", "network": "mlp"}, "virtual"),
    ],
)
def test_programs_read_a_virtual_clock_unless_the_spec_says_otherwise(given, trainer, clock):
    document = {"schema": "capsule/spec/v1", "name": "test", "trainer": trainer}
    document["entropy"] = {"clock": given}
    if "algorithm" in trainer:
        document["environment"] = {"suite": "gymnasium", "id": "CartPole-v1"}
    made = Spec.model_validate_json(json.dumps(document))
    arguments = launch_arguments(made, native="/n", directory="/d", replay=False)
    assert arguments[arguments.index("--clock") + 1] == clock
    assert "entropy.clock=system" not in relaxations(made)


def test_portable_numerics_preload_the_maths_before_the_interposer():
    preloads = [word for word in words("portable-v3") if word.endswith(".so")]
    assert preloads == ["/n/libcapsule-math.so", "/n/libcapsule-entropy.so"]


def test_a_recorded_run_records_and_its_repetition_replays():
    recorded = spec(mode="recorded", on_exhaustion="virtual")
    arguments = {"native": "/n", "directory": "/d"}
    first = launch_arguments(recorded, **arguments, replay=False)
    assert first[1:3] == ["--entropy", "record"]
    again = launch_arguments(recorded, **arguments, replay=True)
    assert again[1:3] == ["--entropy", "replay"]
    assert again[7:9] == ["--on-exhaustion", "virtual"]
    with pytest.raises(ValueError, match="replays no profile"):
        launch_arguments(spec(), **arguments, replay=True)


@pytest.mark.parametrize(
    "options",
    [
        ("--unknown", "--", "true"),
        ("--key", "xyz", "--", "true"),
        ("--entropy", "other", "--", "true"),
        ("--clock", "sundial", "--", "true"),
        ("--time-limit", "0", "--", "true"),
        ("--time-limit", "5m", "--", "true"),
        ("--cores", "0", "--", "true"),
        ("--cores", "four", "--", "true"),
        (),
    ],
)
def test_bad_options_are_refused(directory, options):
    assert failure(directory, *options) == "CAP-R101"
    assert launch_failure(directory).code == "CAP-R101"


@pytest.mark.parametrize("content", [None, b"", b"#!/bin/sh", b"\x7fELF\x01" + bytes(80)])
def test_a_library_that_cannot_be_preloaded_is_refused(directory, tmp_path, content):
    library = tmp_path / "library.so"
    if content is not None:
        library.write_bytes(content)
    assert failure(directory, "--preload", library, "--", "true") == "CAP-R102"
    assert str(library) in launch_failure(directory).message


def test_a_library_that_the_loader_passes_over_is_noticed(directory, tmp_path):
    """The dynamic loader only warns about a library that it cannot load."""
    library = tmp_path / "library.so"
    library.write_bytes(INTERPOSER.read_bytes()[:64] + bytes(4096))
    ended = launch(directory, "--preload", library, "--", sys.executable, "-c", "print('ran')")
    assert ended.returncode == 87
    assert "ran" not in ended.stdout
    assert launch_failure(directory).code == "CAP-R107"


@pytest.mark.parametrize("options", [(), ("--no-supervisor",)])
def test_a_library_that_is_loaded_is_found(directory, options):
    words = ("--preload", INTERPOSER, *options, "--", sys.executable, "-c", "pass")
    ended = launch(directory, *words)
    assert (ended.returncode, ended.stderr) == (0, "")
    (program,) = collect(directory).programs
    assert program.preloaded


def test_a_library_that_is_passed_over_is_noticed_without_a_supervisor(directory, tmp_path):
    library = tmp_path / "library.so"
    library.write_bytes(INTERPOSER.read_bytes()[:64] + bytes(4096))
    code = "import time; time.sleep(600); print('ran')"
    words = ("--preload", library, "--no-supervisor", "--", sys.executable, "-c", code)
    ended = launch(directory, *words)
    assert ended.returncode == 87
    assert launch_failure(directory).code == "CAP-R107"


@pytest.mark.parametrize("where", ["missing", "file"])
def test_an_unusable_directory_is_refused(tmp_path, where):
    (tmp_path / "file").write_text("")
    assert failure(tmp_path / where, "--", "true") == "CAP-R103"


def test_a_directory_where_no_file_may_have_a_byte_is_refused(directory):
    command = [native_part("capsule-launch"), "--entropy", "virtual", "--key", KEY]
    command += ["--directory", directory, "--", "true"]
    limited = ["sh", "-c", 'ulimit -f 0; trap "" XFSZ; exec "$@"', "sh"]
    ended = subprocess.run([*limited, *command], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 87
    assert re.search("CAP-R103 no journal can be created in .*: File too large", ended.stderr)


def test_a_directory_serves_one_start_only(directory):
    assert launch(directory, "--", "true").returncode == 0
    assert failure(directory, "--", "true") == "CAP-R103"
    assert launch_failure(directory) is None  # the first start's files are as they were
    assert collect(directory).status == 0


def test_a_program_that_cannot_be_executed_is_named(directory):
    assert failure(directory, "--", "/nonexistent/program") == "CAP-R106"
    with pytest.raises(CapsuleError, match="/nonexistent/program") as error:
        collect(directory)
    assert error.value.code == "CAP-R106"


def test_a_launcher_inside_a_launcher_cannot_supervise(directory, tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    words = (native_part("capsule-launch"), "--entropy", "virtual", "--key", KEY)
    ended = launch(directory, "--", *words, "--directory", inner, "--", "true")
    assert ended.returncode == 87
    assert launch_failure(inner).code == "CAP-R104"
    assert launch_failure(directory) is None


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -9 $$", 137)])
@pytest.mark.parametrize("options", [(), ("--no-supervisor", "--preload", INTERPOSER)])
def test_the_status_is_the_programs(directory, script, status, options):
    assert launch(directory, *options, "--", "sh", "-c", script).returncode == status
    assert collect(directory).status == status


def test_a_short_program_is_seen_without_a_supervisor(tmp_path):
    words = ("--no-supervisor", "--preload", INTERPOSER, "--", "sh", "-c", "exit 7")
    for number in range(50):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        assert launch(folder, *words).returncode == 7
        (program,) = collect(folder).programs
        assert (program.linkage, program.preloaded) == ("glibc", True)


def test_without_a_launcher_no_process_gets_its_signal():
    """In a namespace, a parent outside of it has the number 0, which kill(2) takes for a group."""
    script = (
        "sleep 600 & first=$!; sleep 600 & other=$!\n"
        "LD_PRELOAD=$0 sh -c 'exit 7'; status=$?\n"
        "kill $other; wait $other; [ $? = 143 ] || status=1\n"
        "kill -9 $first; exit $status\n"
    )
    words = ["unshare", "--map-root-user", "--pid", "sh", "-c", script, INTERPOSER]
    assert subprocess.run(words, start_new_session=True, timeout=600).returncode == 7


@pytest.mark.parametrize("options", [(), ("--no-supervisor", "--preload", INTERPOSER)])
def test_a_program_that_removes_the_journal_leaves_no_report(directory, options):
    script = 'rm "$CAPSULE_ENTROPY_DIRECTORY/journal"'
    assert launch(directory, *options, "--", "sh", "-c", script).returncode == 0
    with pytest.raises(CapsuleError) as error:
        collect(directory)
    assert error.value.code == "CAP-R201"


def test_a_run_with_neither_supervisor_nor_interposer_has_no_journal(directory):
    command = [native_part("capsule-launch"), "--entropy", "system", "--no-supervisor"]
    subprocess.run([*command, "--directory", directory, "--", "true"], check=True)
    assert collect(directory).uses == ()


def test_programs_are_told_what_they_need(directory):
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    found = json.loads(launch(directory, "--", sys.executable, "-c", code).stdout)
    assert found["CAPSULE_ENTROPY"] == "virtual"
    assert found["CAPSULE_ENTROPY_DIRECTORY"] == str(directory)
    assert len(found["CAPSULE_LAUNCHER_PID"]) == 10
    assert found["OPENSSL_ia32cap"] == "~0x4000000000000000:~0x40000"


MASKS = {
    "OPENSSL_ia32cap": "~0x4000000000000000:~0x40000",
    "QT_NO_CPU_FEATURE": "rdrand",
    "SYSTEMD_RDRAND": "0",
}


@pytest.mark.parametrize("mode", ["virtual", "system"])
@pytest.mark.parametrize("given", [{}, {"SYSTEMD_RDRAND": "1"}])
def test_processor_randomness_is_masked_in_programs_with_an_environment_of_their_own(
    directory, mode, given
):
    dump = "import json, os; print(json.dumps(dict(os.environ)))"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {dump!r}], env={given})"
    words = ("--entropy", mode, "--preload", INTERPOSER, "--", sys.executable, "-c", code)
    found = json.loads(launch(directory, *words).stdout)
    expected = given if mode == "system" else MASKS | given
    assert {name: found[name] for name in MASKS if name in found} == expected


def in_own_namespace(directory, *words):
    """Launch a program as the first process of a process id namespace, without privileges."""
    namespace = ["unshare", "--map-user=1000", "--map-group=1000"]
    namespace += ["--pid", "--fork", "--mount-proc"]
    command = [native_part("capsule-launch"), "--entropy", "virtual", "--key", KEY]
    command += ["--directory", directory, "--", *words]
    return subprocess.run([*namespace, *command], capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_numbers_are_the_same_in_a_namespace_of_ones_own(tmp_path, busy):
    """The numbers of threads and grandchildren follow from those of the program."""
    code = (
        "import os, subprocess, sys, threading\n"
        "print(os.getpid(), os.getppid(), os.getsid(0), os.getpgrp())\n"
        "threads = [threading.Thread(target=lambda: print(threading.get_native_id()))\n"
        "           for _ in range(3)]\n"
        "for each in threads: each.start(); each.join()\n"
        "subprocess.run(['sh', '-c', 'sh -c \"echo \\$\\$\"; echo $$'])\n"
    )
    found = set()
    for number in range(5):
        folder = tmp_path / f"start-{number}"
        folder.mkdir()
        ended = in_own_namespace(folder, sys.executable, "-uc", code)
        assert (ended.returncode, ended.stderr) == (0, "")
        found.add(ended.stdout)
        report = collect(folder)
        assert (report.own_numbers, report.first_process) == (True, FIRST_PROCESS)
        assert report.numbers_pinned
        assert report.processes == 3  # tasks that only took numbers are not counted
    first = FIRST_PROCESS
    numbers = (first, 1, first, first, *(first + n for n in (1, 2, 3, 5, 4)))
    assert {tuple(map(int, each.split())) for each in found} == {numbers}


def test_numbers_are_not_said_to_be_pinned_where_others_take_some(directory):
    assert launch(directory, "--", "true").returncode == 0
    report = collect(directory)
    assert not report.own_numbers
    assert not report.numbers_pinned


def test_the_number_of_a_program_is_prepared_when_the_first_process_asks(directory):
    code = (
        "import os, signal, subprocess\n"
        "def prepared():\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, {40})\n"
        "    os.kill(int(os.environ['CAPSULE_LAUNCHER_PID']), 40)\n"
        "    signal.sigwait({40})\n"
        "subprocess.run(['true'])\n"
        "prepared()\n"
        "print(subprocess.Popen(['true']).pid)\n"
        "print(subprocess.Popen(['true']).pid)\n"
    )
    ended = in_own_namespace(directory, sys.executable, "-c", code)
    assert ended.stdout.split() == [str(PROGRAM_PROCESS), str(PROGRAM_PROCESS + 1)]


def until_time_is_up(folder, words):
    """Launch a program that ends only when its time is up, and not before it has printed something.

    The time limit grows from attempt to attempt, because a program may take more than a second to
    begin on a busy machine.

    Args:
        folder: Each attempt has a new folder in it.
        words: Return the command, given the folder of the attempt.

    Returns:
        How the program ended, and the folder of the last attempt.
    """
    for seconds in (1, 8, 64, 512):
        directory = folder / f"limit-{seconds}"
        directory.mkdir()
        limit = ("--time-limit", str(seconds))
        ended = launch(directory, *limit, "--", *words(directory), timeout=6_000)
        if ended.stdout:
            break
    assert ended.returncode == 87
    assert launch_failure(directory).code == "CAP-R114"
    return ended, directory


def test_a_run_that_nobody_ends_is_ended_when_its_time_is_up(tmp_path):
    script = "trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$; sleep 6000' & sleep 6000"
    ended, _ = until_time_is_up(tmp_path, lambda _: ("sh", "-c", script))
    assert not Path(f"/proc/{int(ended.stdout)}").exists()


def occupying(directory, name, kind, then):
    """Return the words of a program that makes something else of a file of the launcher."""
    path, other = directory / name, directory / "other"
    other.write_text("unchanged")
    made = {
        "pipe": f"os.mkfifo({str(path)!r})",
        "link": f"os.symlink({str(other)!r}, {str(path)!r})",
        "unfinished link": f"os.symlink({str(other)!r}, {str(directory / ('.' + name))!r})",
    }
    return sys.executable, "-c", f"import os, time; {made[kind]}; {then}"


KINDS = pytest.mark.parametrize("kind", ["pipe", "link", "unfinished link"])


@KINDS
def test_no_file_of_the_program_stops_the_launcher_when_its_time_is_up(tmp_path, kind):
    then = "print('made', flush=True); time.sleep(6000)"
    ended, directory = until_time_is_up(
        tmp_path, lambda directory: occupying(directory, FAILURE, kind, then)
    )
    assert ended.stdout == "made\n"
    assert (directory / "other").read_text() == "unchanged"


@KINDS
def test_no_file_of_the_program_stops_the_launcher_at_the_end_of_a_run(directory, kind):
    words = occupying(directory, REPORT, kind, "exit(7)")
    assert launch(directory, "--", *words).returncode == 7
    assert collect(directory).status == 7
    assert {path.name for path in directory.iterdir()} == {"journal", "other", REPORT}
    assert (directory / "other").read_text() == "unchanged"


def test_a_report_that_cannot_be_written_is_an_error(directory):
    code = f"import os; os.makedirs({str(directory / REPORT / 'folder')!r})"
    ended = launch(directory, "--", sys.executable, "-c", code)
    assert (ended.returncode, launch_failure(directory).code) == (87, "CAP-R103")
    assert f"{REPORT} cannot be written: Is a directory" in ended.stderr
    assert not (directory / f".{REPORT}").exists()


@pytest.mark.parametrize("options", [(), ("--no-supervisor", "--preload", INTERPOSER)])
def test_a_process_that_ended_before_the_program_has_not_outlived_it(directory, options):
    code = "import os; child = os.fork() or os._exit(0); "
    code += "os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)"  # seen, and left to the launcher
    assert launch(directory, *options, "--", sys.executable, "-c", code).returncode == 0
    assert collect(directory).outlived == 0


TRACED = """
import ctypes, os, sys, time
libc, place = ctypes.CDLL(None), sys.argv[1]
said, say = os.pipe()
def be_tracer(process):
    for _ in range(60_000):  # until the other one has permitted it
        failed = libc.ptrace(0x4206, process, 0, 0)  # PTRACE_SEIZE
        if not failed: break
        time.sleep(0.01)
    os.write(say, b"failed" if failed else b"traced")
    time.sleep(6000)
traced = os.fork()
if traced == 0:
    libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER, any
    if place == "child" and os.fork() == 0: be_tracer(os.getppid())
    time.sleep(6000)
if place == "sibling" and os.fork() == 0: be_tracer(traced)
print(os.read(said, 6).decode(), flush=True)
if sys.argv[2] == "stays": time.sleep(6000)
"""


@pytest.mark.parametrize("place", ["sibling", "child"])
@pytest.mark.parametrize("first", ["stays", "ends"])
def test_a_process_that_traces_another_does_not_stop_the_launcher(tmp_path, place, first):
    """The launcher cannot wait for the other one before the one that traces it has ended."""
    words = (sys.executable, "-c", TRACED, place, first)
    if first == "stays":
        ended, _ = until_time_is_up(tmp_path, lambda _: words)
    else:
        ended = launch(tmp_path, "--", *words)
        assert ended.returncode == 0
        assert collect(tmp_path).outlived == 2
    assert ended.stdout == "traced\n"


def test_a_program_cannot_stop_the_launcher_that_limits_it(directory):
    """Nor look into its memory, where the time limit is."""
    code = (
        "import os\n"
        "for kill in (0, 9):\n"
        "    os.kill(1, kill)\n"
        "try: open('/proc/1/mem', 'rb+')\n"
        "except PermissionError: print('refused')\n"
    )
    ended = in_own_namespace(directory, sys.executable, "-c", code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "refused\n", "")


@pytest.mark.parametrize(
    "text", ["", "{}", '{"schema":"capsule/launch/v1"}', '{"schema":"capsule/launch/v2"}']
)
def test_a_malformed_report_is_refused(directory, text):
    (directory / "launch-report.json").write_text(text)
    with pytest.raises(CapsuleError) as error:
        collect(directory)
    assert error.value.code == "CAP-R113"


def test_a_missing_report_is_refused(directory):
    with pytest.raises(CapsuleError) as error:
        collect(directory)
    assert error.value.code == "CAP-R113"


def test_a_report_that_is_too_large_is_told(directory, monkeypatch):
    monkeypatch.setattr("capsule.entropy.report.MAX_DOCUMENT_BYTES", 1 << 20)
    (directory / "launch-report.json").write_text(" " * (1 << 20) + "{")
    with pytest.raises(CapsuleError, match="has more than 1 MiB") as error:
        collect(directory)
    assert error.value.code == "CAP-R115"


def test_every_failure_of_the_launcher_can_be_read(directory):
    names = ("launch", "supervisor", "tasks", "program", "proc", "account", "channel", "filter")
    text = "".join((SOURCES / "launcher" / f"{name}.c").read_text() for name in names)
    codes = set(re.findall(r'fail\(\s*"(CAP-R\d{3})"', text))
    assert codes
    for code in codes:
        document = {"schema": "capsule/launch-failure/v1", "code": code, "message": "x"}
        (directory / "launch-failure.json").write_text(json.dumps(document))
        assert launch_failure(directory).code == code
