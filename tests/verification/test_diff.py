"""Planted causes, one of each class: real trainings that part, and what is said of it."""

import json
import shutil
from array import array
from dataclasses import replace

import pytest

from capsule.bundle import run_bundle
from capsule.experiment import contract
from capsule.experiment.errors import ExitCode
from capsule.experiment.schedule_log import ScheduleLog
from capsule.experiment.trace import read_trace, trace_head
from capsule.machine.fingerprint import take_fingerprint
from capsule.report.divergence import divergence_lines
from capsule.verification.analysis.divergence import compare_sides
from capsule.verification.analysis.runs import directory_side, open_side
from tests.verification.runs import (
    CARTPOLE,
    IMPALA,
    LOCK,
    Machine,
    edit_json,
    forged,
    make_lock,
    merged,
    train,
)

pytestmark = pytest.mark.xdist_group("verification")  # they share runs


def compared(a, b):
    """Compare two runs by the paths of their folders or bundles."""
    with open_side(a, []) as left, open_side(b, []) as right:
        return compare_sides(left, right).report()


def named(found):
    """Return the class of causes that is named first, and how certain it is."""
    return found.causes[0].name, found.causes[0].certainty


def evidence(found):
    return "\n".join(found.causes[0].evidence)


@pytest.mark.slow
def test_a_run_and_its_bundle_are_equal(honest, honest_bundle):
    found = compared(honest.folder, honest_bundle)
    assert found.equal
    assert found.exit_code == ExitCode.OK
    assert (found.first, found.causes, found.tensors, found.differences) == (None, (), (), ())
    assert found.map.steps == 400
    assert not any(found.map.components.values())


@pytest.mark.slow
def test_another_seed(honest, tmp_path):
    other = train(
        tmp_path / "other", make_lock(merged(CARTPOLE, {"seeds": {"streams": {"minibatch": 5}}}))
    )
    found = compared(honest.folder, other.folder)
    assert named(found) == ("other-seed", "shown")
    assert (found.first.component, found.explanations[0].what) == ("streams", "stream minibatch")
    assert (found.explanations[0].a, found.explanations[0].b) == ("seed 0", "seed 5")
    assert "exploration" not in evidence(found)
    assert found.equal_until["observations"] >= 200  # until learning from other minibatches


@pytest.mark.slow
def test_other_physics(honest, tmp_path):
    lock = make_lock(CARTPOLE, wheels={"gymnasium": "1.3.0"})
    moon = train(tmp_path / "moon", lock, Machine(variables={"PHYSICS_GRAVITY": "9.9"}))
    earth = honest.copy(tmp_path / "earth")
    (earth.folder / "lock.json").write_bytes(
        make_lock(CARTPOLE, wheels={"gymnasium": "1.4.0"}).document() + b"\n"
    )
    found = compared(earth.folder, moon.folder)
    assert named(found) == ("environment-dynamics", "shown")
    assert found.first.component in ("streams", "observations")
    assert "observations" in (found.first.component, *found.first.also)
    assert "wheel gymnasium: 1.4.0" in evidence(found)
    assert found.explanations[0].what == "wheel gymnasium"


@pytest.mark.slow
def test_another_numerics_profile(honest, other_numerics):
    found = compared(honest.folder, other_numerics.folder)
    assert named(found) == ("arithmetic", "likely")
    assert found.first.component == "loss"
    assert found.equal_until["observations"] >= found.equal_until["loss"]
    assert 0 < found.numbers[0].ulp < 100
    assert found.explanations[0].what == "accelerator.numerics"
    assert found.checkpoint == 400
    assert all(item.ulp > 0 for item in found.tensors)


@pytest.mark.slow
def test_another_processor(honest, other_numerics):
    """Under one spec; the numerics profile stands for what a library would choose there."""
    here = take_fingerprint(Machine().describe())
    then = here.model_copy(update={"cpu": here.cpu.model_copy(update={"flags": ("sse4_2",)})})
    spec = make_lock(merged(CARTPOLE, {"accelerator": {"kind": "cpu", "numerics": "native"}})).spec
    sides = [
        replace(directory_side(run.directory, name, None, machine), spec=spec)
        for run, name, machine in ((honest, "new", here), (other_numerics, "old", then))
    ]
    found = compare_sides(*(replace(side, runtime=sides[0].runtime) for side in sides)).report()
    assert named(found) == ("arithmetic", "likely")
    assert found.explanations[0].what == "cpu.flags"
    assert "choose their code by the processor" in found.explanations[0].why


@pytest.mark.slow
def test_another_order_of_actors(tmp_path):
    lock = make_lock(IMPALA)
    runs = []
    for number, order in enumerate(((0, 1, 2, 3), (1, 0, 2, 3))):
        played = array("H", [0, 1, 2, 3, *order, 0, 1, 2, 3])
        log = ScheduleLog(lock.spec.digest(), 4, 4, played, array("H", [0] * 12))
        path = tmp_path / f"{number}.log"
        path.write_bytes(log.document())
        runs.append(train(tmp_path / str(number), lock, schedule=path))
    found = compared(*(run.folder for run in runs))
    assert named(found) == ("actor-order", "shown")
    assert (found.first.step, found.first.component) == (80, "schedule")
    assert "the same unrolls are trained on, in another order" in evidence(found)
    assert found.equal_until["schedule"] == 40


@pytest.mark.slow
def test_a_patched_optimizer(honest, patched):
    found = compared(honest.folder, patched.folder)
    assert named(found) == ("changed-code-or-library", "likely")
    assert "training code" in evidence(found)
    assert found.first.component in ("loss", "parameters")
    assert found.equal_until["observations"] >= found.last_equal


@pytest.mark.slow
def test_another_setting(honest, tmp_path):
    slower = {"trainer": {"learning_rate": 1e-4}}
    other = train(tmp_path / "other", make_lock(merged(CARTPOLE, slower)))
    found = compared(honest.folder, other.folder)
    assert named(found) == ("other-settings", "likely")
    assert found.explanations[0].what == "trainer.learning_rate"


def better(evaluation):
    evaluation["points"][-1].update(returns=["0x1.9000000000000p+8"] * 2)


@pytest.mark.slow
def test_edited_results_that_were_signed(honest, honest_bundle, key, tmp_path):
    def lie(files):
        edit_json(files, run_bundle.RUN + contract.EVALUATION, better)
        edit_json(files, run_bundle.CLAIMS, lambda claims: better(claims["evaluation"]))

    found = compared(forged(honest_bundle, key, lie, tmp_path / "lie.tar"), honest.folder)
    assert named(found) == ("tampering", "likely")
    assert found.first is None
    assert "evaluation.points[1].returns[0]" in evidence(found)
    assert found.numbers[0].what.startswith("return of the network of step 400")


def rechained(path, edit):
    """Edit the records of a trace and rebuild its chain; return its length and head."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return trace_head(path)


def lie_about_a_record(edit, folder):
    """Return a change of a bundle's files: a record edited, and all heads after it."""

    def lie(files):
        path = folder / "trace.jsonl"
        path.write_bytes(files[run_bundle.RUN + contract.TRACE])
        records, head = rechained(path, edit)
        files[run_bundle.RUN + contract.TRACE] = path.read_bytes()
        heads = {record.step: record.head for record in read_trace(path)}
        index_name = run_bundle.RUN + contract.CHECKPOINT_INDEX

        def relinked(index):
            for each in index["checkpoints"]:
                each["trace_head"] = heads[each["step"]]

        edit_json(files, index_name, relinked)
        index = contract.CheckpointIndex.model_validate_json(files[index_name])
        digests = [{"step": each.step, "digest": each.digest()} for each in index.checkpoints]
        edit_json(files, run_bundle.RUN + contract.RESULT, lambda r: r.update(trace_head=head))
        trace = {"records": records, "head": head}
        edit_json(files, run_bundle.CLAIMS, lambda c: c.update(trace=trace, checkpoints=digests))

    return lie


@pytest.mark.parametrize(("component", "certainty"), [("loss", "likely"), ("parameters", "shown")])
def test_an_edited_record_whose_chain_was_rebuilt(
    honest, honest_bundle, key, tmp_path, component, certainty
):
    def edit(records):
        record = next(each for each in records if each["step"] == 240)
        record[component][next(iter(record[component]))] = "0x1.0000000000000p+0"

    lie = lie_about_a_record(edit, tmp_path)
    found = compared(forged(honest_bundle, key, lie, tmp_path / "lie.tar"), honest.folder)
    assert named(found) == ("tampering", certainty)
    assert (found.first.step, found.first.component) == (240, component)
    assert found.map.components[component] == ((240, 240),)
    assert "1 of 10 records differ" in evidence(found)


def test_a_bundle_that_contradicts_itself(honest, honest_bundle, key, tmp_path):
    def lie(files):
        edit_json(files, run_bundle.RUN + contract.EVALUATION, better)

    found = compared(forged(honest_bundle, key, lie, tmp_path / "lie.tar"), honest.folder)
    assert named(found) == ("tampering", "shown")
    assert "lie.tar: the bundle contradicts itself" in evidence(found)


def test_a_checkpoint_that_names_another_head(honest, tmp_path):
    forgery = honest.copy(tmp_path / "forgery")
    path = forgery.directory / contract.TRACE
    rechained(path, lambda records: records[3].update(actions="0" * 32))
    found = compared(forgery.folder, honest.folder)
    assert named(found) == ("tampering", "shown")
    assert "forgery: checkpoint 200 names the trace head" in evidence(found)


@pytest.mark.slow
def test_nothing_explains_equal_pins_and_other_numbers(honest, patched, tmp_path):
    other = patched.copy(tmp_path / "other")
    shutil.copyfile(honest.folder / LOCK, other.folder / LOCK)
    found = compared(honest.folder, other.folder)
    assert named(found) == ("unexplained", None)
    assert "capsule diagnose" in evidence(found)


@pytest.mark.slow
def test_the_story_takes_about_thirty_lines(honest_bundle, other_numerics):
    lines = list(divergence_lines(compared(honest_bundle, other_numerics.folder)))
    assert len(lines) <= 29
    assert ("cause", "arithmetic (likely)") in lines


@pytest.mark.slow
def test_the_command_prints_writes_and_ends_with_the_result(
    honest, honest_bundle, patched, tmp_path
):
    from typer.testing import CliRunner

    from capsule.cli.main import app

    def run(*arguments):
        return CliRunner().invoke(app, ["diff", *map(str, arguments)])

    equal = run(honest.folder, honest_bundle)
    assert equal.exit_code == 0
    assert "equal, bit for bit" in equal.stdout
    report = tmp_path / "report.json"
    differs = run(honest_bundle, patched.folder, "--json", "--report", report)
    assert differs.exit_code == 1
    assert json.loads(differs.stdout) == json.loads(report.read_text())
    assert json.loads(differs.stdout)["causes"][0]["name"] == "changed-code-or-library"
    assert run(honest.folder, tmp_path / "nothing").exit_code == 2
