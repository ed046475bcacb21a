"""Bisecting real runs: the exact update and operator, and what cannot be bisected."""

import json
import shutil

import pytest

from capsule import execution
from capsule.experiment import contract
from capsule.experiment.dense import is_dense, read_header, read_updates
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.report.divergence import divergence_lines
from capsule.report.progress import SilentReporter
from capsule.verification.bisection import bisect, compare_dense, dense_record, window_of
from capsule.verification.divergence import compare_sides
from capsule.verification.sides import directory_side


@pytest.fixture(scope="module")
def execute():
    """Execute a side as its machine does."""
    machines = {}

    def work(side, window, directory):
        machine, schedule = machines[side.name], side.training.schedule
        execution.execute(
            side.lock,
            machine,
            directory,
            stop_after=window.last,
            schedule=schedule,
            dense=window,
            reporter=SilentReporter(),
        )

    work.machines = machines
    return work


@pytest.fixture
def sides(execute):
    """Return the sides of two runs."""

    def make(*runs):
        for run in runs:
            execute.machines[run.folder.name] = run.machine
        return [directory_side(run.folder, run.folder.name) for run in runs]

    return make


def test_a_patched_constant_is_pinned_to_the_operator(honest, patched, sides, execute, tmp_path):
    a, b = sides(honest, patched)
    comparison = compare_sides(a, b)
    window = window_of(comparison.report, a)
    assert (window.first, window.last) == (204, 240)
    found = bisect(a, b, window, execute, tmp_path)
    operator = found.operator
    assert (found.step, found.component) == (204, "parameters")  # the first update of all
    assert operator.a.operator == operator.b.operator == "capsule::centred_rmsprop"
    assert operator.a.where.startswith("capsule/training/optimizer.py:")
    assert operator.same_inputs
    assert operator.a.arguments["floor"] != operator.b.arguments["floor"]
    assert operator.ulp > 0
    report = comparison.with_bisection(found)
    assert report.causes[0].name == "changed-code-or-library"
    text = "\n".join(line for _, line in divergence_lines(report))
    assert "capsule::centred_rmsprop at capsule/training/optimizer.py:" in text
    assert "argument floor: 0.01 / 0.015" in text


def test_another_numerics_profile_is_pinned_to_the_first_product(
    honest, other_numerics, sides, execute, tmp_path
):
    a, b = sides(honest, other_numerics)
    window = window_of(compare_sides(a, b).report, a)
    records = [dense_record(side, window, execute, tmp_path / side.name) for side in (a, b)]
    found, measured = compare_dense(*records)
    assert measured
    operators = found.operator.a.operator, found.operator.b.operator
    assert operators == ("capsule::dense", "aten::addmm")
    # A dense record stands for its side, on another machine.
    away = tmp_path / "a.dense"
    shutil.copyfile(records[0], away)
    assert is_dense(away)
    assert read_header(away).first == window.first
    assert compare_dense(away, records[1])[0] == found
    updates = list(read_updates(away))
    assert [each.record.step for each in updates] == list(range(window.first, window.last + 1, 4))
    assert all(each.calls for each in updates)
    # The claimed trace was left alone, and evaluations and results with it.
    with (honest.directory / contract.TRACE).open() as whole:
        again = (tmp_path / a.name / contract.TRACE).read_text()
        assert again == "".join(line for line, _ in zip(whole, again.splitlines(), strict=False))


def test_a_side_that_does_not_repeat_its_trace_is_refused(honest, sides, execute, tmp_path):
    liar = honest.copy(tmp_path / "liar")
    path = liar.directory / contract.TRACE
    lines = path.read_text().splitlines()
    record = json.loads(lines[2])
    record["actions"] = "0" * 32
    lines[2] = json.dumps(record, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")
    (side,) = sides(liar)
    window = contract.DenseWindow(first=116, last=120)
    with pytest.raises(CapsuleError) as caught:
        dense_record(side, window, execute, tmp_path / "again")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V075", ExitCode.INCONCLUSIVE)
    assert "step 120, actions" in caught.value.message


def test_equal_runs_have_nothing_to_bisect(honest, sides):
    (side,) = sides(honest)
    with pytest.raises(CapsuleError) as caught:
        window_of(compare_sides(side, side).report, side)
    assert caught.value.code == "CAP-V076"
