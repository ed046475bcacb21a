"""``capsule diff``: from bundles, runs and dense records to a report, with bisection on demand."""

import io
import json
from datetime import UTC, datetime
from types import SimpleNamespace

import numpy as np
import pytest

from capsule import execution
from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.engine.containers import ContainerEngine
from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.contract import Output, Outputs
from capsule.experiment.dense import read_header, read_updates
from capsule.experiment.errors import CapsuleError
from capsule.experiment.states import RESUME
from capsule.image.cache import Cache
from capsule.report.divergence import divergence_lines
from capsule.report.progress import SilentReporter
from capsule.verification import diff as diff_module
from capsule.verification.diff import DiffRequest, diff
from tests.hostile import genuine
from tests.hostile.genuine import edit_json
from tests.verification.runs import CARTPOLE, Machine, bundled, make_lock, merged, train

pytestmark = pytest.mark.xdist_group("verification")  # they share runs


@pytest.fixture
def differ(monkeypatch, tmp_path):
    """Call ``capsule diff`` with the packages of the tests in place of a lock's."""

    def work(
        a,
        b,
        *,
        bisect=False,
        dense=None,
        keys=(),
        allow_untrusted=False,
        engine="auto",
        error=None,
    ):
        def open_engine(*_arguments, **_options):
            if error is not None:
                raise error
            return Machine()

        monkeypatch.setattr(diff_module, "open_engine", open_engine)
        monkeypatch.setattr(execution, "prepare", lambda *_, **__: None)
        request = DiffRequest(a, b, bisect, dense, keys, allow_untrusted, engine)
        return diff(request, Cache(tmp_path / "cache"), SilentReporter())

    return work


@pytest.mark.slow
def test_a_dense_record_stands_for_a_side_that_is_elsewhere(
    honest, other_numerics, differ, tmp_path
):
    away = tmp_path / "away.dense"
    found = differ(honest.folder, other_numerics.folder, dense=away)
    assert found.causes[0].name == "arithmetic"
    header = read_header(away)
    assert (header.spec, header.first, header.last) == (honest.lock.spec.digest(), 204, 240)
    updates = list(read_updates(away))
    assert [each.record.step for each in updates] == list(range(204, 241, 4))
    assert all(each.calls for each in updates)
    found = differ(away, other_numerics.folder, bisect=True).bisection
    assert (found.step, found.component) == (204, "gradient")
    operators = found.operator.a.operator, found.operator.b.operator
    assert operators == ("capsule::dense", "aten::addmm")
    assert found.operator.ulp is None  # they compute other things on the way to the same


@pytest.mark.slow
def test_bundles_that_kept_their_states_are_bisected_from_the_checkpoint_before(
    differ, key, tmp_path, monkeypatch
):
    bundles = []
    for numerics in ("portable-v3", "portable-v2"):
        changes = {
            "accelerator": {"kind": "cpu", "numerics": numerics},
            "recording": {"segment_states": True},
        }
        run = train(tmp_path / numerics, make_lock(merged(CARTPOLE, changes)))
        bundles.append(bundled(run, key, tmp_path / f"{numerics}-bundle"))
    began, execute = [], execution.execute

    def watched(lock, engine, directory, options, **others):
        state = directory / contract.STATE / RESUME
        began.append(json.loads(state.read_bytes())["step"] if state.exists() else 0)
        return execute(lock, engine, directory, options, **others)

    monkeypatch.setattr(execution, "execute", watched)
    options = {"bisect": True, "allow_untrusted": True}
    found = differ(*bundles, **options, engine="process")
    assert began == [200, 200]
    assert found.bisection.step == 204
    for choice in ("auto", "docker"):  # both were made without a container
        with pytest.raises(CapsuleError, match="CAP-V009") as refusal:
            differ(*bundles, **options, engine=choice)
        assert (refusal.value.code, refusal.value.exit_code) == ("CAP-V070", 4)
    assert began == [200, 200]


def refused(differ, *arguments, **options):
    with pytest.raises(CapsuleError) as caught:
        differ(*arguments, **options)
    return caught.value.code, caught.value.exit_code


@pytest.mark.slow
def test_what_cannot_be_executed_is_refused(honest, honest_bundle, patched, differ):
    no_engine = CapsuleError("CAP-E001", "no engine answers", fix="Start one.")
    pair = honest.folder, patched.folder
    assert refused(differ, *pair, bisect=True, error=no_engine) == ("CAP-V070", 4)
    bare = honest.directory, patched.directory
    assert refused(differ, *bare, bisect=True) == ("CAP-V079", 2)
    untrusted = honest_bundle, patched.folder
    assert refused(differ, *untrusted, bisect=True) == ("CAP-V078", 3)


@pytest.mark.parametrize("from_bundle", [True, False])
def test_layers_of_a_bundle_get_no_gpu_where_containers_break_out(
    monkeypatch, tmp_path, from_bundle
):
    class Outdated(ContainerEngine):
        def __init__(self):
            pass

        def components(self):
            return {"runc": "1.1.5", "nvidia-container-toolkit": "1.17.7"}

    def executed(*_, **__):
        raise CapsuleError("CAP-E006", "it was executed", fix="-")

    bundle = SimpleNamespace(authentic=True)
    recorded = SimpleNamespace(bundle=bundle, claims=SimpleNamespace(image="the image"))
    cuda = {"accelerator": {"kind": "cuda", "cuda": "13.0", "cudnn": ">=9", "driver": ">=580"}}
    side = SimpleNamespace(
        name="a", lock=make_lock(merged(CARTPOLE, cuda)), recorded=recorded if from_bundle else None
    )
    monkeypatch.setattr(diff_module, "open_engine", lambda *_, **__: Outdated())
    monkeypatch.setattr(diff_module, "_note_gpu", executed)
    request = DiffRequest(tmp_path, tmp_path, True, None, (), allow_untrusted=False, engine="auto")
    with pytest.raises(CapsuleError) as caught:
        diff_module._execute(request, None, SilentReporter(), side, None, tmp_path)
    assert ("CAP-V055" in caught.value.message) == from_bundle


def test_nothing_is_executed_or_ignored_unasked(differ, tmp_path):
    record = tmp_path / "a.dense"
    record.write_text('{"first":4,"last":8,"schema":"capsule/dense/v1","spec":"%s"}\n' % ("0" * 64))
    run, out = tmp_path / "run", tmp_path / "out"
    assert refused(differ, record, run) == ("CAP-V069", 2)
    assert refused(differ, run, record) == ("CAP-V069", 2)
    assert refused(differ, record, run, bisect=True, dense=out) == ("CAP-V069", 2)
    assert refused(differ, run, record, dense=out) == ("CAP-V069", 2)
    assert refused(differ, run, run, bisect=True, dense=out) == ("CAP-V069", 2)
    assert refused(differ, record, record) == ("CAP-V077", 4)


@pytest.mark.slow
def test_what_is_no_run_is_refused(honest, differ, tmp_path):
    assert refused(differ, tmp_path / "nothing", honest.folder) == ("CAP-V071", 2)
    assert refused(differ, tmp_path, honest.folder) == ("CAP-V071", 2)
    program = honest.copy(tmp_path / "program")
    outputs = Outputs(files={}, standard_output=None).model_dump(mode="json", by_alias=True)
    (program.directory / contract.OUTPUTS).write_bytes(canonical_json(outputs))
    assert refused(differ, program.folder, honest.folder) == ("CAP-V073", 2)


def program_bundle(path, written):
    """Bundle a run of a program whose outputs have these contents, in place of its own."""

    def write(files):
        entries = {name: Output(size=len(each), sha256=sha256_hex(each)) for name, each in data}
        listed = {name: entry.model_dump(mode="json") for name, entry in entries.items()}
        files.update({run_bundle.WORKSPACE + name: each for name, each in data})
        listing = run_bundle.RUN + contract.OUTPUTS
        edit_json(files, listing, lambda outputs: outputs["files"].update(listed))
        edit_json(files, run_bundle.CLAIMS, lambda claims: claims["outputs"].update(listed))
        digest = sha256_hex(files[listing])
        edit_json(files, genuine.RESULT, lambda result: result.update(outputs=digest))

    data = written.items()
    return genuine.packed(genuine.program(), path, write)


def numbers(*values):
    """Return a file of numpy."""
    stream = io.BytesIO()
    np.save(stream, np.array(values, np.float32))
    return stream.getvalue()


def in_folder(bundle, folder):
    """Unpack the run directory of a program's bundle."""
    with open_bundle(bundle, []) as opened:
        files = {name.removeprefix(run_bundle.RUN): opened.content(name) for name in opened.files}
    files[contract.JOB] = files.pop(run_bundle.JOB)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("unpacked", [False, True])
def test_outputs_of_two_programs_are_compared_by_content(differ, tmp_path, unpacked):
    written = (
        {"score.txt": b"start\n9\n", "weights.npy": numbers(1, 2, 3)},
        {"score.txt": b"start\n8\n", "weights.npy": numbers(1, 2, np.nextafter(np.float32(3), 4))},
    )
    a, b = (program_bundle(tmp_path / f"{number}.tar", each) for number, each in enumerate(written))
    if unpacked:
        b = in_folder(b, tmp_path / "b")
    found = differ(a, b)
    assert not found.equal
    (score, weights) = found.outputs.files
    assert (score.path, score.where, score.claimed, score.found) == (
        "score.txt",
        "line 2",
        "9",
        "8",
    )
    assert weights.content.format == "numpy array"
    assert weights.found == "1 of 3 elements differs, up to 1 ulp apart"
    lines = list(divergence_lines(found))
    assert lines[:3] == [
        ("output", "score.txt (text): 1 part differs"),
        ("", "line 2 (content): 9 / 8"),
        ("output", "weights.npy (numpy array): 1 part differs"),
    ]
    assert differ(a, a).outputs is None


def test_a_difference_of_two_programs_has_the_cause_that_its_content_shows(differ, tmp_path):
    """The times of the runs are known from their bundles, and unknown for a run directory."""
    dates = [datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC).timestamp() for second in (1, 2)]
    a, b = (
        program_bundle(tmp_path / f"{date}.tar", {"score.txt": b"started %d\n" % date})
        for date in dates
    )
    found = differ(a, b)
    assert found.outputs.nature == "date"
    assert (found.causes[0].name, found.causes[0].certainty) == ("clock", "shown")
    assert differ(a, in_folder(b, tmp_path / "b")).outputs.nature == "content"


def test_an_output_that_a_bundle_lacks_is_a_difference_without_a_comparison(differ, tmp_path):
    other = program_bundle(tmp_path / "other.tar", {"score.txt": b"8\n"})

    def remove(files):
        del files[run_bundle.WORKSPACE + "score.txt"]

    lacking = genuine.packed(genuine.program(), tmp_path / "lacking.tar", remove)
    found = differ(lacking, other)
    assert found.causes[0].name == "tampering"
    (score,) = found.outputs.files
    assert (score.path, score.content) == ("score.txt", None)


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
