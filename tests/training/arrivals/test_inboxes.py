"""Inboxes: queues as they are without Capsule, and with it in the order of arrival again."""

import asyncio
import itertools
import pickle
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment import contract
from capsule.experiment.arrival_log import NOTHING, Messages
from capsule.training import arrivals
from capsule.training.arrivals.inboxes import AsyncInbox, Inbox
from tests.training.arrivals.conftest import NAMES, enter_run, only_wait, refused

# --- without Capsule ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [queue.Queue, queue.SimpleQueue])
def test_without_capsule_an_inbox_is_the_queue_that_it_wraps(monkeypatch, make):
    monkeypatch.delenv(contract.RUN_VARIABLE, raising=False)
    wrapped, plain = make(), make()
    inbox = Inbox(wrapped)  # no name is needed
    for item in ("one", None, "three"):
        inbox.put(item, source="me")
        plain.put(item)
    assert [inbox.get(), inbox.get(timeout=0), inbox.get()] == [plain.get() for _ in range(3)]
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0)


def test_without_capsule_an_asyncio_inbox_is_the_queue_that_it_wraps(monkeypatch):
    monkeypatch.delenv(contract.RUN_VARIABLE, raising=False)

    async def main():
        inbox = AsyncInbox(asyncio.Queue())
        for item in range(3):
            await inbox.put(item, source="me")
        return [await inbox.get() for _ in range(3)]

    assert asyncio.run(main()) == [0, 1, 2]


@pytest.mark.parametrize("under_capsule", [False, True])
@pytest.mark.parametrize(
    ("inbox", "queues"), [(Inbox, queue), (AsyncInbox, asyncio)], ids=["threads", "asyncio"]
)
@pytest.mark.parametrize("name", ["LifoQueue", "PriorityQueue"])
def test_a_queue_with_an_order_of_its_own_is_rejected(
    in_run, monkeypatch, inbox, queues, name, under_capsule
):
    if under_capsule:
        in_run()
    else:
        monkeypatch.delenv(contract.RUN_VARIABLE, raising=False)
    with pytest.raises(TypeError, match=f"first in, first out, which {name} is not"):
        inbox(getattr(queues, name)(), name=next(NAMES))


def test_a_source_needs_a_name_that_a_log_can_hold():
    import queue

    for source in ("", "a" * 501):
        with pytest.raises(ValueError, match="a name of 1 to 500"):
            arrivals.Inbox(queue.Queue()).put(0, source=source)


def test_a_source_of_an_asyncio_inbox_needs_a_name_as_well():
    with pytest.raises(ValueError, match="a name of 1 to 500"):
        asyncio.run(AsyncInbox(asyncio.Queue()).put(0, source=""))


# --- recorded and repeated ------------------------------------------------------------------------


def test_the_order_of_arrival_and_the_moments_without_a_message_are_recorded(in_run):
    directory = in_run()
    inbox = Inbox(queue.Queue(), name=next(NAMES))
    inbox.put("b0", source="b")
    assert inbox.get() == "b0"
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0)
    for item in ("a0", "b1"):
        inbox.put(item, source=item[0])
        assert inbox.get(timeout=600) == item
    wait = only_wait(directory)
    assert (wait.sources, wait.order) == (("b", "a"), (0, NOTHING, 1, 0))


EVENTS = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=8)


def sent_by(events):
    """Return each source's messages in order: how many it had sent before, and its name."""
    numbers = {}
    for source in filter(None, events):
        yield source, numbers.setdefault(source, 0)
        numbers[source] += 1


@settings(max_examples=20)
@given(EVENTS, st.randoms(use_true_random=False))
def test_messages_are_got_in_the_recorded_order_however_they_come(
    tmp_path_factory, events, shuffled
):
    folder, name = tmp_path_factory.mktemp("inboxes"), next(NAMES)
    messages = list(sent_by(events))
    with pytest.MonkeyPatch.context() as patch:
        enter_run(folder / "live", patch)
        inbox, arriving = Inbox(queue.Queue(), name=name), iter(messages)
        expected = []
        for source in events:
            if source is not None:
                inbox.put(next(arriving), source=source)
            expected.append(got_from(inbox, 0))
        assert expected == [None if each is None else messages.pop(0) for each in events]
        live = only_wait(folder / "live")

        # The second inbox of this name, in a process that made the first one as well.
        enter_run(folder / "again", patch, {f"{name}~2": live})
        inbox = Inbox(queue.SimpleQueue(), name=name)
        waiting = {source: [] for source in "abc"}
        for source, number in sent_by(events):
            waiting[source].append(number)
        order = [source for source in events if source]
        shuffled.shuffle(order)
        for source in order:
            inbox.put((source, waiting[source].pop(0)), source=source)
        assert [got_from(inbox, 600) for _ in events] == expected
        assert only_wait(folder / "again") == live


def got_from(inbox, timeout):
    try:
        return inbox.get(timeout=timeout)
    except queue.Empty:
        return None


def test_a_message_that_came_in_time_when_recorded_may_be_late_in_a_replay(in_run):
    name = next(NAMES)
    directory = in_run({f"{name}~1": Messages(sources=("a",), order=(0, NOTHING))})
    inbox = Inbox(queue.Queue(), name=name)
    sender = threading.Timer(0.05, inbox.put, ("late",), {"source": "a"})
    sender.start()
    assert inbox.get(timeout=0) == "late"
    sender.join()
    with pytest.raises(queue.Empty):
        inbox.get(timeout=600)  # at once, as nothing had come
    assert only_wait(directory).order == (0, NOTHING)


class Mail:
    """A queue that can be passed to a process."""

    def __init__(self):
        self.items = []

    def put(self, item):
        self.items.append(item)

    def get(self):
        return self.items.pop(0)


def test_a_copy_of_an_inbox_for_another_process_leaves_messages_with_the_reader(in_run):
    name = next(NAMES)
    in_run({f"{name}~1": Messages(sources=("a", "b"), order=(0, 1))})
    inbox = Inbox(Mail(), name=name)
    inbox.put(threading.Lock(), source="b")  # which cannot be passed on
    inbox.put("first", source="a")
    assert inbox.get() == "first"
    pickle.dumps(inbox)


DATES = """
import subprocess, time

def tell():
    print(time.time_ns(), flush=True)

def wait_in_vain(inbox):
    for timeout in (0.1, 0.0623, 0.0499, 1e-9, 0):
        try:
            inbox.get(timeout)
        except queue.Empty:
            tell()

make = {"threads": queue.Queue, "simple": queue.SimpleQueue, "processes": multiprocessing.Queue}
inbox = arrivals.Inbox(make[ORDER[0]](), name="inbox")
tell()
if not LIVE:
    inbox.put("sent", source="me")
wait_in_vain(inbox)
if LIVE:
    inbox.put("sent", source="me")
inbox.get(60)
tell()
if os.fork() == 0:
    tell()
    os._exit(0)
os.wait()
subprocess.run([sys.executable, "-c", "import time; print(time.time_ns())"], check=True)
"""
STEP = 1_000_000  # by which a reading advances the clock


@pytest.mark.slow
@pytest.mark.parametrize("make", ["threads", "simple", "processes"])
def test_a_time_out_advances_the_clock_in_a_replay_as_when_it_was_recorded(run, make):
    """Programs measure how long they waited, and children begin with their creator's clock."""
    live = run(DATES, [make], clock="virtual")
    again = run(DATES, [make], clock="virtual", replay=live.log)
    assert again.output == live.output, live.errors + again.errors
    dates = [int(line) for line in live.output.splitlines()]
    passed = [after - before - STEP for before, after in itertools.pairwise(dates[:7])]
    # Rounded up to one digit, as the time-out of any wait is; what came does not count.
    assert passed == [100_000_000, 70_000_000, 50_000_000, 1, 0, 0]
    assert len(dates) == 9
    assert min(dates[7:]) > dates[6]


def test_an_asyncio_inbox_repeats_its_order(in_run):
    name = next(NAMES)

    async def main(order):
        inbox = AsyncInbox(asyncio.Queue(), name=name)
        for source in order:
            await inbox.put(f"of {source}", source=source)
        return [await inbox.get() for _ in order]

    live = in_run()
    assert asyncio.run(main("bca")) == ["of b", "of c", "of a"]
    wait = only_wait(live)
    assert (wait.sources, wait.order) == (("b", "c", "a"), (0, 1, 2))
    again = in_run({f"{name}~2": wait})
    assert asyncio.run(main("abc")) == ["of b", "of c", "of a"]
    assert only_wait(again) == wait


async def by_wait_for(inbox, seconds):
    return await asyncio.wait_for(inbox.get(), seconds)


async def by_timeout(inbox, seconds):
    async with asyncio.timeout(seconds):
        return await inbox.get()


@pytest.mark.parametrize("got_within", [by_wait_for, by_timeout])
def test_a_time_out_of_an_asyncio_inbox_is_recorded_and_repeated(in_run, got_within):
    name = next(NAMES)

    async def main(before, after):
        """Wait three times; messages come before the first wait, or after the second."""
        inbox, got = AsyncInbox(asyncio.Queue(), name=name), []
        for item in before:
            await inbox.put(item, source="me")
        for turn in range(3):
            if turn == 2:
                for item in after:
                    await inbox.put(item, source="me")
            try:
                got.append(await got_within(inbox, 0.01))
            except TimeoutError:
                got.append(None)
        return got

    live = in_run()
    assert asyncio.run(main("", "x")) == [None, None, "x"]
    wait = only_wait(live)
    assert wait.order == (NOTHING, NOTHING, 0)
    again = in_run({f"{name}~2": wait})
    assert asyncio.run(main("x", "")) == [None, None, "x"]
    assert only_wait(again) == wait


@pytest.mark.parametrize("got_within", [by_wait_for, by_timeout])
def test_an_asyncio_message_that_came_in_time_when_recorded_may_be_late_in_a_replay(
    in_run, got_within
):
    name = next(NAMES)
    directory = in_run({f"{name}~1": Messages(sources=("me",), order=(0,))})

    async def main():
        inbox = AsyncInbox(asyncio.Queue(), name=name)
        reader = asyncio.create_task(got_within(inbox, 0.001))
        await asyncio.sleep(0.05)  # beyond the time-out
        await inbox.put("late", source="me")
        return await reader

    assert asyncio.run(main()) == "late"
    assert only_wait(directory).order == (0,)


def test_two_reads_of_an_asyncio_inbox_at_a_time_are_refused(in_run):
    directory = in_run()

    async def main():
        inbox = AsyncInbox(asyncio.Queue(), name=next(NAMES))
        await asyncio.gather(inbox.get(), inbox.get())

    assert "is read twice at the same time" in refused(directory, asyncio.run, main())


def test_two_tasks_that_read_an_asyncio_inbox_are_refused(in_run):
    directory = in_run()

    async def main():
        inbox = AsyncInbox(asyncio.Queue(), name=next(NAMES))

        async def read():
            return await asyncio.wait_for(inbox.get(), 600)

        for item in range(2):
            await inbox.put(item, source="me")
        for _ in range(2):
            await asyncio.create_task(read())

    assert "is read by two threads, processes or asyncio tasks" in refused(
        directory, asyncio.run, main()
    )


def test_two_senders_of_one_source_are_refused(in_run):
    directory = in_run()
    shared = queue.Queue()
    inbox = Inbox(shared, name=next(NAMES))
    inbox.put("first", source="me")
    another = queue.Queue()  # of a second sender, which counts its messages from 0 as well
    copied = Inbox(another, name=next(NAMES))
    copied.put("second", source="me")
    assert inbox.get() == "first"
    shared.put(another.get())
    message = refused(directory, inbox.get)
    assert "gets messages that two threads or processes sent as 'me'" in message


def test_two_readers_of_one_inbox_are_refused(in_run):
    directory = in_run()
    inbox = Inbox(queue.Queue(), name=next(NAMES))
    for item in range(2):
        inbox.put(item, source="me")
    assert inbox.get() == 0
    with ThreadPoolExecutor(1) as pool:
        message = refused(directory, pool.submit(inbox.get).result)
    assert "is read by two threads" in message


def test_the_names_of_inboxes_are_checked_where_they_are_made(in_run):
    directory = in_run()
    assert "a wait cannot be called '1'" in refused(
        directory, lambda: Inbox(queue.Queue(), name="1")
    )
