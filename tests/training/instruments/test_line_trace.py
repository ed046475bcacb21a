"""The trace of lines: digests that compare across processes, sources with their lines."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capsule.training.instruments.line_trace import LineTrace, digest_of
from capsule.training.instruments.report import InstrumentReport

ROOT = Path(__file__).parents[3]
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = PLAIN | st.lists(PLAIN) | st.dictionaries(st.text(), st.lists(PLAIN | st.lists(PLAIN)))


@pytest.mark.slow
@given(VALUES, VALUES)
def test_digests_are_equal_exactly_where_values_and_types_are(a, b):
    assert (digest_of(a) == digest_of(b)) == (repr(a) == repr(b))


@given(st.lists(st.integers(), unique=True))
def test_the_order_of_a_set_stays_out_of_its_digest(items):
    backwards = set()
    for item in reversed(items):
        backwards.add(item)
    assert digest_of(set(items)) == digest_of(backwards)


def test_arrays_and_tensors_are_digested_by_content():
    array = np.arange(6, dtype=np.float32)
    assert digest_of(array) == digest_of(array.copy())
    assert digest_of(array) != digest_of(array.reshape(2, 3))
    assert digest_of(array) != digest_of(array + 1)
    tensor = torch.arange(6.0, requires_grad=True)
    assert digest_of(tensor) == digest_of(tensor.clone().detach().requires_grad_())
    assert digest_of(tensor) != digest_of(tensor.double())
    assert digest_of(torch.tensor([0.0])) != digest_of(torch.tensor([-0.0]))


def test_objects_of_libraries_are_not_looked_into():
    assert digest_of(object()) == digest_of(object())
    assert digest_of(subprocess.Popen) == digest_of(int)


class Reserved:
    """Counts the attributes that are asked for."""

    asked = 0

    def __init__(self, number):
        self.number = number

    def __getattribute__(self, name):
        Reserved.asked += 1
        raise OSError(name)


def test_attributes_are_read_without_the_programs_methods():
    assert digest_of(Reserved(1)) == digest_of(Reserved(1)) != digest_of(Reserved(2))
    assert Reserved.asked == 0


@pytest.mark.parametrize("kind", [object, [("key", object), ("value", float)]])
def test_arrays_of_objects_are_digested_by_their_objects(kind):
    def array(last):
        items = [(["a"], 1.0), (["b" * 100], last)]
        found = np.empty(2, kind)
        for place, item in enumerate(items):
            found[place] = item
        return found

    assert digest_of(array(2.0)) == digest_of(array(2.0)) != digest_of(array(3.0))
    assert digest_of(array(2.0)) != digest_of(array(2.0).reshape(2, 1))
    assert digest_of(array(2.0)[1]) == digest_of(array(2.0)[1])
    assert digest_of([[[array(2.0)]]]) == digest_of([[[array(2.0)]]])


@pytest.fixture
def traced(tmp_path):
    """A function that executes a program with the line trace, and returns what both left."""

    def traced(code):
        trace, names, outside = LineTrace(), {}, (sys.gettrace(), sys.getprofile())
        file = tmp_path / "program.py"
        file.write_text(code)
        trace.start()
        try:
            exec(compile(code, file, "exec"), names)  # noqa: S102
        finally:
            trace.stop()
            sys.settrace(outside[0])
            sys.setprofile(outside[1])
        return names, trace

    return traced


def test_a_value_that_cannot_be_looked_at_does_not_make_the_program_fail(traced):
    names, trace = traced(
        "import torch\n"
        "def large():\n"
        "    x = 7**10000\n"
        "    many = [x, 1]\n"
        "    return x\n"
        "def square(row):\n"
        "    y = row * row\n"
        "    n = 1\n"
        "    return y\n"
        "x = large()\n"
        "rows = torch.func.vmap(square)(torch.ones(2, 3))\n"
    )
    assert names["x"] == 7**10000
    assert names["rows"].tolist() == [[1.0] * 3] * 2
    noted = {(item.name, item.where.line) for item in trace.variables()}
    assert {("x", 3), ("many", 4), ("n", 8)} <= noted
    assert digest_of(7**10000) != digest_of(7**10000 + 1)


def test_calls_of_methods_do_not_ask_the_class_of_their_object(traced):
    names, _ = traced(
        "class Own(dict):\n"
        "    asked = []\n"
        "    def __getattribute__(self, name):\n"
        "        Own.asked.append(name)\n"
        "        return super().__getattribute__(name)\n"
        "own = Own(a=1)\n"
        "items = own.items()\n"
    )
    assert names["Own"].asked == ["items"]


PROGRAM = """\
import random
import time

def draw():
    value = random.SystemRandom().random()
    return value

class Node:
    def __init__(self, name):
        self.name = name

total = 0
for i in range(3):
    total += i
started = time.time()
x = draw()
node = Node("a")
node.name = "b"
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    (folder / "program.py").write_text(PROGRAM)
    start = (
        "import capsule.training.instruments.hooks as i; i.install(); i.install(); import runpy; "
    )
    subprocess.run(
        [sys.executable, "-c", f"{start}runpy.run_path('program.py')"],
        cwd=folder,
        env={"CAPSULE_DIAGNOSE": str(folder / "reports"), "PYTHONPATH": str(ROOT)},
        check=True,
    )
    (path,) = (folder / "reports").glob("*.json")  # installed once, whatever was asked
    return InstrumentReport.model_validate_json(path.read_bytes())


def test_every_assignment_is_noted_with_its_line(report):
    noted = {(item.name, item.where.line): item.values for item in report.variables}
    # The loop variable is named by line 13 three times, and has three values.
    assert noted["i", 13] == 3
    assert noted["total", 12] == 1
    assert noted["total", 14] == 2
    assert noted["value", 5] == 1
    assert noted["node", 18] == 1  # an attribute of the user's own class
    shown = {(item.name, item.where.line): item.shown for item in report.variables}
    assert shown["total", 14] == ("1", "3")


def test_sources_are_noted_with_the_line_of_the_program(report):
    found = {(use.source, use.function, use.where.line) for use in report.sources}
    assert ("clock", "time.time", 15) in found
    assert any(source == "entropy" and line == 5 for source, _, line in found)
    assert report.text[f"{report.sources[-1].where}"]


def test_a_program_without_torch_has_no_operators(report):
    assert (report.algorithms, report.threads, report.operators) == (None, None, ())
    assert not report.truncated
