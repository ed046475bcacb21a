"""Scopes: work draws the randomness of its place, whichever thread does it and however often."""

import json

import pytest

from capsule.training.arrivals.scopes import Place, Scope, next_place


def test_a_place_is_written_as_its_paths_and_its_number():
    assert str(Place(process="0x", thread="0~3", number=2, clock=17)) == "0x/0~3~2"


def test_without_the_library_of_random_profiles_work_has_no_place_and_a_scope_no_effect():
    assert next_place() is None
    for place in (None, Place("0", "0", 1, 0)):
        scope = Scope(place, item=3)
        for _ in range(2):
            with scope:
                assert next_place() is None
    with pytest.raises(ZeroDivisionError), Scope(None):
        raise ZeroDivisionError


@pytest.mark.slow
def test_work_within_work_draws_its_own_bytes_however_long_its_path_is(run):
    code = """
from capsule.training.arrivals.scopes import Scope, next_place
def descend(depth):
    with Scope(next_place()):
        yield os.urandom(4).hex()
        if depth:
            yield from descend(depth - 1)
    yield os.urandom(4).hex()
print(list(descend(120)))
"""
    first, second = run(code), run(code)
    drawn = json.loads(first.output.replace("'", '"'))
    assert len(set(drawn)) == len(drawn) == 242
    assert first.output == second.output


SCOPES = """
from capsule.training.arrivals.scopes import Place, Scope, next_place

def drawn(count=1):
    return [os.urandom(4).hex() for _ in range(count)]

def drawn_in(scope, count=1):
    with scope:
        return drawn(count)

def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()

first, second, third = next_place(), next_place(), in_thread(next_place)
found = {
    "places": [[each.process, each.thread, each.number] for each in (first, second, third)],
    "first": drawn_in(Scope(first), 3),
    "again": drawn_in(Scope(first), 3),
    "elsewhere": in_thread(lambda: drawn_in(Scope(first), 3)),
    "second": drawn_in(Scope(second), 3),
    "third": drawn_in(Scope(third), 3),
    "items": [drawn_in(Scope(first, item), 3) for item in range(2)],
}
entered = Scope(first)
found["parts"] = [*drawn_in(entered), *in_thread(lambda: drawn_in(entered)), *drawn_in(entered)]
with entered:
    inner = next_place()
found["inner"] = [inner.process, inner.thread, inner.number]
if ORDER:
    drawn_in(Scope(first), 9)
found["outside"] = drawn(3)
try:
    Scope(Place("0", "0" * 1_000, 1, 0))
except MemoryError:
    found["too long"] = "MemoryError"
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_scope_has_the_randomness_of_its_place_alone(run):
    done, other = run(SCOPES), run(SCOPES, (1,))
    found = json.loads(done.output)
    (process, thread, number), second, third = found["places"]
    assert (number, second) == (1, [process, thread, 2])
    assert third[0] == process
    assert third[1] != thread
    assert third[2] == 1
    assert found["first"] == found["again"] == found["elsewhere"] == found["parts"]
    different = [found["first"], found["second"], found["third"], *found["items"], found["outside"]]
    words = [word for words in different for word in words]
    assert len(set(words)) == len(words) == 18
    assert found["inner"] == [process, f"{thread}~1", 1]
    # The thread is where it was before, however much was drawn in scopes.
    assert json.loads(other.output) == found


@pytest.mark.slow
def test_a_place_with_a_path_that_is_too_long_has_no_scope(run):
    assert json.loads(run(SCOPES).output)["too long"] == "MemoryError"
