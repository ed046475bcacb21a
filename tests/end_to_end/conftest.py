"""Real runs in a real container engine, shared by the tests of this folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.command_server import start_command
from tests.hostile.genuine import forged

ROOT = Path(__file__).parents[2]

# Real Breakout, a few hundred steps: 50 updates, two checkpoints, one target copy. The last layer
# and the batches are small, since the tests execute this spec some thirty times.
MICRO = """\
schema: capsule/spec/v1
name: micro
seeds: {root: 1}
environment: {suite: atari, game: breakout}
trainer:
  algorithm: dqn
  hidden_units: 16
  batch_size: 8
  micro_batches: [5, 3]
  total_steps: 400
  replay_capacity: 400
  replay_start: 200
  target_interval: 200
  exploration_initial: 0.4
  exploration_steps: 100
evaluation:
  interval: 200
  starts: 2
  candidates: 6
  shortlist: 4
  min_actions: 4
  max_actions: 12
  max_minutes: 0.05
recording:
  {trace_interval: 4, tensor_interval: 100, checkpoint_interval: 200, segment_states: true}
limits: {memory_mb: 4096, minutes: 20}
"""


@dataclass(frozen=True)
class Done:
    """What a command left."""

    status: int
    output: str
    errors: str

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.output)


def capsule(*arguments: object, cwd: Path) -> Done:
    done = start_command(*arguments, cwd=cwd)
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Run:
    """A finished run."""

    bundle: Path
    directory: Path
    claim_id: str
    key: Path
    spec: Path

    @property
    def public(self) -> Path:
        return Path(f"{self.key}.pub")

    def verify(self, bundle: Path, *arguments: object, cwd: Path) -> Done:
        return capsule(
            "verify", bundle, "--key", self.public, "--json", "--quiet", *arguments, cwd=cwd
        )


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("end-to-end")
    (folder / "micro.yaml").write_text(MICRO)
    assert capsule("keygen", "alice", cwd=folder).status == 0
    assert capsule("keygen", "mallory", cwd=folder).status == 0
    return folder


def run(workplace: Path, *arguments: object, spec: str = "micro.yaml") -> Run:
    return finished(workplace, spec, *arguments, spec=workplace / spec)


def finished(workplace: Path, *arguments: object, spec: Path) -> Run:
    key = workplace / "alice"
    done = capsule("run", *arguments, "--key", key, "--json", cwd=workplace)
    assert done.status == 0, done.errors
    facts = done.document
    return Run(
        bundle=workplace / facts["bundle"],
        directory=workplace / facts["run_directory"],
        claim_id=facts["claim_id"],
        key=key,
        spec=spec,
    )


@pytest.fixture(scope="session")
def micro(workplace: Path) -> Run:
    return run(workplace)


@pytest.fixture(scope="session")
def again(workplace: Path, micro: Run) -> Run:
    """The same run, packed again: Bob signs it as well, with its image in the bundle."""
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", workplace / "bob"]
    subprocess.run(make, check=True)
    directory = workplace / "again"
    shutil.copytree(micro.directory, directory, ignore=shutil.ignore_patterns(micro.bundle.name))
    options = ("--resume", directory, "--ssh-key", workplace / "bob", "--embed-image")
    return finished(workplace, *options, spec=micro.spec)


Change = Callable[[dict[str, bytes]], None]


def forge(original: Run, change: Change, destination: Path, *, key: Path | None = None) -> Path:
    """Repack a bundle with changed files, signed by ``key``: a lie with a valid signature."""
    return forged(original.bundle, original.public, key or original.key, change, destination)
