"""The calendar clock of programs under the interposer."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from capsule.entropy.journal import read_journal

HERE = Path(__file__).parent
START = 1_767_225_600_000_000_000  # 2026-01-01, in nanoseconds since 1970
STEP = 1_000_000
CLOCK = "virtual"


@pytest.fixture
def dates(interposed):
    """Return a function that runs Python code and returns the numbers that it printed."""

    def run(code, clock=CLOCK, **options):
        prelude = "import os, sys, threading, time\nnow = time.time_ns\n"
        finished = interposed.python(prelude + code, clock=clock, **options)
        return [int(word) for word in re.findall(r"\d+", finished.output)]

    return run


def test_a_fixed_clock_stands_still(dates):
    code = (
        "print(now(), now(), time.time_ns(), time.localtime().tm_year)\n"
        "time.sleep(0.01)\n"
        "thread = threading.Thread(target=lambda: print(now())); thread.start(); thread.join()\n"
    )
    assert dates(code, clock="fixed") == [START, START, START, 2026, START]


def test_each_reading_advances_a_virtual_clock_by_a_step(dates):
    first, second = (dates("print(now(), now(), now())") for _ in range(2))
    assert first == second
    assert [b - a for a, b in pairwise(first)] == [STEP, STEP]
    assert 0 < first[0] - START < 100 * STEP


def test_a_sleep_advances_a_virtual_clock_by_its_duration(dates):
    before, after = dates("print(now()); time.sleep(0.123456789); print(now())")
    assert after - before == STEP + 123_456_789


def test_a_new_thread_goes_on_with_its_creators_clock(dates):
    code = (
        "time.sleep(0.02)\n"
        "print(now())\n"
        "def tell(): print(now())\n"
        "threads = [threading.Thread(target=tell) for _ in range(2)]\n"
        "for thread in threads: thread.start(); thread.join()\n"
        "print(now())\n"
    )
    before, one, other, after = dates(code)
    assert before < min(one, other, after)
    assert len({one, other, after}) == 3  # each thread has a phase of its own
    assert max(one, other, after) - before < 2 * STEP


@pytest.mark.parametrize(
    "start",
    [
        "if os.fork() == 0: print(now(), flush=True); os._exit(0)\nos.wait()\n",
        "import subprocess; subprocess.run([sys.executable, '-c', TELL], check=True)\n",
        "import subprocess; subprocess.run([sys.executable, '-c', TELL], env={})\n",
        "os.system(f'{sys.executable} -c \"{TELL}\"')\n",
        "print(os.popen(f'{sys.executable} -c \"{TELL}\"').read(), flush=True)\n",
        "os.execv(sys.executable, [sys.executable, '-c', TELL])\n",
    ],
)
def test_a_new_process_goes_on_with_its_creators_clock(dates, start):
    code = (
        "TELL = 'import time; print(time.time_ns())'\ntime.sleep(0.5)\nprint(now(), flush=True)\n"
    )
    before, after = dates(code + start)
    assert before < after < before + 100 * STEP


@pytest.mark.slow
def test_waits_end_when_they_should_and_advance_the_clock(interposed, compiled):
    waits = compiled(HERE / "waits.c")
    virtual, again, real = (
        interposed(waits, clock=clock).lines for clock in (CLOCK, CLOCK, "system")
    )
    assert [line.rsplit(" ", 1)[0] for line in virtual] == [line.rsplit(" ", 1)[0] for line in real]
    assert virtual == again
    advanced = {name: int(by) for name, by in (line.rsplit(" ", 1) for line in virtual)}
    # One step for the first reading, one for the deadline's.
    timers = ("timer", "timerfd", "SYS_timer_settime", "SYS_timerfd_settime")
    for name in ("steady condition", *timers):
        assert advanced.pop(name) == 2 * STEP
    assert all(20_000_000 <= by <= 20_000_000 + 2 * STEP for by in advanced.values()), advanced


@pytest.mark.slow
def test_waits_under_a_fixed_clock_end_when_they_should(interposed, compiled):
    lines = interposed(compiled(HERE / "waits.c"), clock="fixed").lines
    assert {line.rsplit(" ", 1)[1] for line in lines} == {"0"}


def test_a_wait_that_ends_before_its_time_does_not_advance_the_clock(dates):
    code = (
        "event = threading.Event(); print(now())\n"
        "def end(): time.sleep(0.01); event.set()\n"
        "threading.Thread(target=end).start()\n"
        "assert event.wait(300); print(now())\n"
    )
    before, after = dates(code)
    assert after - before == STEP


def test_what_is_left_of_a_duration_counts_as_the_whole(dates):
    """queue.get computes what is left by the monotonic clock, whose readings are the machine's."""
    code = (
        "import queue; print(now())\n"
        "try: queue.Queue().get(timeout=0.1)\n"
        "except queue.Empty: print(now())\n"
    )
    before, after = dates(code)
    assert after - before == STEP + 100_000_000


def test_a_program_that_waits_for_a_date_in_a_loop_ends(dates):
    begun, ended = dates("t = now(); print(t)\nwhile now() < t + 10**10: pass\nprint(now())")
    assert ended >= begun + 10**10


LIBRARIES = (
    "import asyncio, concurrent.futures, logging, multiprocessing, sys, threading, time, zipfile\n"
    "logging.basicConfig(stream=sys.stdout, format='%(asctime)s %(message)s')\n"
    "logging.warning('begun')\n"
    "asyncio.run(asyncio.wait_for(asyncio.sleep(0.05), 60))\n"
    "try: asyncio.run(asyncio.wait_for(asyncio.sleep(600), 0.05))\n"
    "except TimeoutError: logging.warning('asyncio')\n"
    "with concurrent.futures.ThreadPoolExecutor(2) as pool:\n"
    "    enough = threading.Event()\n"
    "    future = pool.submit(enough.wait)\n"
    "    try: future.result(timeout=0.05)\n"
    "    except concurrent.futures.TimeoutError: logging.warning('futures')\n"
    "    enough.set()\n"
    "context = multiprocessing.get_context('fork')\n"
    "assert not context.Semaphore(0).acquire(timeout=0.05)\n"
    "with context.Pool(1) as pool: print(pool.map(int, '123'), time.time_ns())\n"
    "with zipfile.ZipFile('archive.zip', 'w') as archive: archive.writestr('member', 'text')\n"
    "print(open('archive.zip', 'rb').read().hex(), time.strftime('%Y-%m-%d', time.localtime()))\n"
)


def test_libraries_tell_the_same_time_in_each_run(interposed, tmp_path):
    first, again = (interposed.python(LIBRARIES, clock=CLOCK, cwd=tmp_path) for _ in range(2))
    assert first.lines == again.lines
    assert first.lines[-1].endswith(" 2026-01-01")


def test_a_child_that_takes_too_long_is_stopped(dates):
    """subprocess sleeps until the child has ended, as often as the machine happens to need."""
    code = (
        "import subprocess; print(now())\n"
        "try: subprocess.run(['sleep', '600'], timeout=0.1)\n"
        "except subprocess.TimeoutExpired: print(now())\n"
    )
    before, after = dates(code)
    assert before < after < before + 10**9


def test_what_was_told_is_written_down(interposed):
    code = "import time; time.time(); time.sleep(0.01)"
    (told,) = read_journal(interposed.python(code, clock=CLOCK).directory).told
    assert (told.process, told.clock, told.waits) == ("0", "virtual", 1)
    assert told.readings >= 1
    (told,) = read_journal(interposed.python(code, clock="system").directory).told
    assert (told.clock, told.readings, told.waits) == ("system", 0, 0)


def test_a_program_without_the_interposer_reads_the_machines_clock(interposed):
    """So the tests above would fail without it."""
    command = [sys.executable, "-c", "import time; print(time.time_ns())"]
    assert int(subprocess.check_output(command)) > START + 10**15
