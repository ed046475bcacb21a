"""``capsule diff``: from bundles, runs and dense records to a report, with bisection on demand."""

import json
from types import SimpleNamespace

import pytest

from capsule import execution
from capsule.engine.containers import ContainerEngine
from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json
from capsule.experiment.contract import Outputs
from capsule.experiment.dense import read_header, read_updates
from capsule.experiment.errors import CapsuleError
from capsule.experiment.states import RESUME
from capsule.image.cache import Cache
from capsule.report.progress import SilentReporter
from capsule.verification import diff as diff_module
from capsule.verification.diff import DiffRequest, diff
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
