"""Programs that can go on by themselves, and such that cannot."""

import os
import signal
import subprocess
import sys
import time

import pytest

from capsule.training.arrivals import standstill
from tests.conftest import wait_until

STUCK = {
    "a lock": "import threading; lock = threading.Lock(); lock.acquire(); say(); lock.acquire()",
    "two threads": "import queue, threading\n"
    "threading.Thread(target=queue.Queue().get).start()\nsay(); queue.SimpleQueue().get()",
    "an event loop": "import asyncio\n"
    "async def main(): say(); await asyncio.Event().wait()\nasyncio.run(main())",
    "a child that waits": "import os\nends = os.pipe()\n"
    "child = os.fork()\nif child: say(); os.wait()\nelse: os.read(ends[0], 1)",
}
ALIVE = {
    "a sleep": "import time; say(); time.sleep(1000)",
    "a timed wait": "import queue; say(); queue.Queue().get(timeout=1000)",
    "a timer of an event loop": "import asyncio\n"
    "async def main(): say(); await asyncio.sleep(1000)\nasyncio.run(main())",
    "a computation": "say()\nwhile True: pass",
    "a thread that sleeps": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(1000,)).start()\nsay(); threading.Lock()\n"
    "import queue; queue.Queue().get()",
}
SAY = "def say(): print(1, flush=True)\n"


@pytest.fixture
def watch(monkeypatch, code):
    """Look at a program that has begun."""
    monkeypatch.setattr(standstill, "LOOK_SECONDS", 0.05)
    command = [sys.executable, "-c", SAY + code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        yield standstill.Standstill()
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("code", STUCK.values(), ids=STUCK)
def test_a_program_all_of_which_waits_is_at_a_standstill(watch):
    wait_until(watch.reached)


@pytest.mark.slow
@pytest.mark.parametrize("code", ALIVE.values(), ids=ALIVE)
def test_a_program_of_which_anything_goes_on_is_not(watch):
    for _ in range(40):
        time.sleep(0.06)
        assert not watch.reached()
