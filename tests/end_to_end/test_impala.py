"""IMPALA in a container: an asynchronous run, killed and resumed, whose schedule verify replays."""

from array import array
from dataclasses import replace

import pytest

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.claims import TrainingClaims
from capsule.experiment.schedule_log import parse_schedule
from tests.conftest import one_processor
from tests.end_to_end.conftest import Run, capsule, forge
from tests.end_to_end.test_run import containers, docker, resume, start, traced, wait_for
from tests.hostile.genuine import edit_json

pytestmark = [pytest.mark.engine, pytest.mark.network]

SPEC = """\
schema: capsule/spec/v1
name: impala
seeds: {root: 1}
environment: {suite: atari, game: breakout}
trainer:
  algorithm: impala
  recurrent_units: 16
  hidden_units: 16
  total_steps: 800
  actors: 6
  unroll_length: 10
  batch_size: 4
  micro_batches: [2, 2]
  schedule: {mode: recorded, policy_lag: 3}
evaluation:
  interval: 800
  starts: 2
  candidates: 6
  shortlist: 4
  min_actions: 4
  max_actions: 12
  max_minutes: 0.05
recording: {trace_interval: 40, tensor_interval: 200, checkpoint_interval: 200}
limits: {memory_mb: 4096, minutes: 20}
"""


@pytest.fixture(scope="module")
def resumed(workplace, tmp_path_factory):
    """The run that was killed once; until then two processes shared each gradient."""
    (workplace / "impala.yaml").write_text(SPEC)
    output = tmp_path_factory.mktemp("impala")
    process, directory = start(workplace, output, "--learners", "2", spec="impala.yaml")
    wait_for(lambda: traced(directory, 8), process)
    for container in containers(directory):
        docker("kill", "--signal", "KILL", container)
    process.communicate()
    claim_id = resume(workplace, directory)
    (bundle,) = directory.glob("*.capsule.tar")
    return Run(bundle, directory, claim_id, workplace / "alice", workplace / "impala.yaml")


def put(files, log):
    """Replace the schedule of a bundle, and what is claimed of it."""
    files[run_bundle.SCHEDULE] = log.document()
    edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(schedule=log.digest()))


def test_an_asynchronous_run_is_resumed_and_its_schedule_replayed_bit_for_bit(resumed, tmp_path):
    with one_processor():
        done = resumed.verify(resumed.bundle, "--engine", "bwrap", cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (0, "reproduced-bitwise")
    assert done.document["claim_id"] == resumed.claim_id


def test_another_schedule_gives_another_run_and_its_first_difference_is_named(resumed, tmp_path):
    def reorder(files):
        log = parse_schedule(files[run_bundle.SCHEDULE])
        swapped = array("H", [*log.played[1::-1], *log.played[2:]])
        put(files, replace(log, played=swapped))

    lie = forge(resumed, reorder, tmp_path / "lie.capsule.tar")
    with one_processor():
        done = resumed.verify(lie, "--mode", "prefix:80", "--engine", "bwrap", cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (1, "not-reproduced")
    first = done.document["first_difference"]
    assert (first["step"], first["component"]) == (40, "schedule")
    assert "observations" in first["also"]


def test_a_schedule_of_another_run_contradicts_the_bundle(resumed, tmp_path):
    def shorten(files):
        log = parse_schedule(files[run_bundle.SCHEDULE])
        put(files, replace(log, played=log.played[:-4], lags=log.lags[:-4]))

    done = resumed.verify(forge(resumed, shorten, tmp_path / "lie.capsule.tar"), cwd=tmp_path)
    assert done.status == 3
    assert done.document["error"]["code"] == "CAP-V010"
    assert run_bundle.SCHEDULE in done.document["error"]["message"]


def test_scores_are_those_of_the_last_evaluation_beside_a_humans(resumed):
    document = capsule(
        "scores", resumed.bundle, "--key", resumed.public, "--json", cwd=resumed.directory
    ).document
    with open_bundle(resumed.bundle, []) as bundle:
        claims = bundle.read(run_bundle.CLAIMS, TrainingClaims)
    returns = [float.fromhex(score) for score in claims.evaluation.points[-1].returns]
    score = sum(returns) / len(returns)
    (run,), (game,) = document["runs"], document["games"]
    assert run["claim_id"] == claims.claim_id()
    assert (run["final"]["mean"], game["final"]["mean"]) == (score, score)
    assert game["name"] == "breakout"
    normalized = (score - 1.7) / (30.5 - 1.7)
    assert game["final"]["human_normalized"] == pytest.approx(normalized)
    assert document["human_normalized"]["final"]["median"] == pytest.approx(normalized)


def test_learners_are_for_those_who_can_share(workplace):
    done = capsule("run", "micro.yaml", "--key", "alice", "--learners", "2", cwd=workplace)
    assert done.status == 2
    assert "CAP-S009" in done.errors
