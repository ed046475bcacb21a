"""Start sequences of a run, taken from its bundle and pinned for other runs."""

import json

import pytest
from typer.testing import CliRunner

from capsule.cli.main import app
from capsule.host.spec_file import load_spec
from tests.hostile import genuine

SPEC = """\
schema: capsule/spec/v1
name: pinned
environment: {suite: gymnasium, id: CartPole-v1}
trainer: {algorithm: dqn, network: mlp}
evaluation: {starts: 1, start_set: starts.json}
"""


def capsule_starts(*arguments):
    return CliRunner().invoke(app, ["starts", *map(str, arguments)])


@pytest.fixture
def ranked(tmp_path):
    return genuine.packed(genuine.training(), tmp_path / "run.capsule.tar")


def test_a_spec_pins_them_by_what_is_in_the_file(ranked, tmp_path):
    assert capsule_starts(ranked, "-o", tmp_path / "starts.json").exit_code == 0
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    spec = load_spec(path)
    pinned = spec.evaluation.start_set
    assert pinned.starts == ((0,),)
    assert "starts.json" not in spec.model_dump_json()
    (tmp_path / "starts.json").rename(tmp_path / "elsewhere.json")
    moved = load_spec(path, ["evaluation.start_set=elsewhere.json"])
    assert moved.digest() == spec.digest()


def test_of_a_run_whose_starts_were_pinned_they_are_the_same_set(ranked, tmp_path):
    assert capsule_starts(ranked, "-o", tmp_path / "starts.json").exit_code == 0
    pinned = json.loads((tmp_path / "starts.json").read_bytes())

    def pin(files):
        evaluation = {"starts": 1, "start_set": pinned}
        genuine.relock(files, lambda lock: lock["spec"]["evaluation"].update(evaluation))

    other = genuine.packed(genuine.training(), tmp_path / "other.capsule.tar", pin)
    assert capsule_starts(other, "-o", tmp_path / "again.json").exit_code == 0
    assert json.loads((tmp_path / "again.json").read_bytes()) == pinned


def no_ops(files):
    genuine.relock(files, lambda lock: lock["spec"]["evaluation"].update(noop_max=30))


@pytest.mark.parametrize(
    ("run", "change", "reason"),
    [
        (genuine.program, None, "it ran a program instead"),
        (genuine.training, no_ops, "with evaluation.noop_max 30, its starts are no-ops"),
    ],
)
def test_a_run_without_ranked_starts_is_refused(tmp_path, run, change, reason):
    bundle = genuine.packed(run(), tmp_path / "run.capsule.tar", change)
    done = capsule_starts(bundle, "-o", tmp_path / "starts.json")
    assert done.exit_code == 2
    assert f"CAP-S011: the run has no start set: {reason}" in done.stderr
    assert not (tmp_path / "starts.json").exists()
