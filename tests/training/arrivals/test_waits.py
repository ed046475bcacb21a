"""Waits: what arrives is taken in its order, recorded, and taken in the recorded order again."""

import asyncio
import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment import arrival_log, canonical, contract
from capsule.experiment.arrival_log import (
    NOTHING,
    ArrivalLog,
    Completions,
    Messages,
    parse_arrivals,
)
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.training.arrivals import waits as arrival_waits
from capsule.training.arrivals.files import check_arrivals, collect_arrivals
from capsule.training.arrivals.scopes import Place
from capsule.training.arrivals.waits import (
    NothingCameError,
    Wait,
    run_directory,
    submitted,
    wait_name,
)
from tests.training.arrivals.conftest import collected

THREE = Completions(tasks=3, order=(2, 0, 1))
MAIL = Messages(sources=("b", "a"), order=(0, NOTHING, 1, 0))


def repeating(directory, **waits):
    """Return a run directory in which these recorded waits are followed."""
    directory.mkdir()
    named = {name.replace("_", "~"): wait for name, wait in waits.items()}
    (directory / contract.ARRIVALS_REPLAY).write_bytes(ArrivalLog(waits=named).document())
    return directory


def taken(wait, arriving, count):
    """Take so many arrivals, while items come as they are wanted."""
    arriving, found = iter(arriving), []
    for _ in range(count):
        while not wait.due():
            label = next(arriving)
            wait.offer(label, f"item {label}")
        found.append(wait.take())
    return found


def refused(directory, code, call, *arguments):
    """Return the message of an error that a call raises, and leaves for Capsule's own process."""
    with pytest.raises(CapsuleError) as caught:
        call(*arguments)
    assert caught.value.code == code
    with pytest.raises(CapsuleError) as left:
        check_arrivals(directory)
    assert (left.value.code, left.value.message) == (code, caught.value.message)
    return caught.value.message


# --- recording ------------------------------------------------------------------------------------


def test_the_run_directory_is_that_of_capsule(monkeypatch, tmp_path):
    monkeypatch.delenv(contract.RUN_VARIABLE, raising=False)
    assert run_directory() is None
    monkeypatch.setenv(contract.RUN_VARIABLE, str(tmp_path))
    assert run_directory() == tmp_path


def test_what_came_first_is_taken_first_and_recorded(tmp_path):
    wait = Wait(tmp_path, "completions", "results~1", 3)
    assert not wait.replays
    assert not wait.due()
    for label in (2, 0):
        wait.offer(label, f"item {label}")
    assert wait.due()
    assert [wait.take(), wait.take()] == ["item 2", "item 0"]
    assert not wait.due()
    wait.offer(1, "item 1")
    assert wait.take() == "item 1"
    wait.finish()
    assert collected(tmp_path) == {"results~1": THREE}


def test_a_moment_at_which_nothing_had_come_is_recorded(tmp_path):
    wait = Wait(tmp_path, "messages", "mail~1")
    wait.offer(("b", 0), "first")
    assert wait.take() == "first"
    wait.nothing()
    for label in (("a", 0), ("b", 1)):
        wait.offer(label, label)
        assert wait.take() == label
    assert collected(tmp_path) == {"mail~1": MAIL}


def test_waits_of_one_run_are_recorded_apart(tmp_path):
    waits = [Wait(tmp_path, "completions", f"results~{number}", 2) for number in (1, 2)]
    for label, wait in ((1, waits[0]), (0, waits[1]), (0, waits[0])):
        wait.offer(label, label)
        wait.take()
    assert {name: wait.order for name, wait in collected(tmp_path).items()} == {
        "results~1": (1, 0),
        "results~2": (0,),
    }


def test_too_many_arrivals_are_noticed_while_the_program_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(arrival_waits, "MAX_ENTRIES", 6)
    wait = Wait(tmp_path, "completions", "few~1", 3)
    for number in range(2):
        wait.offer(number, number)
    wait.take()
    with pytest.raises(CapsuleError) as caught:
        wait.take()
    assert caught.value.code == "CAP-T383"
    with pytest.raises(CapsuleError, match="more arrivals"):
        check_arrivals(tmp_path)


def test_the_sources_of_messages_count_as_arrivals(tmp_path, monkeypatch):
    monkeypatch.setattr(arrival_waits, "MAX_ENTRIES", 9)
    wait = Wait(tmp_path, "messages", "mail~1")
    for label in (("a", 0), ("b", 0), ("a", 1)):
        wait.offer(label, "")
    wait.take()
    wait.take()
    assert "a source as one more" in refused(tmp_path, "CAP-T383", wait.take)


@pytest.mark.parametrize("source", ["a" * 500, "," * 40], ids=["bytes", "values"])
def test_a_log_that_no_reader_accepts_is_not_written(tmp_path, monkeypatch, source):
    monkeypatch.setattr(arrival_log, "MAX_LOG_BYTES", 500)
    monkeypatch.setattr(canonical, "MAX_VALUES", 40)
    directory = tmp_path / str(len(source))  # the files of a folder are cached by its path
    directory.mkdir()
    wait = Wait(directory, "messages", "mail~1")
    wait.offer((source, 0), "")
    wait.take()
    with pytest.raises(CapsuleError, match="CAP-T383"):
        collect_arrivals(directory)
    assert not (directory / contract.ARRIVALS).exists()


def test_a_full_disk_is_an_error_with_a_code(begun, tmp_path, monkeypatch):
    write, written = os.write, []

    def write_on_a_full_disk(file, data):
        if written:
            raise OSError(28, "No space left on device")
        written.append(write(file, data[:4]))
        return written[0]

    monkeypatch.setattr(os, "write", write_on_a_full_disk)
    with pytest.raises(CapsuleError, match=r"CAP-T131 .*No space left on device"):
        begun.take()
    monkeypatch.undo()
    with pytest.raises(CapsuleError, match=r"CAP-T131 .*No space left on device"):
        check_arrivals(tmp_path)


def test_a_line_that_is_written_in_two_parts_is_whole(begun, tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:4]))
    begun.take()
    collect_arrivals(tmp_path)
    assert parse_arrivals((tmp_path / contract.ARRIVALS).read_bytes()).waits["full~1"].order == (
        0,
        1,
    )


# --- repeating ------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.permutations(range(6)), st.permutations(range(6)), st.integers(0, 6))
def test_results_are_taken_in_the_recorded_order_whichever_comes_first(
    tmp_path_factory, recorded, arriving, count
):
    folder = tmp_path_factory.mktemp("waits")
    live = Wait(folder, "completions", "results~1", 6)
    expected = taken(live, recorded, count)
    log = collected(folder)
    again = repeating(folder / "again", results_1=log["results~1"])
    wait = Wait(again, "completions", "results~1", 6)
    assert wait.replays
    assert taken(wait, arriving, count) == expected == [f"item {n}" for n in recorded[:count]]
    wait.finish()
    assert collected(again) == log


def test_messages_are_taken_in_the_recorded_order_and_nothing_where_nothing_had_come(tmp_path):
    directory = repeating(tmp_path / "run", mail_1=MAIL)
    wait = Wait(directory, "messages", "mail~1")
    assert taken(wait, [("a", 0), ("b", 0)], 1) == ["item ('b', 0)"]
    assert wait.due()  # although there is an early message, nothing is what comes next
    with pytest.raises(NothingCameError):
        wait.take()
    assert taken(wait, [("b", 1)], 2) == ["item ('a', 0)", "item ('b', 1)"]
    wait.finish()
    assert collected(directory) == {"mail~1": MAIL}


@pytest.mark.parametrize(
    ("name", "kind", "tasks", "said"),
    [
        ("other~1", "completions", 3, "its wait 'other~1' does not occur in the recorded run"),
        ("results~1", "completions", 4, "is for completions of 4 tasks, but for completions of 3"),
        ("results~1", "completions", None, "is for completions, but for completions of 3 tasks"),
        ("results~1", "messages", None, "is for messages, but for completions of 3 tasks when"),
        ("mail~1", "completions", 2, "is for completions of 2 tasks, but for messages when"),
    ],
)
def test_a_wait_that_was_not_recorded_like_that_is_refused(tmp_path, name, kind, tasks, said):
    directory = repeating(tmp_path / "run", results_1=THREE, mail_1=MAIL)
    assert said in refused(directory, "CAP-T381", Wait, directory, kind, name, tasks)


def test_an_arrival_beyond_the_recorded_ones_is_refused(tmp_path):
    directory = repeating(tmp_path / "run", results_1=Completions(tasks=3, order=(2,)), mail_1=MAIL)
    wait = Wait(directory, "completions", "results~1", 3)
    assert taken(wait, [2], 1) == ["item 2"]
    assert not wait.due()
    message = refused(directory, "CAP-T381", wait.offer, 0, "item 0")
    assert message == (
        "the program does not repeat the recorded run: its wait 'results~1' takes the result of "
        "task 0, but the recorded run took nothing more"
    )


def test_a_result_that_came_early_and_is_beyond_the_recorded_ones_is_refused(tmp_path):
    directory = repeating(tmp_path / "run", results_1=Completions(tasks=5, order=(2, 0, 4)))
    wait = Wait(directory, "completions", "results~1", 5)
    assert taken(wait, [0, 1, 2, 3, 4], 3) == ["item 2", "item 0", "item 4"]
    message = refused(directory, "CAP-T381", wait.due)
    assert "takes the result of task 1, but the recorded run took nothing more" in message


def test_a_message_beyond_the_recorded_ones_is_named_by_its_source(tmp_path):
    directory = repeating(tmp_path / "run", mail_1=Messages(sources=("a",), order=(0,)))
    wait = Wait(directory, "messages", "mail~1")
    taken(wait, [("a", 0)], 1)
    message = refused(directory, "CAP-T381", wait.offer, ("a", 1), "")
    assert "takes message 1 of 'a', but the recorded run took nothing more" in message


def test_a_wait_that_ends_before_its_recorded_arrivals_is_refused(tmp_path):
    directory = repeating(tmp_path / "run", results_1=THREE)
    wait = Wait(directory, "completions", "results~1", 3)
    taken(wait, [2], 1)
    message = refused(directory, "CAP-T381", wait.finish)
    assert "never gets the result of task 0, which the recorded run took next" in message


def test_a_wait_that_ends_before_a_recorded_moment_without_arrivals_is_refused(tmp_path):
    directory = repeating(tmp_path / "run", mail_1=MAIL)
    wait = Wait(directory, "messages", "mail~1")
    while wait._wanted() is not None:
        wait.offer(wait._wanted(), "")
        wait.take()
    message = refused(directory, "CAP-T381", wait.finish)
    assert "ends, but the recorded run waited once more, and nothing came" in message


def test_the_first_error_of_a_program_is_the_one_that_counts(tmp_path):
    wait = Wait(tmp_path, "completions", "results~1", 1)
    first = refused(tmp_path, "CAP-T382", wait.misused, "is read twice")
    with pytest.raises(CapsuleError, match="CAP-T381"):
        wait.differs("is another one")
    with pytest.raises(CapsuleError) as left:
        check_arrivals(tmp_path)
    assert left.value.message == first == "the wait 'results~1' is read twice"


# --- readers --------------------------------------------------------------------------------------


def in_thread(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def test_a_wait_is_read_by_one_thread(tmp_path):
    wait = Wait(tmp_path, "completions", "results~1", 2)
    assert not in_thread(wait.due)  # it need not be the one that began the wait
    assert "is read by two threads" in refused(tmp_path, "CAP-T382", wait.due)


def test_a_wait_is_read_by_one_asyncio_task(tmp_path):
    wait = Wait(tmp_path, "completions", "results~1", 2)

    async def main():
        assert not await asyncio.create_task(look())
        assert not await asyncio.create_task(look())

    async def look():
        tasks.append(asyncio.current_task())
        return wait.due()

    tasks = []
    message = refused(tmp_path, "CAP-T382", asyncio.run, main())
    assert len(tasks) == 2
    assert "asyncio tasks" in message


def test_an_inbox_is_read_in_one_place_of_the_run(tmp_path):
    Wait(tmp_path, "messages", "mail~1")
    message = refused(tmp_path, "CAP-T382", Wait, tmp_path, "messages", "mail~1")
    assert message == "the wait 'mail~1' is read by two threads, processes or asyncio tasks"


# --- names ----------------------------------------------------------------------------------------

FIRST = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
NAMES = st.tuples(st.sampled_from(FIRST), st.text(FIRST + "0123456789 _.-", max_size=99)).map(
    "".join
)


@settings(max_examples=50)
@given(NAMES)
def test_waits_of_one_name_are_numbered(tmp_path_factory, name):
    folder = tmp_path_factory.getbasetemp()
    names = [wait_name(folder, name) for _ in range(3)]
    first = int(names[0].rpartition("~")[2])
    assert names == [f"{name}~{first + number}" for number in range(3)]


def test_the_first_wait_of_a_name_has_the_number_one(tmp_path):
    assert wait_name(tmp_path, "numbered from one") == "numbered from one~1"


@pytest.mark.parametrize(
    "name", ["", "1", " a", "a/b", "a~1", "é", "a\n", "a" * 101, "_a"], ids=repr
)
def test_a_malformed_name_is_refused(tmp_path, name):
    message = refused(tmp_path, "CAP-T382", wait_name, tmp_path, name)
    assert message == f"a wait cannot be called {name!r}"


def test_a_name_belongs_to_one_thread(tmp_path):
    wait_name(tmp_path, "of one thread")
    message = refused(tmp_path, "CAP-T382", in_thread, wait_name, tmp_path, "of one thread")
    assert "two threads or asyncio tasks have a wait called 'of one thread'" in message


def test_a_name_belongs_to_one_asyncio_task_until_that_has_ended(tmp_path):
    async def named(name):
        await asyncio.sleep(0)
        return wait_name(tmp_path, name)

    async def main(name):
        found = [await asyncio.create_task(named(name))]
        gc.collect()
        found.append(await asyncio.create_task(named(name)))
        return found

    async def together(name):
        await asyncio.gather(named(name), named(name))

    assert asyncio.run(main("of tasks")) == ["of tasks~1", "of tasks~2"]
    message = refused(tmp_path, "CAP-T382", asyncio.run, together("of two tasks"))
    assert "asyncio tasks have a wait called 'of two tasks'" in message


def test_a_wait_without_a_name_is_called_after_its_place(tmp_path):
    assert wait_name(tmp_path, None, Place("0x", "0", 4, 0)) == "0x/0~4"


def test_without_a_name_and_the_library_of_random_profiles_a_wait_is_refused(tmp_path):
    assert submitted(tmp_path) is None
    with pytest.raises(CapsuleError, match=r"CAP-T382 .*no preloaded library") as caught:
        wait_name(tmp_path, None)
    assert caught.value.exit_code == ExitCode.TRAINING_FAILED
    assert "name=..." in caught.value.fix
