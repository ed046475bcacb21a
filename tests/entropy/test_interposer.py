"""The interposer, in real programs."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from capsule.entropy.journal import EntropyCall, is_full, read_journal
from capsule.entropy.profile import check_consumed, merge, parse, serialize
from capsule.experiment.errors import CapsuleError
from tests.conftest import wait_until
from tests.entropy.conftest import given
from tests.entropy.journals import describe

HERE = Path(__file__).parent
OTHER_KEY = bytes(32)
# Of native/source/shared/entropy.h.
LOADED_SIGNAL = 41
MISMATCH_SIGNAL = 42


def replay(interposed, profile, *command, **options):
    finished = interposed(*command, mode="replay", profile=profile, **options)
    assert check_consumed(finished.directory, parse(profile)) == ()
    return finished


def refusal(finished, profile):
    """What is said about a replay that ended early."""
    assert finished.status == -signal.SIGKILL
    with pytest.raises(CapsuleError) as caught:
        check_consumed(finished.directory, parse(profile))
    return f"{caught.value}"


# ---- every way to ask ----


@pytest.mark.slow
def test_every_way_to_ask_gives_the_derived_bytes(interposed, probe):
    runs = [interposed(probe), interposed(probe), interposed(probe, key=OTHER_KEY)]
    assert runs[0].lines == runs[1].lines
    assert len(set(runs[0].lines) | set(runs[2].lines)) == 2 * len(runs[0].lines)
    uses = read_journal(runs[0].directory).uses
    assert {use.source for use in uses} == set(EntropyCall)
    assert {use.caller for use in uses} == {"probe"}


def test_every_way_to_ask_is_recorded_and_replayed(interposed, probe):
    recorded, profile = interposed.record(probe)
    replayed = replay(interposed, profile, probe)
    assert replayed.lines == recorded.lines
    assert interposed.record(probe)[0].lines != recorded.lines
    first, second = (read_journal(run.directory).uses for run in (recorded, replayed))
    assert first == second == describe(parse(profile))


def test_what_is_kept_of_a_call_is_expanded_as_documented(interposed):
    """The documented test vector, by the interposer and by other implementations."""
    document = HERE.parents[1] / "docs" / "random-profiles.md"
    vector = re.search(r"100 bytes returns\n\n((?: {4}[0-9a-f]+\n)+)", document.read_text())
    documented = "".join(vector[1].split())
    ask = (sys.executable, "-I", "-c", "import os; print(os.urandom(100).hex())")
    recorded, data = interposed.record(*ask)
    profile = parse(data)
    (thread,) = profile.threads
    assert thread.calls[-1].size == 100
    assert given(thread.calls[-1]).hex() == recorded.output.strip()
    call = replace(thread.calls[-1], kept=bytes(range(32)))
    made = replace(profile, threads=(replace(thread, calls=(*thread.calls[:-1], call)),))
    assert documented == given(call).hex()
    assert documented == replay(interposed, serialize(made), *ask).output.strip()


def test_children_do_not_share_bytes(interposed, probe):
    values = [line.rsplit(" ", 1)[1] for line in interposed(probe).lines]
    assert len(set(values)) == len(values)


@pytest.fixture(scope="session")
def corners(compiled):
    return compiled(HERE / "corners.c")


@pytest.mark.parametrize(
    "way",
    [
        *("many-systems", "cancel-open", "probe-clone3", "many-streams", "zone-alone"),
        *("own-position", "assigned-words", "no-folder", "bad-pointer"),
    ],
)
def test_what_programs_rarely_do_is_as_it_is_without_the_interposer(
    interposed, corners, way, tmp_path
):
    assert interposed(corners, way, cwd=tmp_path).output == "well\n"


@pytest.mark.parametrize(
    ("way", "count"),
    [
        ("hidden-fork", 3),
        ("c11-threads", 8),
        ("reused-number", 2),
        ("stale-numbers", 5),
        ("lost-environment", 3),
    ],
)
def test_what_programs_rarely_do_gives_derived_bytes(interposed, corners, way, count, tmp_path):
    first, second = (interposed(corners, way, cwd=tmp_path) for _ in range(2))
    assert first.lines == second.lines
    assert len({line.split()[1] for line in first.lines}) == len(first.lines) == count


def test_a_device_is_read_as_standard_input(interposed):
    script = (
        "od -An -tx1 -N8; od -An -tx1 -N8; head -c 8 | od -An -tx1; "
        f"{sys.executable} -Ic 'print(input is None, open(0, \"rb\").read(8).hex())'"
    )
    runs = [interposed("sh", "-c", f"({script}) < /dev/urandom") for _ in range(2)]
    assert runs[0].lines == runs[1].lines
    assert len({line.replace(" ", "") for line in runs[0].lines}) == 4
    assert all(len(line) >= 16 for line in runs[0].lines)


@pytest.mark.parametrize("length", [190, 191])
def test_a_path_may_be_as_long_as_a_path_can_be(interposed, length):
    deep = "0" * length
    code = (
        "import _posixsubprocess, os, subprocess, sys\n"
        "print(os.urandom(4).hex(), os.environ['CAPSULE_ENTROPY_PATH'], flush=True)\n"
        "environment = {name: os.environ[name] for name in os.environ}\n"
        "if len(sys.argv) > 1: os.execve(sys.executable, [sys.executable, '-c', sys.argv[1]],"
        " environment)\n"
    )
    lines = interposed.python(code, code, entropy_path=deep).lines
    assert len({line.split()[0] for line in lines}) == len(lines) == 2
    marked = lines[0].split()[1]
    assert marked == f"{deep}?" if length < 191 else re.fullmatch("#[0-9a-f]{64}", marked)


def test_the_system_mode_leaves_a_program_alone(interposed, probe):
    assert interposed(probe, mode="system").lines != interposed(probe, mode="system").lines


def test_an_older_kernel_changes_no_error_number(interposed, corners):
    assert interposed(corners, "old-kernel", mode="record").output == "well\n"


def test_the_system_mode_gives_the_errors_of_the_kernel(interposed, corners):
    assert interposed(corners, "bad-pointer", mode="system").output == "well\n"


@pytest.mark.parametrize("clock", ["virtual", "fixed", "system"])
def test_calls_by_number_give_the_kernels_errors_for_bad_pointers(interposed, corners, clock):
    assert interposed(corners, "bad-times", clock=clock, cores="2").output == "well\n"


# ---- Python ----


@pytest.mark.slow
def test_an_unseeded_experiment_is_repeatable_without_a_recording(interposed):
    first, second = interposed.twice(sys.executable, HERE / "script.py")
    assert first.lines == second.lines
    assert len(first.lines) == 11


@pytest.mark.slow
def test_an_unseeded_experiment_is_recorded_and_replayed(interposed):
    script = (sys.executable, HERE / "script.py")
    recorded, profile = interposed.record(*script)
    assert "libc10.so" in {use.caller for use in describe(parse(profile))}
    for replayed in interposed.twice(*script, mode="replay", profile=profile):
        assert check_consumed(replayed.directory, parse(profile)) == ()
        assert replayed.lines == recorded.lines


START_UP = (
    "import ale_py, gymnasium, numpy, random, torch\n"
    "gymnasium.register_envs(ale_py)\n"
    "environment = gymnasium.make('ALE/Breakout-v5')\n"
    "environment.reset()\n"
    "environment.action_space.sample()\n"
    "numpy.random.default_rng(), numpy.random.rand(), torch.rand(1), random.random()\n"
)


@pytest.mark.slow
def test_a_typical_start_is_recorded_in_a_kilobyte(interposed):
    _, profile = interposed.record(sys.executable, "-c", START_UP)
    given_bytes = sum(use.bytes for use in describe(parse(profile)))
    assert given_bytes > 2496  # an interpreter's own generator, at least
    assert len(profile) < 1000


METHODS = ("fork", "spawn", "forkserver")


@pytest.mark.slow
def test_unseeded_workers_are_repeatable(interposed):
    first, second = interposed.twice(sys.executable, HERE / "workers.py", *METHODS)
    assert first.lines == second.lines
    assert [line.split()[0] for line in first.lines] == [*METHODS, "vector"]


@pytest.mark.slow
def test_unseeded_workers_are_recorded_and_replayed(interposed):
    script = (sys.executable, HERE / "workers.py", *METHODS)
    recorded, profile = interposed.record(*script)
    assert replay(interposed, profile, *script).lines == recorded.lines


def test_subprocesses_stay_covered_in_a_cleaned_environment(interposed):
    code = (
        "import os, subprocess, sys\n"
        "ask = [sys.executable, '-I', '-c', 'import os; print(os.urandom(8).hex())']\n"
        "for options in ({}, {'env': {}}, {'close_fds': False}, {'start_new_session': True},\n"
        "                {'env': {'LD_PRELOAD': 'libdl.so.2'}}, {'preexec_fn': lambda: None}):\n"
        "    subprocess.run(ask, check=True, **options)\n"
    )
    first, second = interposed.python(code), interposed.python(code)
    assert first.lines == second.lines
    assert len(set(first.lines)) == len(first.lines) == 6


def test_children_stay_covered_however_many_settings_a_program_has(interposed):
    environment = {f"CAPSULE_MINE_{number}": "" for number in range(100)}
    environment |= interposed.environment(interposed.folder)
    code = "import subprocess; subprocess.run(['od', '-N8', '/dev/urandom'], env={})"
    command = [sys.executable, "-c", code]
    first, second = (subprocess.check_output(command, env=environment) for _ in range(2))
    assert first == second


def test_threads_are_told_apart_by_creation_not_by_who_asks_first(interposed):
    code = (
        "import os, random, threading, time\n"
        "values = {}\n"
        "def ask(number):\n"
        "    time.sleep(time.perf_counter_ns() // 100 % 7 / 200)\n"
        "    values[number] = os.urandom(8).hex()\n"
        "    if os.fork() == 0: os.write(1, f'{number} {os.urandom(4).hex()}\\n'.encode());"
        " os._exit(0)\n"
        "    os.wait()\n"
        "threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
        "print(sorted(values.items()))\n"
    )
    first, second = interposed.python(code), interposed.python(code)
    assert sorted(first.lines) == sorted(second.lines)
    assert len(first.lines) == 9


# ---- programs that make it hard ----


def test_a_recording_survives_sigkill_but_for_nothing(interposed):
    code = (
        "import os, signal\n"
        "for size in range(1, 200): print(os.urandom(size).hex(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = interposed.python(code, mode="record", check=False)
    assert killed.status == -signal.SIGKILL
    (thread,) = parse(merge(killed.directory)).threads
    assert [given(call).hex() for call in thread.calls[-199:]] == killed.lines


HARD = (
    "import os, sys\n"
    "os.closerange(0, 1) or os.closerange(2, 1000); os.chdir('/')\n"
    "if os.getuid() == 0: os.chroot('/usr'); os.setgroups([]); os.setuid(65534)\n"
    "def show(): os.write(1, os.urandom(8).hex().encode() + b'\\n')\n"
    "show()\n"
    "pid = os.fork()\n"
    "if pid == 0: show(); os._exit(0)\n"
    "os.waitpid(pid, 0)\n"
    "show()\n"
)


def test_a_program_that_gives_up_descriptors_and_privileges_is_recorded(interposed):
    recorded, profile = interposed.record(sys.executable, "-c", HARD)
    assert len(recorded.lines) == 3
    assert replay(interposed, profile, sys.executable, "-c", HARD).lines == recorded.lines


def test_an_exec_that_cannot_reach_the_journal_is_not_run_unrecorded(interposed):
    code = (
        "import os\n"
        "os.rename(os.environ['CAPSULE_ENTROPY_DIRECTORY'], 'elsewhere')\n"
        "os.execv('/bin/true', ['true'])\n"
    )
    finished = interposed.python(code, mode="record", check=False, cwd=interposed.folder)
    assert finished.status == -signal.SIGKILL
    assert "capsule-entropy: the journal in" in finished.errors


def test_a_disk_without_room_for_the_journal_ends_the_run_and_is_told(interposed, tmp_path):
    disk, kept = (tmp_path / name for name in ("disk", "kept"))
    disk.mkdir()
    kept.mkdir()
    code = "import os\nfor _ in range(3000): os.urandom(32)\nprint('ended')"
    script = (
        'mount -t tmpfs -o size=64k none "$1" || exit 1\n'
        'LD_PRELOAD="$2" setsid --wait "$3" -c "$4"; status=$?\n'
        'head -c 64 "$1/journal" > "$5/journal"; exit $status\n'
    )
    environment = interposed.environment(disk, "record")
    words = [disk, environment.pop("LD_PRELOAD"), sys.executable, code, kept]
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    ended = subprocess.run([*namespace, *words], env=environment, capture_output=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGKILL, b""), ended.stderr
    assert is_full(kept)


def test_many_processes_and_threads_write_to_one_journal(interposed):
    code = (
        "import os, threading\n"
        "def ask():\n"
        "    for size in range(1, 300): os.urandom(size)\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        threads = [threading.Thread(target=ask) for _ in range(4)]\n"
        "        for thread in threads: thread.start()\n"
        "        for thread in threads: thread.join()\n"
        "        os._exit(0)\n"
        "for _ in range(6): os.wait()\n"
    )
    _, profile = interposed.record(sys.executable, "-c", code)
    threads = [thread for thread in parse(profile).threads if thread.thread != "0"]
    assert len(threads) == 24
    for thread in threads:
        assert [call.size for call in thread.calls] == list(range(1, 300))


# ---- replays that do not fit ----

ASK = (
    "import os, sys\n"
    "if os.fork() == 0:\n"
    "    for size in map(int, sys.argv[1:]): os.urandom(size)\n"
    "    os._exit(0)\n"
    "os.wait()\n"
)


@pytest.fixture
def asked(interposed):
    return interposed.record(sys.executable, "-c", ASK, "8", "16")[1]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (("8", "32"), "for 32 bytes from getrandom as its call 1, at offset 8; recorded there: 16"),
        (("8", "16", "4"), "for 4 bytes from getrandom as its call 2, at offset 24; only 2 calls"),
    ],
)
def test_other_requests_than_recorded_end_the_run_and_are_told(interposed, asked, sizes, told):
    finished = interposed.python(ASK, *sizes, mode="replay", profile=asked, check=False)
    said = refusal(finished, asked)
    assert "CAP-R221 the replay requested other randomness than was recorded" in said
    assert f"process 0.1, thread 0 asked {told}" in said


def test_a_thread_that_was_not_recorded_is_told(interposed, asked):
    code = ASK.replace("if os.fork()", "if os.fork() == 0: os._exit(0)\nos.wait()\nif os.fork()")
    finished = interposed.python(code, "8", mode="replay", profile=asked, check=False)
    said = refusal(finished, asked)
    assert "process 0.2, thread 0 asked for 8 bytes" in said
    assert "nothing was recorded for it" in said


def test_fewer_requests_than_recorded_are_told(interposed, asked):
    finished = interposed.python(ASK, "8", mode="replay", profile=asked)
    with pytest.raises(
        CapsuleError, match=r"made 1 of 2 calls; .* 16 bytes .* at offset 8"
    ) as told:
        check_consumed(finished.directory, parse(asked))
    assert told.value.code == "CAP-R222"


def test_derived_bytes_beyond_the_recording_are_declared_and_flagged(interposed, asked):
    options = {"mode": "replay", "profile": asked, "entropy_exhaustion": "virtual"}
    finished = interposed.python(ASK, "8", "16", "4", **options)
    (thread,) = check_consumed(finished.directory, parse(asked))
    assert (thread.process, thread.derived_calls, thread.derived_bytes) == ("0.1", 1, 4)


def test_a_pool_whose_work_goes_elsewhere_ends_instead_of_respawning(interposed):
    code = (
        "import multiprocessing, os, sys, time\n"
        "def task(number):\n"
        "    time.sleep(0.5 if sys.argv[1] == str(number) else 0.01)\n"
        "    return os.urandom(number)\n"
        "multiprocessing.set_start_method('fork')\n"
        "with multiprocessing.Pool(2) as pool: pool.map(task, range(1, 9), chunksize=1)\n"
    )
    profile = interposed.record(sys.executable, "-c", code, "1")[1]
    finished = interposed.python(code, "2", mode="replay", profile=profile, check=False)
    assert "CAP-R221" in refusal(finished, profile)


def test_the_launcher_is_asked_to_end_the_run(interposed, asked, tmp_path):
    directory = tmp_path / "launched"
    directory.mkdir()
    settings = {"profile": asked, "launcher_pid": str(os.getpid())}
    environment = interposed.environment(directory, "replay", **settings)
    # Handlers, since signals that this thread alone blocks would end the process of the tests.
    received = []
    asked_for = (LOADED_SIGNAL, MISMATCH_SIGNAL)
    before = {
        each: signal.signal(each, lambda each, _: received.append(each)) for each in asked_for
    }
    try:
        command = [sys.executable, "-c", ASK, "9"]
        with subprocess.Popen(command, env=environment, start_new_session=True) as process:
            wait_until(lambda: received)
            os.kill(process.pid, LOADED_SIGNAL)
            wait_until(lambda: received[1:])
            os.killpg(process.pid, signal.SIGKILL)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert tuple(received) == asked_for
    assert read_journal(directory).mismatch.requested == (EntropyCall.GETRANDOM, 9)


def test_a_process_with_wrong_settings_waits_for_the_launcher_to_end_the_run(interposed, tmp_path):
    settings = {"entropy_key": "12", "launcher_pid": str(os.getpid())}
    environment = interposed.environment(tmp_path, **settings)
    received = []
    before = signal.signal(MISMATCH_SIGNAL, lambda number, _: received.append(number))
    try:
        with subprocess.Popen(["true"], env=environment, stderr=subprocess.DEVNULL) as process:
            state = Path(f"/proc/{process.pid}/stat")
            wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] in "SZ" and received)
            assert process.poll() is None
            process.kill()
    finally:
        signal.signal(MISMATCH_SIGNAL, before)


# ---- settings that cannot be right ----


def refused(interposed, **options):
    finished = interposed("/bin/true", check=False, **options)
    assert finished.status == -signal.SIGKILL
    return finished.errors


def test_settings_that_cannot_be_right_stop_the_program(interposed, asked, tmp_path):
    assert "'fresh' is not a value of CAPSULE_ENTROPY" in refused(interposed, mode="fresh")
    assert "CAPSULE_ENTROPY_KEY is not a key" in refused(interposed, entropy_key="12")
    assert "CAPSULE_ENTROPY_PATH is too long" in refused(interposed, entropy_path="0" * 300)
    assert "cannot be opened" in refused(
        interposed, mode="record", entropy_directory=str(tmp_path / "none")
    )
    assert "replayed.profile is not an intact profile" in refused(interposed, mode="replay")
    assert "CAPSULE_CORES is '-4'" in refused(interposed, cores="-4")
    assert "CAPSULE_CLOCK_PASSED is '1s'" in refused(interposed, clock_passed="1s")
    changed = asked[:-40] + bytes([asked[-40] ^ 1]) + asked[-39:]
    for damaged in (asked[:-1], changed, b"x" + asked[1:], b""):
        said = refused(interposed, mode="replay", profile=damaged)
        assert "not an intact profile" in said
