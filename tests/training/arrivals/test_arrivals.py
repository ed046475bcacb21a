"""Programs that use what comes first: recorded live, repeated in the recorded order.

No program here depends on time. Live, it opens one gate after the other, so that things arrive in
an order that the test chooses; repeated, all gates are open before it waits for anything, and
everything arrives in another order.
"""

import pytest

from capsule.experiment import contract
from capsule.experiment.arrival_log import ArrivalLog, Completions
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.training.arrivals.files import begin_arrivals, collect_arrivals
from capsule.training.arrivals.waits import Wait
from tests.experiment.test_beneath import dig
from tests.training.arrivals.conftest import refusal

THREADS = """
gates = [threading.Event() for _ in ORDER]
def work(number):
    gates[number].wait()
    return number, os.urandom(4).hex()
def opened():
    for number in ORDER if LIVE else []:
        gates[number].set()
        yield next(results)
    for gate in gates:
        gate.set()
    yield from results
"""
POOL = """
if __name__ == "__main__":
    with ThreadPoolExecutor(len(ORDER)) as pool:
        futures = [arrivals.submit(pool, work, number) for number in range(len(ORDER))]
        results = (future.result() for future in arrivals.as_completed(futures))
        print(list(opened()))
"""
PROCESSES = """
gates = [multiprocessing.Event() for _ in ORDER]
results = None
def work(number):
    gates[number].wait()
    if number == 1:
        raise ValueError("of task 1")
    return number, os.urandom(4).hex()
def tried():
    while True:
        try:
            yield next(calls)
        except ValueError as error:
            yield str(error)
        except StopIteration:
            return
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(len(ORDER)) as pool:
        calls = arrivals.imap_unordered(pool, work, range(len(ORDER)), name="results")
        results = tried()
        print(list(opened()))
"""
INBOX = """
mail = arrivals.Inbox(Queue(), name="mail")
gates = [Event() for _ in ORDER]
def send(number):
    gates[number].wait()
    for part in range(2):
        mail.put((number, part, os.urandom(2).hex()), source=f"sender {number}")
def received():
    for _ in range(2 * len(ORDER)):
        yield mail.get()
if __name__ == "__main__":
    senders = [Sender(target=send, args=(number,)) for number in range(len(ORDER))]
    for sender in senders:
        sender.start()
    got = []
    for number in ORDER if LIVE else []:
        try:
            got.append(mail.get(timeout=0))
        except queue.Empty:
            got.append("nothing")
        gates[number].set()
        got += [mail.get(), mail.get()]
    if not LIVE:
        for gate in gates:
            gate.set()
        while len(got) < 3 * len(ORDER):
            try:
                got.append(mail.get(timeout=600))
            except queue.Empty:
                got.append("nothing")
    for sender in senders:
        sender.join()
    print(got)
"""
COROUTINES = """
async def agent(number, gate):
    parts = [os.urandom(2).hex()]
    await gate.wait()
    parts.append(os.urandom(2).hex())
    return number, parts

async def main():
    gates = [asyncio.Event() for _ in ORDER]
    mail = arrivals.AsyncInbox(asyncio.Queue())
    tasks = [
        asyncio.create_task(arrivals.scoped(agent(number, gate)))
        for number, gate in enumerate(gates)
    ]
    got, results = [], arrivals.completions(tasks)
    for number in ORDER if LIVE else []:
        gates[number].set()
        got.append((await anext(results)).result())
        await mail.put(got[-1], source=f"agent {number}")
    for gate in gates:
        gate.set()
    async for task in results:
        got.append(task.result())
    for number in range(len(ORDER)) if not LIVE else []:
        await mail.put(next(each for each in got if each[0] == number), source=f"agent {number}")
    print(got, [await mail.get() for _ in ORDER])

asyncio.run(main())
"""
THREADED = "from threading import Event, Thread as Sender\nfrom queue import Queue\n"
PROCESSED = "from multiprocessing import Event, Process as Sender, Queue\n"
PROGRAMS = {
    "a pool of threads": THREADS + POOL,
    "a pool of processes": THREADS + PROCESSES,
    "a queue of threads": THREADED + INBOX,
    "a queue of processes": PROCESSED + INBOX,
    "coroutines": COROUTINES,
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_arrived_live_arrives_in_that_order_again(run, program):
    first, second = (run(PROGRAMS[program], order) for order in ((2, 0, 1), (1, 2, 0)))
    assert first.status == second.status == 0, first.errors + second.errors
    assert first.output != second.output
    assert first.log != second.log
    for live in (first, second):
        again = run(PROGRAMS[program], (0, 1, 2), replay=live.log)
        assert again.status == 0, again.errors
        assert (again.output, again.log) == (live.output, live.log)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_without_capsule_a_program_does_the_same(run, program):
    done = run(PROGRAMS[program], (1, 2, 0), under_capsule=False, entropy=None)
    assert done.status == 0, done.errors
    positions = [done.output.index(f"({number}, ") for number in (1, 2, 0) if number != 1]
    assert positions == sorted(positions)


@pytest.mark.slow
def test_a_task_draws_the_same_whichever_worker_does_it(run):
    code = """
def work(number):
    thread = threading.Thread(target=lambda: drawn.__setitem__(number, os.urandom(4).hex()))
    thread.start()
    thread.join()
    return os.urandom(4).hex(), os.urandom(4).hex()
drawn = {}
with ThreadPoolExecutor(ORDER[0]) as pool:
    futures = [arrivals.submit(pool, work, number) for number in range(6)]
    print([future.result() for future in futures], sorted(drawn.items()))
late = threading.Thread(target=lambda: print(os.urandom(4).hex()))
late.start()
late.join()
print(os.urandom(4).hex())
"""
    alone, together = run(code, (1,)), run(code, (6,))
    assert alone.output == together.output, alone.errors
    plain = code.replace("arrivals.submit(pool, work", "pool.submit(work")
    assert run(plain, (1,)).output != run(plain, (6,)).output


@pytest.mark.slow
def test_recorded_randomness_of_tasks_has_their_own_paths(run):
    from capsule.entropy.journal import read_journal

    code = THREADS + POOL
    finished = run(code, (1, 0), entropy="record")
    threads = read_journal(finished.directory / "journal").threads
    paths = {thread.thread for thread in threads if thread.bytes == 4}
    assert paths == {"0~1", "0~3"}


TENSORS = """
import torch
mail = arrivals.Inbox(torch.multiprocessing.Queue(), name="mail")
gates, over = ([multiprocessing.Event() for _ in ORDER] for _ in range(2))
def send(number):
    gates[number].wait()
    mail.put(torch.full((3,), float(number)), source=f"sender {number}")
    over[number].wait()  # torch asks the sender for the file of a tensor
if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    senders = [fork.Process(target=send, args=(number,)) for number in range(len(ORDER))]
    for sender in senders:
        sender.start()
    for number in () if LIVE else range(len(ORDER)):
        gates[number].set()
        while mail._queue.empty():  # until the first one has come
            pass
    for number in ORDER:
        gates[number].set()
        print(mail.get().tolist(), os.urandom(4).hex())
    for event in over:
        event.set()
    for sender in senders:
        sender.join()
"""


@pytest.mark.slow
def test_the_reader_draws_the_same_whichever_message_it_restores_first(run):
    live = run(TENSORS, (2, 0, 1))
    assert live.status == 0, live.errors
    again = run(TENSORS, (2, 0, 1), replay=live.log)
    assert again.output == live.output, again.errors


TWO = """
with ThreadPoolExecutor(2) as pool:
    futures = [pool.submit(pow, 2, number) for number in range(TASKS)]
    waiting = arrivals.as_completed(futures, name="both")
    print([next(waiting).result() for _ in range(TAKEN)])
"""
MAIL = """
mail = arrivals.Inbox(queue.Queue(), name="mail")
for number in range(SENT):
    mail.put(number, source="me")
for number in range(TAKEN):
    print(mail.get())
"""


def with_numbers(code, **numbers):
    return "".join(f"{name} = {value}\n" for name, value in numbers.items()) + code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "recorded", "repeated", "message"),
    [
        (
            TWO,
            {"TASKS": 2, "TAKEN": 2},
            {"TASKS": 3, "TAKEN": 2},
            "is for completions of 3 tasks, but for",
        ),
        (TWO, {"TASKS": 2, "TAKEN": 1}, {"TASKS": 2, "TAKEN": 2}, "recorded run took nothing more"),
        (TWO.replace("both", "wait"), {"TASKS": 2, "TAKEN": 2}, None, "does not occur in"),
        (MAIL, {"SENT": 2, "TAKEN": 1}, {"SENT": 2, "TAKEN": 2}, "recorded run took nothing more"),
    ],
)
def test_a_program_that_takes_another_path_is_told_so(run, code, recorded, repeated, message):
    live = run(with_numbers(code, **recorded))
    assert live.status == 0, live.errors
    other = TWO if repeated is None else code
    error = refusal(run(with_numbers(other, **(repeated or recorded)), replay=live.log))
    assert (error.code, error.exit_code) == ("CAP-T381", ExitCode.DIFFERS)
    assert message in error.message


@pytest.mark.slow
def test_calls_that_end_without_a_recorded_result_are_told_so(run):
    code = """
from multiprocessing.pool import ThreadPool
with ThreadPool(2) as pool:
    print(list(arrivals.imap_unordered(pool, abs, range(*ORDER), name="calls")))
"""
    error = refusal(run(code, (2,), replay=run(code, (3,)).log))
    assert error.code == "CAP-T381"
    assert "never gets the result of task" in error.message


@pytest.mark.slow
@pytest.mark.parametrize("order", [(2, 0, 4), (0, 1, 2)])
def test_calls_that_give_more_results_than_were_recorded_are_told_so(run, order):
    code = """
from multiprocessing.pool import ThreadPool
with ThreadPool(1) as pool:
    print(list(arrivals.imap_unordered(pool, abs, range(5), name="calls")))
"""
    wait = Completions(tasks=None, order=order)
    error = refusal(run(code, replay=ArrivalLog(waits={"calls~1": wait})))
    assert error.code == "CAP-T381"
    assert "but the recorded run took nothing more" in error.message


@pytest.mark.slow
def test_fewer_arrivals_leave_another_log(run):
    live = run(with_numbers(MAIL, SENT=2, TAKEN=2))
    again = run(with_numbers(MAIL, SENT=2, TAKEN=1), replay=live.log)
    assert again.status == 0
    assert again.log != live.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("arrivals.as_completed([], name='1')", "cannot be called '1'"),
        (
            (
                "arrivals.as_completed([], name='a')\n"
                "with ThreadPoolExecutor(1) as pool:\n"
                "    pool.submit(arrivals.as_completed, [], name='a').result()"
            ),
            "two threads or asyncio tasks have a wait called 'a'",
        ),
        (
            (
                "arrivals.as_completed([], name='a')\n"
                "child = multiprocessing.get_context('fork').Process(\n"
                "    target=lambda: arrivals.as_completed([], name='a'))\n"
                "child.start(); child.join(); sys.exit(child.exitcode)"
            ),
            "two processes have a wait called 'a'",
        ),
        (
            (
                "mail = arrivals.Inbox(queue.Queue())\n"
                "for _ in range(2): mail.put(0, source='me')\n"
                "mail.get()\n"
                "with ThreadPoolExecutor(1) as pool: pool.submit(mail.get).result()"
            ),
            "is read by two threads",
        ),
        (
            (
                "mail = arrivals.Inbox(queue.Queue())\n"
                "mail.put(0, source='me')\n"
                "mail.get()\n"
                "def look():\n"
                "    try: mail.get(timeout=0)\n"
                "    except queue.Empty: pass\n"
                "with ThreadPoolExecutor(1) as pool: pool.submit(look).result()"
            ),
            "is read by two threads",
        ),
        (
            (
                "mail = arrivals.Inbox(multiprocessing.Queue())\n"
                "mail.put(0, source='me')\n"
                "mail.put(1, source='me')\n"
                "for _ in range(2):\n"
                "    child = multiprocessing.get_context('fork').Process(target=mail.get)\n"
                "    child.start(); child.join()\n"
                "sys.exit(child.exitcode)"
            ),
            "is read by two threads, processes",
        ),
        (
            (
                "import pickle\n"
                "mail = arrivals.Inbox(queue.Queue())\n"
                "mail._queue.put(('me', 1, 0))\n"
                "mail.get()"
            ),
            "two threads or processes sent as 'me'",
        ),
        (
            (
                "async def wait(): arrivals.completions([]); await asyncio.sleep(0)\n"
                "async def main(): await asyncio.gather(wait(), wait())\n"
                "asyncio.run(main())"
            ),
            "two asyncio tasks that are not scoped",
        ),
    ],
)
def test_waits_without_an_order_of_their_own_are_refused(run, code, message):
    error = refusal(run(code))
    assert (error.code, error.exit_code) == ("CAP-T382", ExitCode.TRAINING_FAILED)
    assert message in error.message


@pytest.mark.slow
def test_without_the_library_of_random_profiles_waits_need_names(run):
    error = refusal(run("arrivals.as_completed([])", entropy=None))
    assert error.code == "CAP-T382"
    assert "no preloaded library" in error.message
    named = run(with_numbers(MAIL, SENT=1, TAKEN=1), entropy=None)
    assert named.log.arrivals == 1


def test_a_line_that_a_full_disk_cut_short_is_an_error_with_a_code(begun, tmp_path):
    (path,) = (tmp_path / contract.ARRIVALS_FOLDER).glob("*.jsonl")
    with path.open("ab") as file:
        file.write(b'["full')
    collect_arrivals(tmp_path)  # a process that was killed
    begun.take()
    with pytest.raises(CapsuleError, match=r"CAP-T131 .*has an incomplete line"):
        collect_arrivals(tmp_path)


def test_a_program_that_starts_over_forgets_its_arrivals_and_one_that_resumes_is_refused(tmp_path):
    begin_arrivals(tmp_path, resumed=True)
    Wait(tmp_path, "completions", "some~1", 3)
    with pytest.raises(CapsuleError) as caught:
        begin_arrivals(tmp_path, resumed=True)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-T384", ExitCode.USAGE)
    dig(tmp_path / contract.ARRIVALS_FOLDER, 1_100)  # the program can write there
    begin_arrivals(tmp_path, resumed=False)
    assert not any(tmp_path.iterdir())
    collect_arrivals(tmp_path)
    assert not any(tmp_path.iterdir())
