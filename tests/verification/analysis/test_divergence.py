"""Where two runs diverge and why: planted causes in real trainings, and made-up runs."""

import io
import json
import shutil
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import generate, load_private
from capsule.bundle.packing import pack_run
from capsule.bundle.run_bundle import RecordedRun
from capsule.entropy.report import EntropyReport
from capsule.experiment import contract
from capsule.experiment.arrival_log import NOTHING, ArrivalLog, Messages
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.schedule_log import ScheduleLog
from capsule.experiment.trace import read_trace, trace_heads
from capsule.host.run_directory import FINGERPRINT
from capsule.image.cache import Cache
from capsule.machine.fingerprint import take_fingerprint
from capsule.report.divergence import divergence_lines
from capsule.report.terminal import show_report
from capsule.verification.analysis.divergence import compare_results, compare_sides
from capsule.verification.analysis.outputs import ProgramOutputs
from capsule.verification.analysis.runs import (
    ComparedRun,
    Training,
    bundle_side,
    directory_side,
    open_side,
)
from capsule.verification.content.times import UNKNOWN
from capsule.verification.verdict import Bisection, ComponentDifference
from tests.bundle import locks
from tests.hostile.genuine import edit_json
from tests.report.runs import PROGRAM, finished
from tests.verification.runs import (
    CARTPOLE,
    IMPALA,
    LOCK,
    Machine,
    bundled,
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
def test_edited_results_that_were_signed(honest_bundle, key, tmp_path):
    def lie(files):
        edit_json(files, run_bundle.RUN + contract.EVALUATION, better)
        edit_json(files, run_bundle.CLAIMS, lambda claims: better(claims["evaluation"]))

    found = compared(forged(honest_bundle, key, lie, tmp_path / "lie.tar"), honest_bundle)
    assert named(found) == ("tampering", "possible")
    assert found.first is None
    assert "evaluation.points[1].returns[0]" in evidence(found)
    assert found.numbers[0].what.startswith("return of the network of step 400")


def rechained(path, edit):
    """Edit the records of a trace and rebuild its chain, which is returned."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return trace_heads(path)


def lie_about_a_record(edit, folder):
    """Return a change of a bundle's files: a record edited, and all heads after it."""

    def lie(files):
        path = folder / "trace.jsonl"
        path.write_bytes(files[run_bundle.RUN + contract.TRACE])
        traced = rechained(path, edit)
        files[run_bundle.RUN + contract.TRACE] = path.read_bytes()
        heads = {record.step: record.head for record in read_trace(path)}
        index_name = run_bundle.RUN + contract.CHECKPOINT_INDEX

        def relinked(index):
            for each in index["checkpoints"]:
                each["trace_head"] = heads[each["step"]]

        edit_json(files, index_name, relinked)
        index = contract.CheckpointIndex.model_validate_json(files[index_name])
        digests = [{"step": each.step, "digest": each.digest()} for each in index.checkpoints]
        edit_json(
            files, run_bundle.RUN + contract.RESULT, lambda r: r.update(trace_head=traced.last)
        )
        trace = {"records": traced.records, "head": traced.last}
        edit_json(files, run_bundle.CLAIMS, lambda c: c.update(trace=trace, checkpoints=digests))

    return lie


@pytest.mark.parametrize("component", ["loss", "parameters"])
def test_an_edited_record_whose_chain_was_rebuilt(honest, honest_bundle, key, tmp_path, component):
    def edit(records):
        record = next(each for each in records if each["step"] == 240)
        record[component][next(iter(record[component]))] = "0x1.0000000000000p+0"

    lie = lie_about_a_record(edit, tmp_path)
    path = forged(honest_bundle, key, lie, tmp_path / "lie.tar")
    # The machine of a run directory is not known.
    assert named(compared(path, honest.folder)) == ("unexplained", None)
    found = compared(path, honest_bundle)
    assert named(found) == ("tampering", "possible")
    assert (found.first.step, found.first.component) == (240, component)
    assert found.map.components[component] == ((240, 240),)
    assert "1 of 10 records differs" in evidence(found)


def test_the_folder_of_a_run_names_its_machine(honest, honest_bundle, tmp_path):
    copy = honest.copy(tmp_path / "copy")
    with open_side(honest_bundle, []) as bundle, open_side(copy.folder, []) as unknown:
        assert unknown.fingerprint is None
        (copy.folder / FINGERPRINT).write_bytes(bundle.fingerprint.document())
        with open_side(copy.folder, []) as folder:
            assert folder.fingerprint == bundle.fingerprint


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


# --- what a verification says of a divergence -----------------------------------------------------


def shown(report):
    stream = io.StringIO()
    show_report(report, Console(file=stream, width=200))
    return stream.getvalue()


@pytest.mark.slow
def test_a_reproduced_run_has_a_replica_and_no_divergence(verified, honest_bundle, honest):
    report = verified(honest_bundle)
    assert report.verdict == "reproduced-bitwise"
    assert report.divergence is None
    evaluation = (honest.directory / contract.EVALUATION).read_bytes()
    assert report.replica.evaluation == contract.Evaluation.model_validate_json(evaluation)
    assert report.replica.divergence.steps == 400
    assert report.replica.divergence.components["parameters"] == ()


@pytest.mark.slow
def test_a_lie_about_the_score_is_called_tampering(verified, honest_bundle, key, tmp_path):
    def lie(files):
        edit_json(files, run_bundle.RUN + contract.EVALUATION, better)
        edit_json(files, run_bundle.CLAIMS, lambda claims: better(claims["evaluation"]))

    report = verified(forged(honest_bundle, key, lie, tmp_path / "lie.tar"))
    assert report.verdict == "not-reproduced"
    assert report.divergence.causes[0].name == "tampering"
    assert report.replica.divergence.components["loss"] == ()
    text = shown(report)
    assert "equal, record by record, up to step 400" in text
    assert "tampering (possible)" in text


@pytest.mark.slow
def test_other_physics_are_named_by_a_prefix_already(verified, honest_bundle):
    moon = Machine(variables={"PHYSICS_GRAVITY": "9.9"})
    report = verified(honest_bundle, "prefix:120", moon)
    assert report.verdict == "not-reproduced"
    assert report.replica is None
    assert report.divergence.causes[0].name == "environment-dynamics"
    assert report.first_difference == report.divergence.first
    assert "environment-dynamics (shown)" in shown(report)


# --- made-up runs ---------------------------------------------------------------------------------


def unreadable(path):
    raise FileNotFoundError(path)


def program(name, contradictions=(), drawn=None, **outputs):
    files = {path: contract.Output(size=1, sha256=digit * 64) for path, digit in outputs.items()}
    listing = contract.Outputs(files=files, standard_output=None)
    return ComparedRun(
        name,
        locks.make_lock().spec,
        contract.Runtime(flags={}, libraries={}, device={}),
        outputs=ProgramOutputs(listing, unreadable, UNKNOWN),
        contradictions=contradictions,
        drawn=drawn or {},
    )


def checkpoint(step, weights="0"):
    return contract.Checkpoint(step=step, tensors={"w": weights * 64}, trace_head="0" * 64)


@pytest.fixture
def trained(tmp_path):
    """A function that makes up the run of a trainer: losses, checkpoints and returns by step."""

    def run(name, losses=(0.5, 0.5), checkpoints=(), returns=None, tensors=None):
        trace = tmp_path / f"{name}.jsonl"
        lines = [
            {"step": 4 * number, "loss": {"last": loss.hex(), "digest": str(loss)}}
            for number, loss in enumerate(losses, 1)
        ]
        trace.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        points = tuple(
            contract.EvaluationPoint(step=step, returns=values, lengths=(1,) * len(values))
            for step, values in (returns or {}).items()
        )
        evaluation = None
        if returns is not None:
            evaluation = contract.Evaluation(starts=((0,), (1,)), points=points)
        files = {}
        for step, weights in (tensors or {}).items():
            files[step] = tmp_path / f"{name}-{step}.safetensors"
            save_file({"w": np.array(weights, np.float32)}, files[step])
        streams = contract.StreamProfiles(streams=())
        return replace(
            program(name),
            outputs=None,
            training=Training(trace, streams, checkpoints, files, evaluation, None, ""),
        )

    return run


def test_the_run_of_a_trainer_is_not_compared_with_that_of_a_program(trained):
    for pair in ((trained("a"), program("b")), (program("a"), trained("b"))):
        with pytest.raises(CapsuleError, match="a and b cannot be compared") as caught:
            compare_sides(*pair)
        assert (caught.value.code, caught.value.exit_code) == ("CAP-V073", ExitCode.USAGE)
        assert "same kind" in caught.value.fix


def test_programs_are_compared_by_their_outputs():
    found = compare_sides(program("a", x="1", y="1"), program("b", x="1", y="2")).report()
    assert (found.a, found.b, found.equal, found.map) == ("a", "b", False, None)
    assert [each.component for each in found.differences] == ["files.y.sha256"]
    same = compare_sides(program("a", x="1"), program("b", x="1")).report()
    assert (same.equal, same.causes, same.differences) == (True, (), ())


def test_processes_that_drew_other_amounts_of_randomness_did_other_work():
    drawn = {"0x": 8, "0x.1": 4024}, {"0x": 8, "0x.1": 2544, "0x.2": 0}
    a, b = (program(name, drawn=each, x=name) for name, each in zip("12", drawn, strict=True))
    found = compare_sides(a, b).report()
    assert named(found) == ("other-draws", "possible")
    assert found.causes[0].evidence[:2] == (
        "process 0x.1 asked for randomness: 4,024 bytes / 2,544 bytes",
        "process 0x.2 asked for randomness: nothing / 0 bytes",
    )
    assert "seed its generators" in found.causes[0].fix
    assert named(compare_sides(a, replace(b, drawn=drawn[0])).report())[0] == "unexplained"
    # Another program draws other amounts anyway.
    changed = replace(b, runtime=b.runtime.model_copy(update={"libraries": {"numpy": "2"}}))
    assert named(compare_sides(a, changed).report())[0] != "other-draws"


def test_the_draws_of_a_bundle_are_those_of_its_program_without_capsule_itself():
    with open_bundle(Path(__file__).parents[2] / "corpus" / "program.capsule.tar", []) as bundle:
        drawn = bundle_side(RecordedRun.read(bundle), "a").drawn
        report = bundle.read(run_bundle.ENTROPY_REPORT, EntropyReport)
    assert all("x" in process for process in drawn)
    assert sum(drawn.values()) == report.requests(drawn.__contains__).bytes > 0


def test_a_contradiction_makes_runs_unequal_and_names_its_side():
    found = compare_sides(program("a"), program("b", contradictions=("it lies",))).report()
    assert not found.equal
    assert named(found) == ("tampering", "shown")
    assert found.causes[0].evidence[0] == "b: it lies"
    assert "changed or damaged" in found.causes[0].evidence[1]


def test_differences_that_the_caller_knows_are_taken():
    known = (ComponentDifference(component="flags.x", claimed="1", found="2"),)
    assert compare_sides(program("a"), program("b"), known).report().differences == known
    assert compare_sides(program("a", x="1"), program("b", x="2"), ()).equal


def test_the_first_losses_that_differ_are_measured_in_float32(trained):
    one, next_one = 1.0, 1.0 + 2**-23  # neighbours in float32
    found = compare_sides(trained("a", (0.5, one)), trained("b", (0.5, next_one))).report()
    assert (found.first.step, found.first.component, found.last_equal) == (8, "loss", 4)
    (number,) = found.numbers
    assert (number.what, number.a, number.b) == ("loss at step 8", one.hex(), next_one.hex())
    assert number.ulp == 1
    assert number.relative == pytest.approx(2**-23)


def hexed(*numbers):
    return tuple(float(number).hex() for number in numbers)


def test_the_most_distant_returns_are_named(trained):
    a = trained("a", returns={4: hexed(10, 20), 8: hexed(100, 7)})
    b = trained("b", returns={4: hexed(10, 21), 8: hexed(50, 7)})
    (number,) = compare_sides(a, b).report().numbers
    assert number.what == ("return of the network of step 8 from start 0, the most distant of 2")
    assert number.relative == 0.5


@pytest.mark.parametrize("text", ["nan", "inf", "0x1p+99999"])
def test_a_return_that_is_no_number_has_no_distance(trained, text):
    a, b = trained("a", returns={4: hexed(1)}), trained("b", returns={4: (text,)})
    (number,) = compare_sides(a, b).report().numbers
    assert (number.ulp, number.relative) == (None, None)


def test_a_prefix_is_compared_up_to_the_checkpoints_that_both_have(trained):
    whole = trained("a", (0.5, 0.5, 0.5), (checkpoint(4), checkpoint(12)), {12: hexed(1)})
    prefix = trained("b", (0.5, 0.5), (checkpoint(4),))
    assert compare_sides(whole, prefix).equal
    other = trained("c", (0.5, 0.5), (checkpoint(4, "1"),))
    found = compare_sides(whole, other).report()
    assert (found.equal, found.first) == (False, None)
    assert [each.component for each in found.differences] == ["checkpoints[0].digest"]
    longer = trained("d", (0.5, 0.5, 0.5), (checkpoint(4),), {12: hexed(1)})
    assert not compare_sides(whole, longer).equal  # it is no prefix, and lacks a checkpoint


def test_checkpoints_at_other_intervals_are_no_difference(trained):
    often = trained("a", checkpoints=(checkpoint(4), checkpoint(8)), returns={8: hexed(1)})
    seldom = trained("b", checkpoints=(checkpoint(8),), returns={8: hexed(1)})
    other = trained("c", checkpoints=(checkpoint(8, "1"),), returns={8: hexed(1)})
    spec = often.spec
    coarse = spec.model_copy(
        update={"recording": spec.recording.model_copy(update={"checkpoint_interval": 500_000})}
    )
    assert not compare_sides(often, seldom).equal
    assert compare_sides(often, replace(seldom, spec=coarse)).equal
    assert not compare_sides(often, replace(other, spec=coarse)).equal


def test_a_resumed_run_is_no_known_machine_throughout(honest, key, tmp_path):
    resumed = honest.copy(tmp_path / "resumed")
    with (resumed.directory / contract.EVENTS).open("a") as events:
        event = contract.Event(time=1.0, kind="resume", step=200)
        events.write(event.model_dump_json(exclude_none=True) + "\n")
    for run, whether in ((honest, False), (resumed, True)):
        for path in (run.directory, bundled(run, key, tmp_path / str(whether))):
            with open_side(path, []) as side:
                assert side.resumed == whether


def test_the_tensors_of_the_last_common_checkpoint_are_compared(trained):
    a = trained("a", tensors={4: [1, 2], 8: [1, 2], 12: [1, 2]})
    b = trained("b", tensors={4: [9, 9], 8: [1, 4]})
    found = compare_sides(a, b).report()
    assert found.checkpoint == 8
    ((name, differing),) = [(each.name, each.differing) for each in found.tensors]
    assert (name, differing) == ("w", 1)
    assert compare_sides(a, trained("c")).report().checkpoint is None


def test_a_bisection_becomes_part_of_the_report(trained):
    bisection = Bisection(step=8, component="gradient")
    report = compare_sides(trained("a"), trained("b", (0.5, 0.75))).report(bisection)
    assert report.bisection == bisection
    assert report.first.component == "loss"


@pytest.mark.parametrize(
    ("messages", "attempts", "equal"),
    [((0, 0), (0, NOTHING), True), ((0, 0), None, True), ((0,), (0, NOTHING), False)],
    ids=["fewer attempts", "none", "fewer messages"],
)
def test_a_program_that_ends_may_attempt_less_when_it_is_repeated(
    tmp_path, messages, attempts, equal
):
    def write_log(directory, messages, attempts):
        waits = {"mail~1": messages, "mail~1 cancellations of a": attempts}
        waits = {
            name: Messages(sources=("a",), order=order) for name, order in waits.items() if order
        }
        (directory / contract.ARRIVALS).write_bytes(ArrivalLog(waits=waits).document())

    run = finished(tmp_path, PROGRAM)
    write_log(run.directory, (0, 0), (0, NOTHING, 0, NOTHING))
    generate(tmp_path / "alice")
    key = load_private(tmp_path / "alice")
    path, _ = pack_run(run, key, tmp_path, Cache(tmp_path / "cache"), embed_image=False)
    write_log(run.directory, messages, attempts)
    executed = SimpleNamespace(varied={}, span=UNKNOWN)
    with open_bundle(path, []) as bundle:
        recorded = run_bundle.RecordedRun.read(bundle)
        found = compare_results(recorded, None, "process", run.directory, None, executed)
    assert [each.component for each in found.differences] == ([] if equal else ["arrivals"])
    assert found.fewer_attempts == equal
