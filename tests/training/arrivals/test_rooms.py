"""Room in queues: a replay ends, whichever sender comes first, and no sender runs far ahead."""

import asyncio
import json
import multiprocessing
import os
import queue
import random
import threading
from contextlib import suppress

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capsule.experiment.arrival_log import NOTHING, ArrivalLog, Messages
from capsule.training.arrivals.inboxes import AsyncInbox, Inbox
from capsule.training.arrivals.rooms import repeated
from tests.training.arrivals.conftest import (
    NAMES,
    StandstillError,
    collected,
    enter_run,
    in_simulated_time,
    only_wait,
)

PATIENCE = 300  # seconds after which a replay counts as one that does not end

# --- threads and processes ------------------------------------------------------------------------


def schedule(limit, choices):
    """Make a run of a queue: what its reader does, and how often each source puts a message.

    The reader gets a message of a source, gets nothing, or waits until a source has put so many.
    """
    waiting, sent, script = [], dict.fromkeys("abc", 0), []
    for action, source in choices:
        if action == "put" and len(waiting) < limit:
            waiting.append(source)
            sent[source] += 1
        elif action == "get":
            script.append(["get", waiting.pop(0) if waiting else None])
        elif action == "join":
            script.append(["join", source, sent[source]])
    return script, sent


CHOICES = st.lists(
    st.tuples(st.sampled_from(["put", "put", "get", "join"]), st.sampled_from("abc")), max_size=24
)


def log_of(script):
    got = [step[1] for step in script if step[0] == "get"]
    sources = tuple(dict.fromkeys(filter(None, got)))
    order = tuple(NOTHING if each is None else sources.index(each) for each in got)
    return Messages(sources=sources, order=order)


class Replay:
    """A reader and senders in threads, which begin in an order of the test's choice."""

    def __init__(self, inbox, limit, script, sent):
        self.inbox, self.limit, self.script, self.sent = inbox, limit, script, sent
        self.begun = dict.fromkeys(sent, 0)  # reads of messages of each source
        self.ended = {source: threading.Semaphore(0) for source in sent}
        self.got, self.ahead = [], []

    def send(self, source):
        for number in range(self.sent[source] + 1):  # one put more than in the recorded run
            self.inbox.put((source, number), source=source)
            if number - self.begun[source] >= self.limit:
                self.ahead.append((source, number))
            self.ended[source].release()

    def read(self):
        joined = dict.fromkeys(self.sent, 0)
        for action, source, *count in self.script:
            if action == "join":
                for _ in range(joined[source], *count):
                    self.ended[source].acquire()
                joined[source] = max(joined[source], *count)
                continue
            if source is not None:
                self.begun[source] += 1
            try:
                self.got.append(self.inbox.get(timeout=0)[0])
            except queue.Empty:
                self.got.append(None)

    def run(self, order):
        for source in order:
            threading.Thread(target=self.send, args=(source,), daemon=True).start()
        reader = threading.Thread(target=self.read, daemon=True)
        reader.start()
        reader.join(PATIENCE)
        assert not reader.is_alive()
        assert not self.ahead
        return self.got


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.integers(1, 3), CHOICES, st.permutations("abc"))
def test_a_replay_with_a_full_queue_of_threads_ends(tmp_path_factory, limit, choices, order):
    folder, name = tmp_path_factory.mktemp("rooms"), next(NAMES)
    script, sent = schedule(limit, choices)
    recorded = log_of(script)
    with pytest.MonkeyPatch.context() as patch:
        enter_run(folder / "again", patch, {f"{name}~1": recorded})
        inbox = Inbox(queue.Queue(limit), name=name)
        got = Replay(inbox, limit, script, sent).run(order)
        assert got == [step[1] for step in script if step[0] == "get"]
        if recorded.order:
            assert only_wait(folder / "again") == recorded


def test_each_inbox_of_a_queue_of_threads_uses_the_same_room(in_run):
    name = next(NAMES)
    in_run({f"{name}~1": Messages(sources=("a", "b"), order=(0, 1))})
    shared = queue.Queue(1)
    inbox, other = (Inbox(shared, name=name) for _ in range(2))
    for source in "ba":
        other.put(f"of {source}", source=source)
    assert [inbox.get(), inbox.get()] == ["of a", "of b"]
    other.put("there is room again", source="a")


def test_a_queue_of_threads_counts_its_unfinished_tasks_in_a_replay(in_run):
    name = next(NAMES)
    in_run({f"{name}~1": Messages(sources=("a", "b"), order=(0, 1))})
    shared = queue.Queue(1)
    inbox = Inbox(shared, name=name)
    for source in "ba":
        inbox.put(source, source=source)
    for source in "ab":
        assert inbox.get() == source
        shared.task_done()
    shared.join()
    with pytest.raises(ValueError, match="too many times"):
        shared.task_done()


PROCESSES = """
from pathlib import Path
context = multiprocessing.get_context(ORDER["method"])

def send(make, mail, source, count, ended):
    mail = arrivals.Inbox(mail) if make else mail
    for number in range(count + 1):
        mail.put((source, number), source=source)
        ended.release()

def replay(number, script, sent, order, limit, apart):
    shared = context.Queue(limit)
    mail = arrivals.Inbox(shared, name=f"mail {number}")
    ended = {source: context.Semaphore(0) for source in sent}
    given = shared if apart else mail
    senders = [
        context.Process(target=send, args=(apart, given, source, sent[source], ended[source]))
        for source in order
    ]
    got, joined = [], dict.fromkeys(sent, 0)
    for sender in senders:
        sender.start()
    for action, source, *count in script:
        if action == "join":
            for _ in range(joined[source], *count):
                ended[source].acquire()
            joined[source] = max(joined[source], *count)
            continue
        try:
            got.append(mail.get(timeout=0)[0])
        except queue.Empty:
            got.append(None)
    for sender in senders:
        sender.kill()
        sender.join()
    assert not shared.full() and shared.qsize() == 0
    return got

if __name__ == "__main__":
    print(json.dumps([replay(number, *each) for number, each in enumerate(ORDER["replays"])]))
"""


def some_replays(count):
    """Return the arguments of replays, among them those that would not end without more room."""
    drawn = random.Random(0)  # noqa: S311
    for number in range(count):
        limit = drawn.randint(1, 3)
        choices = [
            (drawn.choice(["put", "put", "get", "join"]), drawn.choice("abc")) for _ in range(30)
        ]
        yield *schedule(limit, choices), drawn.sample("abc", 3), limit, bool(number % 2)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "count"), [("fork", 20), ("spawn", 3)])
def test_a_replay_with_a_full_queue_of_processes_ends(run, method, count):
    replays = list(some_replays(count))
    waits = {f"mail {number}~1": log_of(each[0]) for number, each in enumerate(replays)}
    log = ArrivalLog(waits={name: wait for name, wait in waits.items() if wait.order})
    again = run(PROCESSES, {"method": method, "replays": replays}, replay=log)
    assert again.status == 0, again.errors
    got = [[step[1] for step in each[0] if step[0] == "get"] for each in replays]
    assert json.loads(again.output) == got
    assert again.log == log


def test_a_sender_that_stops_waiting_while_it_is_told_of_room(monkeypatch, tmp_path):
    shared = multiprocessing.get_context("fork").Queue(1)
    rooms = repeated(shared, tmp_path)
    taken = rooms._path("a")
    bell = taken.with_suffix(".bell")
    os.mkfifo(bell)
    reader, open_file = os.open(bell, os.O_RDWR), os.open

    def opened(path, flags):
        descriptor = open_file(path, flags)
        os.close(reader)
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    rooms.taken("a")
    assert taken.stat().st_size == 1


# --- asyncio --------------------------------------------------------------------------------------


TIMES = st.sampled_from([None, 1, 3])
SENDER = st.lists(TIMES, max_size=5)
READER = st.lists(
    st.one_of(
        st.tuples(st.just("get"), TIMES),
        st.tuples(st.just("batch"), TIMES),
        st.tuples(st.just("join"), st.integers(0, 2)),
    ),
    max_size=8,
)


async def a_program(name, limit, senders, reader, seed):
    """Put and get within times; what takes how long depends on the seed."""
    inbox, delays, got = AsyncInbox(asyncio.Queue(limit), name=name), random.Random(seed), []  # noqa: S311

    async def send(source, times):
        put = []
        for number, seconds in enumerate(times):
            await asyncio.sleep(delays.choice([0, 1, 2, 7]))
            try:
                await asyncio.wait_for(inbox.put((source, number), source=source), seconds)
                put.append(number)
            except TimeoutError:
                put.append(None)
        return put

    async def take(count, seconds):
        try:
            async with asyncio.timeout(seconds):
                for _ in range(count):
                    got.append(await inbox.get())
        except TimeoutError:
            got.append(None)

    tasks = [asyncio.create_task(send(f"s{n}", times)) for n, times in enumerate(senders)]
    for action, argument in reader:
        await asyncio.sleep(delays.choice([0, 1, 4]))
        if action == "join":
            got.append(await tasks[argument])
        else:
            await take(1 if action == "get" else 3, argument)
    return got


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.integers(0, 3),
    st.lists(SENDER, min_size=3, max_size=3),
    READER,
    st.integers(0, 99),
    st.lists(st.integers(100, 199), min_size=3, max_size=3),
)
def test_a_replay_with_a_full_queue_of_asyncio_ends(
    tmp_path_factory, limit, senders, reader, seed, others
):
    folder, name = tmp_path_factory.mktemp("rooms"), next(NAMES)
    with pytest.MonkeyPatch.context() as patch:
        enter_run(folder / "live", patch)
        try:
            expected = in_simulated_time(a_program(name, limit, senders, reader, seed))
        except StandstillError:
            assume(False)  # the program itself waits forever
        if not any(action != "join" for action, _ in reader):
            return
        log = collected(folder / "live")
        for other in others:
            name, before = next(NAMES), name
            log = {each.replace(before, name, 1): wait for each, wait in log.items()}
            enter_run(folder / name, patch, log)
            assert in_simulated_time(a_program(name, limit, senders, reader, other)) == expected
            assert ArrivalLog(waits=collected(folder / name)).repeats(ArrivalLog(waits=log))


@pytest.mark.parametrize("reader_first", [True, False])
def test_each_inbox_of_a_queue_of_asyncio_uses_the_same_room(in_run, reader_first):
    name, another = next(NAMES), next(NAMES)
    in_run({f"{name}~1": Messages(sources=("a", "b"), order=(0, 1, 1))})

    async def main():
        shared = asyncio.Queue(1)
        names = [name, another] if reader_first else [another, name]
        inboxes = {each: AsyncInbox(shared, name=each) for each in names}
        inbox, other = inboxes[name], inboxes[another]

        async def send(source, count):
            for number in range(count):
                await other.put((source, number), source=source)

        senders = [asyncio.create_task(send(*each)) for each in (("b", 2), ("a", 1))]
        got = [await inbox.get() for _ in range(3)]
        await asyncio.gather(*senders)
        return got

    assert in_simulated_time(main()) == [("a", 0), ("b", 0), ("b", 1)]


def test_a_sender_whose_cancellation_was_lost_ends_in_a_replay(in_run):
    """wait_for() of Python 3.11 loses it if a put ends at the moment at which the program does."""
    name = next(NAMES)
    in_run({f"{name}~1": Messages(sources=("a",), order=(0,))})

    async def main():
        inbox = AsyncInbox(asyncio.Queue(1), name=name)

        async def send():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(600)
            for _ in range(2):
                await asyncio.wait_for(inbox.put("b", source="b"), 600)

        sender = asyncio.create_task(send())
        await asyncio.sleep(1)
        sender.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sender
        await inbox.put("a", source="a")
        return await inbox.get()

    assert in_simulated_time(main()) == "a"


def test_a_queue_of_asyncio_counts_its_unfinished_tasks_in_a_replay(in_run):
    name = next(NAMES)
    in_run({f"{name}~1": Messages(sources=("a", "b"), order=(0, 1))})

    async def main():
        shared = asyncio.Queue(1)
        inbox = AsyncInbox(shared, name=name)
        for source in "ba":
            await inbox.put(source, source=source)
        for source in "ab":
            assert await inbox.get() == source
            shared.task_done()
        await shared.join()
        return shared.maxsize

    assert in_simulated_time(main()) == 1
