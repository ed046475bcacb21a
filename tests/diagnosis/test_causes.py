"""Real programs that differ from run to run: the cause is named, and the setting that cures it."""

import re

import pytest

from capsule.diagnosis.findings import CATALOGUE
from tests.diagnosis.conftest import SYSTEM_CLOCK

# Few tasks take most of the time, so that workers do different numbers of tasks in each run.
POOL = """\
import secrets, time
from concurrent.futures import ThreadPoolExecutor

def work(number):
    time.sleep((time.monotonic_ns() % 1000 / 1000) ** 4 / 10)
    return secrets.token_bytes(4).hex()

with ThreadPoolExecutor(4) as pool:
    results = list(pool.map(work, range(100)))
print(results)
"""
# Tasks so short that the scheduler alone decides how many of them a worker does: with as many of
# them, two runs hardly agree.
IMAP = """\
import multiprocessing, uuid

def work(number):
    return number, str(uuid.uuid4())

if __name__ == "__main__":
    with multiprocessing.Pool(3) as pool:
        results = list(pool.imap_unordered(work, range(2_000)))
    print(results)
"""
TASKS = """\
import asyncio, time

order = []

async def agent(number):
    await asyncio.sleep((time.monotonic_ns() % 10000) / 1e5)
    order.append(number)

async def main():
    await asyncio.gather(*(agent(number) for number in range(30)))
    result = list(order)
    print(result)

asyncio.run(main())
"""
SEED = """\
import os, random, time
seed = time.time_ns() ^ os.getpid()
random.seed(seed)
print(random.random())
"""


# Without a C library, and with an answer of the processor's that nothing can intercept.
STATIC = """\
__attribute__((force_align_arg_pointer)) void _start(void) {
    unsigned long ticks = __builtin_ia32_rdtsc();
    __asm__ volatile("syscall" : : "a"(1), "D"(1), "S"(&ticks), "d"(8) : "rcx", "r11", "memory");
    __asm__ volatile("syscall" : : "a"(60), "D"(0));
    for (;;) {}
}
"""


def codes(diagnosis):
    return {item.code for item in diagnosis.findings if item.level != "note"} - {"CAP-D101"}


def patch(diagnosis):
    return {name: value for item in diagnosis.findings for name, value in item.patch.items()}


@pytest.mark.slow
@pytest.mark.parametrize("program", [POOL, IMAP, TASKS], ids=["threads", "processes", "tasks"])
def test_a_race_is_named_and_no_setting_is_proposed(diagnosed, program):
    found = diagnosed(program, torch=False)
    assert not found.equal
    assert codes(found) == {"CAP-D111"}
    assert patch(found) == {}
    assert "capsule.training.arrivals" in CATALOGUE["CAP-D111"].fix


@pytest.mark.slow
def test_the_threads_that_race_for_entropy_are_named(diagnosed):
    # On a busy machine the threads race at more than one place.
    found = diagnosed(POOL, torch=False).findings
    races = [item.message for item in found if item.code == "CAP-D111"]
    assert any(re.search(r"thread 0-[1-4] of process 0\.2x \d+ and \d+", race) for race in races)


@pytest.mark.slow
def test_a_process_number_is_named_and_the_clock_that_is_fixed_is_not(diagnosed):
    found = diagnosed(SEED, torch=False, entropy={"clock": "fixed"})
    assert found.equal or codes(found) == {"CAP-D107"}  # equal where process numbers are pinned
    assert patch(found) == {}


@pytest.mark.slow
def test_a_time_that_is_only_printed_is_named(diagnosed):
    found = diagnosed("import time\nprint(time.time())\n", torch=False, **SYSTEM_CLOCK)
    assert not found.equal
    assert codes(found) == {"CAP-D108", "CAP-D110"}
    assert patch(found) == {"entropy.clock": "virtual"}


@pytest.mark.slow
def test_a_monotonic_clock_is_named_without_a_setting(diagnosed):
    found = diagnosed("import time\nprint(time.monotonic())\n", torch=False)
    assert codes(found) == {"CAP-D108"}
    assert patch(found) == {}


@pytest.mark.slow
def test_a_program_past_the_preloaded_library_is_named_where_nothing_else_is(
    diagnosed, compiled, tmp_path
):
    source = tmp_path / "ticks.c"
    source.write_text(STATIC)
    program = compiled(source, "-static", "-nostdlib", "-fno-sanitize=all")
    found = diagnosed(f"import subprocess\nsubprocess.run([{str(program)!r}])\n", torch=False)
    assert not found.equal
    assert codes(found) == {"CAP-D112"}
    (item,) = (item for item in found.findings if item.code == "CAP-D112")
    assert item.message == "ticks"
    assert patch(found) == {}
