"""Coroutines that a program cancels, by a time-out for example: recorded, and repeated."""

import asyncio
import itertools
from contextlib import suppress

import pytest

from capsule.experiment import contract
from capsule.experiment.arrival_log import NOTHING, ArrivalLog, Completions, Messages
from capsule.training import arrivals
from capsule.training.arrivals.inboxes import AsyncInbox
from tests.training.arrivals.conftest import (
    NAMES,
    collected,
    in_simulated_time,
    only_wait,
    refused,
)

SECONDS = 0.01  # of a time-out that passes


async def by_wait_for(awaitable, seconds):
    return await asyncio.wait_for(awaitable, seconds)


async def by_timeout(awaitable, seconds):
    async with asyncio.timeout(seconds):
        return await awaitable


@pytest.fixture(params=[by_wait_for, by_timeout])
def within(request):
    """The two ways to limit the time of a coroutine."""
    return request.param


@pytest.fixture(params=[True, False], ids=["under Capsule", "without"])
def maybe_in_run(request, monkeypatch):
    """Whether the test is in a run directory that it does not look into."""
    if request.param:
        request.getfixturevalue("in_run")()
    else:
        monkeypatch.delenv(contract.RUN_VARIABLE, raising=False)


# --- puts into a queue that is full ---------------------------------------------------------------


async def put_and_get(inbox, within, items, source="me"):
    """Put items, and get one whenever there is no room; return what was put, and what was got."""
    put, got = [], []
    for item in items:
        try:
            await within(inbox.put(item, source=source), SECONDS)
            put.append(item)
        except TimeoutError:
            got.append(await inbox.get())
    return put, got + [await inbox.get() for _ in put[len(got) :]]


@pytest.mark.usefixtures("maybe_in_run")
def test_a_put_that_was_cancelled_leaves_its_message_out(within):
    async def main():
        return await put_and_get(AsyncInbox(asyncio.Queue(1), name=next(NAMES)), within, "abc")

    assert asyncio.run(main()) == (["a", "c"], ["a", "c"])


@pytest.mark.parametrize("source", ["me", "m" * 500], ids=["short", "long"])
def test_a_time_out_of_a_put_is_recorded_and_repeated(in_run, within, source):
    name = next(NAMES)

    async def main(room):
        inbox = AsyncInbox(asyncio.Queue(room), name=name)
        return await put_and_get(inbox, within, "abcd", source)

    live = in_run()
    expected = asyncio.run(main(1))
    assert expected == (["a", "c"], ["a", "c"])
    waits = collected(live)
    assert [wait.order for wait in waits.values()] == [(0, 0), (0, NOTHING, 0, NOTHING)]
    assert {wait.sources for wait in waits.values()} == {(source,)}
    # The second inbox of this name has room for all.
    log = {each.replace("~1", "~2", 1): wait for each, wait in waits.items()}
    again = in_run(log)
    assert asyncio.run(main(4)) == expected
    assert collected(again) == log


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_put_that_ended_in_time_when_recorded_may_be_late_in_a_replay(in_run, within, cancelled):
    name = next(NAMES)
    log = {f"{name}~1": Messages(sources=("me",), order=(0, 0))}
    if cancelled:
        log[f"{name}~1 cancellations of me"] = Messages(sources=("me",), order=(0, 0, NOTHING))
    again = in_run(log)

    async def main():
        inbox = AsyncInbox(asyncio.Queue(1), name=name)
        await inbox.put("a", source="me")
        late = asyncio.create_task(within(inbox.put("b", source="me"), SECONDS))
        await asyncio.sleep(5 * SECONDS)  # beyond the time-out
        got = [await inbox.get()]
        await late
        if cancelled:
            with pytest.raises(TimeoutError):
                await within(inbox.put("c", source="me"), SECONDS)
        return [*got, await inbox.get()]

    assert asyncio.run(main()) == ["a", "b"]
    assert collected(again) == log


def test_a_replay_may_end_before_the_last_attempts_of_the_recorded_run(in_run):
    """A program cancels its senders when it ends, and how far they are then depends on time."""
    name = next(NAMES)
    log = {
        f"{name}~1": Messages(sources=("me",), order=(0,)),
        f"{name}~1 cancellations of me": Messages(sources=("me",), order=(0, 0, NOTHING)),
        f"{name}~1 cancellations of you": Messages(sources=(), order=(NOTHING,)),
    }
    again = in_run(log)

    async def main():
        inbox = AsyncInbox(asyncio.Queue(2), name=name)
        await inbox.put("a", source="me")
        return await inbox.get()

    assert asyncio.run(main()) == "a"
    made = collected(again)
    assert made[f"{name}~1 cancellations of me"].order == (0,)
    assert ArrivalLog(waits=made).repeats(ArrivalLog(waits=log))


@pytest.mark.parametrize("recorded", [1, 2])
def test_puts_after_those_of_the_recorded_run_can_be_cancelled(in_run, recorded):
    """They are not recorded: the recorded run was cancelled earlier, or in another place."""
    name = next(NAMES)
    log = {f"{name}~1": Messages(sources=("me",), order=(0,))}
    if recorded == 2:
        log[f"{name}~1 cancellations of me"] = Messages(sources=("me",), order=(0, NOTHING, 0))
    again = in_run(log)

    async def main():
        inbox, put = AsyncInbox(asyncio.Queue(1), name=name), []

        async def send():
            for item in itertools.count():
                with suppress(TimeoutError):
                    await asyncio.wait_for(inbox.put(item, source="me"), 1 if item == 1 else None)
                    put.append(item)

        sender = asyncio.create_task(send())
        got = await inbox.get()
        await asyncio.sleep(5)
        sender.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sender
        return got, put

    put = [0, 1] if recorded == 1 else [0, 2]
    assert in_simulated_time(main()) == (0, put)
    assert collected(again) == log


def test_a_cancellation_before_a_put_that_ended_when_recorded_ends_a_later_one(in_run):
    name = next(NAMES)
    log = {f"{name}~1": Messages(sources=("me",), order=(0, 0))}
    again = in_run(log)

    async def main():
        inbox = AsyncInbox(asyncio.Queue(1), name=name)

        async def send():
            for item in itertools.count():
                await inbox.put(item, source="me")

        sender = asyncio.create_task(send())
        await asyncio.sleep(1)
        sender.cancel()  # while it waits for room
        got = [await inbox.get(), await inbox.get()]
        with pytest.raises(asyncio.CancelledError):
            await sender
        return got

    assert in_simulated_time(main()) == [0, 1]
    assert collected(again) == log


def test_a_time_out_that_passes_too_early_in_a_replay_still_ends_what_it_ended(in_run):
    """Such as that of a server, which takes what comes within a time as its next batch."""
    name = next(NAMES)
    log = {f"{name}~1": Messages(sources=("me",), order=(0, 0, NOTHING, 0, NOTHING))}
    again = in_run(log)

    async def main():
        inbox, batches = AsyncInbox(asyncio.Queue(), name=name), []

        async def send():
            for item in range(3):
                await asyncio.sleep(5)
                await inbox.put(item, source="me")

        sender = asyncio.create_task(send())
        for _ in range(2):
            batches.append([])
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    while True:
                        batches[-1].append(await inbox.get())
        await sender
        return batches

    assert in_simulated_time(main()) == [[0, 1], [2]]
    assert collected(again) == log


def test_a_put_that_is_cancelled_while_another_of_its_source_waits_is_refused(in_run, within):
    directory = in_run()

    async def main():
        inbox = AsyncInbox(asyncio.Queue(1), name=next(NAMES))
        await inbox.put("a", source="me")
        other = asyncio.create_task(inbox.put("c", source="me"))
        try:
            await within(inbox.put("b", source="me"), SECONDS)
        finally:
            other.cancel()

    assert "has two attempts at the same time" in refused(directory, asyncio.run, main())


# --- tasks that are not done ----------------------------------------------------------------------


async def wait_for_tasks(within, opened, name):
    """Wait twice for each of two tasks, of which one ends at each of the steps ``opened``."""
    gates = [asyncio.Event() for _ in opened]
    tasks = [asyncio.create_task(gate.wait(), name=str(n)) for n, gate in enumerate(gates)]
    results, got = arrivals.completions(tasks, name=name), []
    for step in range(4):
        for number in [number for number, at in enumerate(opened) if at == step]:
            gates[number].set()
            await tasks[number]
        try:
            got.append((await within(anext(results), SECONDS)).get_name())
        except TimeoutError:
            got.append(None)
    return got, [task async for task in results]


@pytest.mark.usefixtures("maybe_in_run")
def test_a_time_out_of_a_wait_for_tasks_loses_none(within):
    found = asyncio.run(wait_for_tasks(within, (3, 1), next(NAMES)))
    assert found == ([None, "1", None, "0"], [])


def test_a_time_out_of_a_wait_for_tasks_is_recorded_and_repeated(in_run, within):
    name = next(NAMES)
    live = in_run()
    expected = asyncio.run(wait_for_tasks(within, (3, 1), name))
    waits = collected(live)
    assert waits == {
        f"{name}~1": Completions(tasks=2, order=(1, 0)),
        f"{name}~1 cancellations": Messages(sources=("completed",), order=(-1, 0, -1, 0)),
    }
    log = {each.replace("~1", "~2", 1): wait for each, wait in waits.items()}
    again = in_run(log)
    assert asyncio.run(wait_for_tasks(within, (0, 0), name)) == expected
    assert collected(again) == log


def test_a_task_that_was_done_in_time_when_recorded_may_be_late_in_a_replay(in_run, within):
    name = next(NAMES)
    again = in_run({f"{name}~1": Completions(tasks=1, order=(0,))})

    async def main():
        results = arrivals.completions([asyncio.create_task(asyncio.sleep(5 * SECONDS))], name=name)
        return await within(anext(results), SECONDS)

    assert asyncio.run(main()).done()
    assert only_wait(again).order == (0,)


def test_two_waits_for_tasks_at_a_time_are_refused(in_run):
    directory = in_run()

    async def main():
        tasks = [asyncio.create_task(asyncio.sleep(600)) for _ in range(2)]
        results = arrivals.completions(tasks, name=next(NAMES))
        await asyncio.gather(anext(results), anext(results))

    assert "is read twice at the same time" in refused(directory, asyncio.run, main())
