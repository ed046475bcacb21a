"""Bisecting real runs: the exact update and operator, and what cannot be bisected."""

import json
import os
import re
import stat
from types import SimpleNamespace

import pytest

from capsule import execution
from capsule.experiment import contract
from capsule.experiment.dense import read_updates
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.trace import BEGINNING, read_trace
from capsule.report.divergence import divergence_lines
from capsule.report.progress import SilentReporter
from capsule.verification.analysis.bisection import bisect, dense_record, window_of
from capsule.verification.analysis.divergence import compare_sides
from capsule.verification.analysis.runs import directory_side
from tests.docs.pages import DOCS, matches
from tests.verification.runs import IMPALA, Machine, make_lock, merged, train

pytestmark = pytest.mark.xdist_group("verification")  # they share runs


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
            execution.ExecutionOptions(stop_after=window.last, schedule=schedule, dense=window),
            reporter=SilentReporter(),
        )
        return BEGINNING

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


@pytest.mark.slow
def test_a_patched_constant_is_pinned_to_the_operator(honest, patched, sides, execute, tmp_path):
    a, b = sides(honest, patched)
    comparison = compare_sides(a, b)
    window = window_of(comparison.report(), a)
    assert (window.first, window.last) == (204, 240)
    found = bisect(a, b, window, execute, tmp_path)
    operator = found.operator
    assert (found.step, found.component) == (204, "parameters")  # the first update of all
    assert operator.a.operator == operator.b.operator == "capsule::centred_rmsprop"
    assert operator.a.where.startswith("capsule/training/optimizers/centred_rmsprop.py:")
    assert operator.same_inputs
    assert operator.a.arguments["floor"] != operator.b.arguments["floor"]
    assert operator.ulp > 0
    report = comparison.report(found)
    assert report.causes[0].name == "changed-code-or-library"
    printed = "\n".join(f"{label:16} {line}" for label, line in divergence_lines(report))
    example = (DOCS / "diff.md").read_text().partition("\n## Example\n")[2]
    assert matches("\n".join(re.findall("^    (.+)$", example, re.MULTILINE)), printed), printed


@pytest.mark.slow
def test_a_dense_record_leaves_everything_else_as_it_was(tmp_path):
    """Records cover two updates: what is handed over once must reach both files."""
    every_two = {"trainer": {"total_steps": 240, "schedule": {"mode": "lockstep"}}}
    recording = {"trace_interval": 80, "tensor_interval": 240, "checkpoint_interval": 240}
    changes = every_two | {"recording": recording, "evaluation": {"interval": 240}}
    lock = make_lock(merged(IMPALA, changes))
    plain, watched = train(tmp_path / "plain", lock), tmp_path / "watched"
    window = contract.DenseWindow(first=120, last=200)
    options = execution.ExecutionOptions(dense=window)
    execution.execute(lock, Machine(), watched, options, reporter=SilentReporter())
    for name in (contract.TRACE, contract.CHECKPOINT_INDEX, contract.EVALUATION, contract.STREAMS):
        assert (watched / name).read_bytes() == (plain.directory / name).read_bytes()
    records = [update.record for update in read_updates(watched / contract.DENSE)]
    assert [record.step for record in records] == [120, 160, 200]
    traced = {
        name: digest
        for record in read_trace(plain.directory / contract.TRACE)
        for name, digest in record.values["unrolls"].items()
    }
    learned = [name for record in records for name in record.values["unrolls"]]
    assert learned == [name for name in traced if name.split(",")[0][7:] in ("2", "3", "4")]


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "plant", [lambda _: None, lambda path: path.symlink_to("/etc/passwd"), os.mkfifo]
)
def test_a_dense_record_must_be_a_regular_file(tmp_path, plant):
    def execute(_side, _window, directory):
        plant(directory / contract.DENSE)
        return BEGINNING

    side, window = SimpleNamespace(training=None), contract.DenseWindow(first=4, last=8)
    with pytest.raises(CapsuleError) as caught:
        dense_record(side, window, execute, tmp_path)
    assert caught.value.code == "CAP-B090"


def test_only_the_owner_can_enter_the_folder_around_the_executions(tmp_path):
    """A container of root is refused otherwise (CAP-E042)."""
    modes = []

    def execute(_side, _window, directory):
        modes.append(stat.S_IMODE(directory.parent.stat().st_mode))
        raise InterruptedError

    side = SimpleNamespace(name="a")
    with pytest.raises(InterruptedError):
        bisect(side, side, contract.DenseWindow(first=4, last=8), execute, tmp_path)
    assert modes == [0o700]


@pytest.mark.slow
def test_equal_runs_have_nothing_to_bisect(honest, sides):
    (side,) = sides(honest)
    with pytest.raises(CapsuleError) as caught:
        window_of(compare_sides(side, side).report(), side)
    assert caught.value.code == "CAP-V076"
