"""R2D2 in a container: run, killed and resumed, verified."""

import pytest

from tests.end_to_end.conftest import capsule
from tests.end_to_end.test_run import SECONDS, containers, docker, resume, start, traced, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.soak]

SPEC = """\
schema: capsule/spec/v1
name: r2d2
seeds: {root: 1}
environment: {suite: atari, game: breakout, terminal_on_life_loss: false, clip_rewards: false}
trainer:
  algorithm: r2d2
  recurrent_units: 16
  hidden_units: 16
  total_steps: 600
  actors: 4
  update_interval: 5
  actor_update_interval: 20
  burn_in: 4
  sequence_length: 8
  sequence_stride: 4
  replay_capacity: 600
  replay_start: 200
  batch_size: 4
  micro_batches: [2, 2]
  target_interval: 10
evaluation:
  interval: 600
  starts: 2
  candidates: 6
  shortlist: 4
  min_actions: 4
  max_actions: 12
  max_minutes: 0.05
recording: {trace_interval: 20, tensor_interval: 100, checkpoint_interval: 200}
limits: {memory_mb: 4096, minutes: 20}
"""


def test_a_run_is_resumed_and_reproduced_bit_for_bit(workplace, tmp_path):
    (workplace / "r2d2.yaml").write_text(SPEC)
    process, directory = start(workplace, tmp_path, spec="r2d2.yaml")
    wait_for(lambda: traced(directory, 15), process)
    for container in containers(directory):
        docker("kill", "--signal", "KILL", container)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode in {0, 6}, errors
    resume(workplace, directory)
    # Verification executes the whole run without an interruption.
    (bundle,) = directory.glob("*.capsule.tar")
    done = capsule("verify", bundle, "--key", workplace / "alice.pub", "--json", cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (0, "reproduced-bitwise"), done.errors
