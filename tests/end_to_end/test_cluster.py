"""IMPALA on a cluster of containers: the bits of a run without one, whatever is lost meanwhile."""

import json
import subprocess
import sys

import pytest

from tests.conftest import one_processor
from tests.end_to_end.conftest import run
from tests.end_to_end.test_run import containers, docker, traced, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.network]

SPEC = """\
schema: capsule/spec/v1
name: cluster
image:
  packages:
    - torch==2.13.0
    - numpy==2.4.6
    - gymnasium==1.4.0
    - ale-py==0.12.1
    - safetensors==0.8.0
    - ray==2.60.0
  debian: [bash]
seeds: {root: 1}
environment: {suite: gymnasium, id: CartPole-v1}
trainer:
  algorithm: impala
  network: mlp
  hidden_units: 16
  recurrent_units: 8
  total_steps: 2_400
  actors: 8
  batch_size: 4
  unroll_length: 10
  micro_batches: [2, 2]
evaluation:
  interval: 2_400
  starts: 2
  candidates: 6
  shortlist: 4
  min_actions: 0
  max_actions: 5
  max_minutes: 0.05
recording: {trace_interval: 40, tensor_interval: 400, checkpoint_interval: 1_200}
limits: {memory_mb: 4096, processes: 4096, minutes: 20}
"""
SECONDS = 1_000  # three containers with Ray on two busy cores


@pytest.fixture(scope="module")
def alone(workplace):
    """A run of the spec without a cluster, and without a container."""
    (workplace / "cluster.yaml").write_text(SPEC)
    with one_processor():
        return run(workplace, "--engine", "bwrap", spec="cluster.yaml")


def test_containers_give_the_bits_of_one_and_may_be_lost(alone, workplace, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "capsule", "run", "cluster.yaml", "--key", "alice", "--quiet",
         "--json", "--output", tmp_path, "--cluster", "docker:2"],
        cwd=workplace,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    directory = wait_for(lambda: next(iter(tmp_path.glob("cluster-*")), None), process, SECONDS)
    wait_for(lambda: traced(directory, 10), process, SECONDS)
    names = {hostname(container): container for container in containers(directory)}
    assert sorted(names) == ["capsule", "worker-1", "worker-2"]
    docker("kill", "--signal", "KILL", names["worker-1"])
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert json.loads(output)["claim_id"] == alone.claim_id
    assert containers(directory) == []
    assert docker("network", "ls", "--quiet", "--filter", "name=capsule-").stdout == ""


def hostname(container):
    return docker("inspect", "--format", "{{.Config.Hostname}}", container).stdout.strip()
