"""The supervisor, with programs that no preloaded library can help: linked statically."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from capsule.entropy.journal import read_journal
from capsule.entropy.launch import REPLAYED
from capsule.entropy.profile import check_consumed, merge, parse
from capsule.entropy.report import collect, launch_failure
from capsule.experiment.errors import CapsuleError
from capsule.native import native_part
from tests.entropy.conftest import given, key_stream

HERE = Path(__file__).parent
KEY = bytes(range(32))
MISMATCH_STATUS = 86  # CAPSULE_MISMATCH_STATUS of native/source/shared/entropy.h
# As the launcher is compiled, so that the C library is made once for both.
STATIC = ("-target", "x86_64-linux-musl", "-static", "-O2", "-s", "-fno-sanitize=all")
WAYS = ("getrandom", "devices", "threads", "processes", "closed", "start", "large")


@dataclass
class Launched:
    status: int
    output: str
    errors: str
    directory: Path

    @property
    def report(self):
        return collect(self.directory)


@pytest.fixture
def launch(tmp_path):
    """Return a function that runs a program under the launcher, each time in a new folder."""

    def run(
        *command,
        mode="virtual",
        key=KEY,
        profile=None,
        options=(),
        wrapper=(),
        check=True,
        within=tmp_path,
    ):
        directory = within / f"run-{len(list(within.glob('run-*')))}"
        directory.mkdir()
        directory.chmod(0o777)
        if profile is not None:
            (directory / REPLAYED).write_bytes(profile)
        words = [*wrapper, native_part("capsule-launch"), "--entropy", mode, "--key", key.hex()]
        words += ["--directory", directory, *options, "--", *command]
        process = subprocess.run(words, capture_output=True, text=True, timeout=600)
        if check:
            assert process.returncode == 0, process.stderr
        return Launched(process.returncode, process.stdout, process.stderr, directory)

    return run


@pytest.fixture(scope="session")
def asks(compiled):
    return compiled(HERE / "asks.c", *STATIC)


def derived(process, thread, label, size):
    """Return a stream's first bytes, made with Python's BLAKE2s and cryptography's ChaCha20."""
    data = b"\0".join(part.encode() for part in (process, thread, label))
    return key_stream(hashlib.blake2s(data, key=KEY).digest(), size)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_is_drawn_depends_on_the_key_alone(launch, asks, way):
    first, again = launch(asks, way), launch(asks, way)
    assert first.output == again.output
    assert first.output != launch(asks, way, key=bytes(32)).output


def test_what_is_drawn_is_the_documented_stream(launch, asks):
    drawn = dict(line.split() for line in launch(asks, "devices").output.splitlines())
    for name, ordinal, size in (("open", 1, 48), ("openat", 2, 48), ("long", 4, 20000)):
        assert drawn[name] == derived("0", "0", f"kernel:device:{ordinal}", size).hex()
    threads = dict(line.split() for line in launch(asks, "threads").output.splitlines())
    made = [f"0-{n}" for n in range(1, 9)]
    expected = b"".join(derived("0", path, "kernel", 8) for path in made)
    assert threads["threads"] == expected.hex()
    expected = b"".join(derived("0", f"{path}-1", "kernel", 8) for path in made)
    assert threads["their-threads"] == expected.hex()
    expected = b"".join(derived(f"0.{path}:1", "0", "kernel", 8) for path in made)
    assert threads["their-processes"] == expected.hex()
    children = launch(asks, "processes").output.splitlines()
    for line, process in zip(children, ("0.4x", "0.5x", "0.6x", "0"), strict=True):
        assert line.split()[1] == derived(process, "0", "kernel", 8).hex()


@pytest.mark.slow
def test_threads_that_race_get_their_keys_by_the_order_of_their_making(launch, asks):
    assert len({launch(asks, "threads").output for _ in range(40)}) == 1


@pytest.mark.parametrize("way", WAYS[:-1])
def test_a_recording_replays(launch, asks, way):
    recorded, other = (launch(asks, way, mode="record") for _ in range(2))
    assert recorded.output != other.output
    profile = merge(recorded.directory)
    for _ in range(2):
        replayed = launch(asks, way, mode="replay", profile=profile)
        assert replayed.output == recorded.output
        assert check_consumed(replayed.directory, parse(profile)) == ()


@pytest.mark.parametrize(
    ("recorded", "replayed", "reason"),
    [
        ("getrandom", "processes", "nothing was recorded for it"),
        ("start", "getrandom", "nothing was recorded for it"),
        ("getrandom", "devices", "nothing was recorded for it"),
        ("getrandom", "vdso", "only 1 call was recorded"),
        ("getrandom", "large", "recorded there: 8 bytes"),
    ],
)
def test_a_replay_that_asks_for_more_ends_the_run(launch, asks, recorded, replayed, reason):
    profile = merge(launch(asks, recorded, mode="record").directory)
    ended = launch(asks, replayed, mode="replay", profile=profile, check=False)
    assert ended.status == MISMATCH_STATUS
    with pytest.raises(CapsuleError, match=reason) as error:
        check_consumed(ended.directory, parse(profile))
    assert error.value.code == "CAP-R221"


def test_a_device_that_is_read_further_than_recorded_ends_the_run(launch):
    read = ("od", "-v", "-t", "x1", "/dev/urandom", "-N")
    recorded = launch(*read, "5000", mode="record")
    options = {"mode": "replay", "profile": merge(recorded.directory)}
    assert launch(*read, "5000", **options).output == recorded.output
    more = launch(*read, "5001", **options, check=False)
    assert more.status == MISMATCH_STATUS
    told = "for 905 bytes .* at offset 4096; recorded there: 904 bytes from /dev/urandom"
    with pytest.raises(CapsuleError, match=told):
        check_consumed(more.directory, parse(options["profile"]))
    allowed = launch(*read, "5001", **options, options=("--on-exhaustion", "virtual"))
    (thread,) = check_consumed(allowed.directory, parse(options["profile"]))
    assert thread.thread == "0@kernel:device:1"


@pytest.mark.parametrize("size", ["4100", "4000", "20"])
def test_a_device_that_is_not_read_as_far_as_recorded_is_told(launch, asks, size):
    """How far a device is read ahead of need belongs to what a program draws."""
    command = (asks, "read-device")
    profile = merge(launch(*command, "5000", mode="record").directory)
    replayed = launch(*command, size, mode="replay", profile=profile)
    with pytest.raises(CapsuleError, match=f"was given {int(size):,} of 5,000 bytes") as error:
        check_consumed(replayed.directory, parse(profile))
    assert error.value.code == "CAP-R222"


@pytest.mark.parametrize("size", [20, 32, 33, 5000])
def test_what_a_device_gave_is_made_again_from_what_was_kept(launch, asks, size):
    recorded = launch(asks, "read-device", str(size), mode="record")
    threads = {thread.thread: thread.calls for thread in parse(merge(recorded.directory)).threads}
    calls = threads["0@kernel:device:1"]
    assert [call.size for call in calls] == ([size] if size <= 4096 else [4096, size - 4096])
    assert recorded.output == f"device {b''.join(map(given, calls)).hex()}\n"


@pytest.mark.parametrize(
    ("way", "paths"),
    [
        ("execute-in-thread", [("0", "0"), ("0x", "0")]),
        ("leave-to-thread", [("0", "0-1"), ("0.0-1:1x", "0"), ("0x", "0")]),
        ("fail-to-execute", [("0", "0-1")]),
        ("make-oddly", [("0.1", "0"), ("0.3", "0"), ("0.4", "0"), ("0", "0")]),
        ("wait-for-another-child", [("0.1.2", "0")]),
    ],
)
def test_paths_are_those_of_the_order_of_making(launch, asks, way, paths):
    finished = launch(asks, way)
    expected = [derived(process, thread, "kernel", 8).hex() for process, thread in paths]
    assert [line.split()[1] for line in finished.output.splitlines()] == expected


def test_a_device_can_be_written_to(launch, asks):
    assert launch(asks, "write-device").output == "4 4\n"


def test_threads_may_be_made_by_threads_without_end(launch, asks):
    first, again = launch(asks, "chain"), launch(asks, "chain")
    assert first.output == again.output
    assert len(set(first.output.splitlines())) == 101
    longest = "0" + 93 * "-1"
    assert first.output.splitlines()[93].split()[1] == derived("0", longest, "kernel", 8).hex()
    name = "#" + hashlib.blake2s(f"{longest}@kernel".encode()).hexdigest()
    assert name in {thread.thread for thread in read_journal(first.directory).threads}


@pytest.mark.slow
def test_a_launcher_that_is_stopped_and_continued_goes_on(launch, asks):
    script = (
        "for i in 1 2 3 4; do (for j in $(seq 60); do "
        f"{asks} threads >/dev/null || kill $PPID; done) & done\n"
        "for i in $(seq 400); do kill -STOP $PPID; kill -CONT $PPID; done; wait; echo well"
    )
    assert launch("bash", "-c", script).output == "well\n"


def test_a_program_that_changes_its_folder_is_replayed(launch):
    script = ("sh", "-c", "cd /; exec head -c 8 /dev/urandom | od -x")
    options = ("--preload", native_part("libcapsule-entropy.so"))
    recorded = launch(*script, mode="record", options=options)
    profile = merge(recorded.directory)
    replayed = launch(*script, mode="replay", profile=profile, options=options)
    assert replayed.output == recorded.output


def test_programs_may_together_open_more_devices_than_one_program_may_files(launch):
    script = (
        "import os\n"
        "def fill(depth):\n"
        "    opened = [os.open('/dev/urandom', os.O_RDONLY) for _ in range(100)]\n"
        "    if depth and os.fork() == 0:\n"
        "        for one in opened: os.close(one)\n"
        "        fill(depth - 1)\n"
        "    elif depth: os._exit(os.wait()[1] > 0)\n"
        "    os._exit(0)\n"
        "fill(3)"
    )
    limited = ("sh", "-c", 'ulimit -Sn 200; exec "$@"', "sh")
    launch(sys.executable, "-c", script, wrapper=limited)


def test_a_damaged_profile_is_refused(launch, asks):
    data = bytearray(merge(launch(asks, "getrandom", mode="record").directory))
    data[20] ^= 1
    ended = launch(asks, "getrandom", mode="replay", profile=data, check=False)
    assert "CAP-R111" in ended.errors
    assert ended.output == ""


@pytest.mark.slow
def test_random_bytes_are_never_made_without_a_system_call(launch, asks):
    finished = launch(asks, "vdso")
    assert finished.output.startswith("mapping refused\n")
    (program,) = finished.report.programs
    assert program.getrandom.calls == 100_001


def test_mistakes_are_answered_like_the_kernel_does(launch, asks):
    direct = subprocess.run([asks, "errors"], capture_output=True, text=True)
    assert launch(asks, "errors").output == direct.stdout


def test_the_report_says_what_bypassed_the_preloaded_library(launch, asks):
    options = ("--preload", native_part("libcapsule-entropy.so"))
    report = launch("sh", "-c", f"{asks} devices; {asks} uuid; head -c 9 /dev/urandom | wc -c",
                    options=options).report  # fmt: skip
    rows = {(Path(row.executable).name, row.linkage): row for row in report.programs}
    static = rows["asks", "static"]
    assert (static.preloaded, rows["head", "glibc"].preloaded) == (False, True)
    assert report.bypassed == 4  # the four opens of `asks devices`; `head` was preloaded
    assert report.requests(lambda _: True).bytes > 0
    fates = {row.source: row.fate for row in report.coverage}
    assert fates["start bytes of programs (AT_RANDOM)"] == "answered"
    assert fates["RDRAND and RDSEED elsewhere"] == "unseen"
    (uuid,) = (row for row in report.coverage if row.source.endswith("uuid"))
    assert uuid.unanswered == 1


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
@pytest.mark.parametrize("way", ["getrandom", "threads"])
def test_an_independent_witness_sees_no_other_request(launch, asks, tmp_path, way):
    traced = tmp_path / "traced"
    wrapper = ("strace", "-f", "--trace=getrandom,open,openat,execve", f"--output={traced}")
    finished = launch(asks, way, wrapper=wrapper)
    text = traced.read_text()
    seen = len(re.findall(r"\bgetrandom\(", text)) + len(re.findall(r"getrandom resumed", text))
    unfinished = text.count("getrandom(") - len(re.findall(r"getrandom\([^\n]*= ", text))
    answered = sum(row.getrandom.calls for row in finished.report.programs)
    assert answered == seen - unfinished > 0


def test_a_program_of_another_abi_is_refused(launch, asks):
    ended = launch(asks, "other-abi", check=False)
    assert ended.status == 87
    assert "CAP-R109" in ended.errors


@pytest.mark.parametrize(
    "damage",
    [
        "words[used // 8] = 1 << 32",  # a claim without a length
        "words[used // 8] = 1 << 32 | 0xFFFFFFF8",  # a claim that is longer than the journal
        "words[2], words[3] = 2**64 - 1, 1 << 40",  # the next record is in other memory
        "words[3] = 0",
        "words[3] += 4",
        "os.truncate(journal.name, 0)",
    ],
)
def test_a_program_that_damages_the_journal_ends_its_run(launch, damage):
    script = (
        "import mmap, os\n"
        "journal = open(os.environ['CAPSULE_ENTROPY_DIRECTORY'] + '/journal', 'rb+')\n"
        "words = memoryview(mmap.mmap(journal.fileno(), 0)).cast('Q')\n"
        "used = words[3]\n"
        f"{damage}\n"
        "os.execvp('true', ['true'])\n"  # the first bytes of the next program are a new record
    )
    ended = launch(sys.executable, "-c", script, check=False)
    assert ended.status == 87, ended.errors
    assert launch_failure(ended.directory).code == "CAP-R112"


def test_a_program_that_damages_the_profile_it_replays_ends_its_run(launch):
    script = (
        "import os\n"
        f"profile = os.environ['CAPSULE_ENTROPY_DIRECTORY'] + '/{REPLAYED}'\n"
        "if os.path.exists(profile):\n"
        "    with open(profile, 'rb+') as file:\n"
        "        file.seek(12)\n"  # 2**63 empty names of libraries
        "        file.write(b'\\x80' * 9 + b'\\1' + bytes(os.path.getsize(profile) - 22))\n"
        "os.execvp('true', ['true'])\n"
    )
    profile = merge(launch(sys.executable, "-c", script, mode="record").directory)
    ended = launch(sys.executable, "-c", script, mode="replay", profile=profile, check=False)
    assert ended.status == MISMATCH_STATUS


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_program_that_hides_its_memory_is_refused(launch, asks):
    # From root it could hide nothing; and pytest's own folders are root's alone.
    wrapper = ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        program = shutil.copy(asks, folder)
        ended = launch(program, "undumpable", wrapper=wrapper, check=False, within=Path(folder))
    assert ended.status == 87
    assert "CAP-R108" in ended.errors


def test_a_program_that_gains_privileges_elsewhere_runs_without_them(launch):
    script = "grep -E 'NoNewPrivs|Seccomp:' /proc/self/status"
    assert launch("sh", "-c", script).output.split() == ["NoNewPrivs:", "1", "Seccomp:", "2"]


def test_what_a_python_program_draws_is_equal_without_any_preloaded_library(launch):
    script = (
        "import os, random, threading, subprocess, sys, uuid\n"
        "print(os.urandom(9), random.random(), uuid.uuid4(), hash('x'), id(object()))\n"
        "drawn = [None] * 4\n"
        "def draw(i): drawn[i] = os.urandom(4)\n"
        "threads = [threading.Thread(target=draw, args=(i,)) for i in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "child = [sys.executable, '-c', 'import os; print(os.urandom(4))']\n"
        "print(drawn, subprocess.run(child, capture_output=True).stdout)"
    )
    first, again = (launch(sys.executable, "-c", script).output for _ in range(2))
    assert first == again
    assert first != launch(sys.executable, "-c", script, key=bytes(32)).output


@pytest.mark.slow
def test_processes_that_are_killed_while_they_wait_stop_nobody(launch, asks):
    script = (
        f"for i in 1 2 3 4 5 6 7 8; do (while :; do {asks} getrandom; done) & done >/dev/null\n"
        "sleep 0.7; kill -9 $(jobs -p) 2>/dev/null; wait 2>/dev/null\n"
        f"{asks} getrandom; exit 5"
    )
    ended = launch("bash", "-c", script, check=False)
    assert ended.status == 5, ended.errors
    assert ended.output.startswith("getrandom ")


def test_signals_that_interrupt_a_fork_do_not_count_it_twice(launch):
    """A fork that a signal interrupts is made again, and asked for again."""
    script = (
        "import os, signal\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.siginterrupt(signal.SIGALRM, False)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)\n"
        "for _ in range(150):\n"
        "    child = os.fork()\n"
        "    if child == 0: os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "os.execvp('sh', ['sh', '-c', 'head -c 8 /dev/urandom | od -x; exit 0'])"
    )
    finished = [launch(sys.executable, "-c", script) for _ in range(2)]
    assert finished[0].output == finished[1].output
    processes = [one.report.processes for one in finished]
    assert processes[0] == processes[1]


def command_lines():
    """Return the command lines of the processes that there are."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield process.read_text(errors="replace")


def test_a_program_that_outlives_the_first_one_is_ended(launch, tmp_path):
    mark = tmp_path / "mark"
    script = f"(trap '' TERM HUP; sleep 6000; touch {mark}) & setsid sleep 6000 & exit 4"
    ended = launch("sh", "-c", script, check=False)
    assert ended.status == 4
    assert ended.report.outlived >= 2
    assert not any(str(mark) in line for line in command_lines())


def test_orphans_are_reaped(launch):
    script = (
        "import os, time\n"
        "for _ in range(20):\n"
        "    if os.fork() == 0:\n"
        "        if os.fork() == 0: os._exit(0)\n"
        "        os._exit(0)\n"
        "for _ in range(20): os.wait()\n"
        "own = os.getppid()\n"
        "def alone():\n"
        "    children = open(f'/proc/{own}/task/{own}/children').read()\n"
        "    return children.split() == [str(os.getpid())]\n"
        "while not alone(): time.sleep(0.01)\n"
        "print('alone')"
    )
    assert launch(sys.executable, "-c", script).output == "alone\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_are_forwarded(tmp_path, number):
    directory = tmp_path / "directory"
    directory.mkdir()
    script = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(9))\n"
        "print('ready', flush=True); time.sleep(6000)"
    )
    words = [native_part("capsule-launch"), "--entropy", "virtual", "--key", KEY.hex()]
    words += ["--directory", directory, "--", sys.executable, "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(600) == 9
    assert json.loads((directory / "launch-report.json").read_text())["status"] == 9


@pytest.mark.parametrize("options", [(), ("--no-supervisor",)])
def test_a_program_may_signal_its_group(launch, options):
    """The launcher is in it, unless it has a process id namespace of its own."""
    script = "trap '' USR2; kill -USR2 0; sleep 0.3; exit 7"
    words = ("setsid", "--wait")
    assert launch("sh", "-c", script, wrapper=words, options=options, check=False).status == 7


def test_the_program_ends_with_a_launcher_that_is_killed(tmp_path):
    directory = tmp_path / "directory"
    directory.mkdir()
    words = [native_part("capsule-launch"), "--entropy", "virtual", "--key", KEY.hex()]
    words += ["--directory", directory, "--", "sh", "-c", "echo $$; exec sleep 6000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        program = Path("/proc", process.stdout.readline().strip())
        process.kill()
    deadline = time.monotonic() + 600
    while program.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not program.exists()


def test_devices_that_are_closed_while_they_are_refilled_end_nothing(launch):
    """A reader takes the whole pipe at once and goes: nobody is left to refill it for."""
    loop = "for i in $(seq 300); do head -c 16 /dev/urandom; done | wc -c"
    done = launch(shutil.which("busybox"), "sh", "-c", loop)
    assert done.output.split() == ["4800"]
    programs = done.report.programs
    assert sum(program.devices.calls for program in programs) == 300
