"""A study of three members that run for some seconds each, with checkpoints in between."""

SPEC = """\
schema: capsule/spec/v1
name: cart
environment: {suite: gymnasium, id: CartPole-v1}
trainer:
  algorithm: dqn
  network: mlp
  hidden_units: 16
  total_steps: 4_096
  batch_size: 32
  replay_capacity: 10_000
  replay_start: 512
  exploration_steps: 1_000
evaluation:
  {interval: 4_096, starts: 2, candidates: 2, shortlist: 2, min_actions: 0, max_actions: 0}
recording: {trace_interval: 256, tensor_interval: 4_096, checkpoint_interval: 512}
limits: {memory_mb: 2_048, minutes: 10}
"""
STUDY = """\
schema: capsule/study/v1
name: cart
base: cart.yaml
runs: 3
groups: {exploration: {vary: [exploration]}}
"""


def write_study(folder):
    (folder / "cart.yaml").write_text(SPEC)
    (folder / "study.yaml").write_text(STUDY)
    return folder
