# ruff: noqa: INP001
"""Make the corpus of small bundles in tests/corpus, which every later version must read.

A release makes the corpus once, and tests/corpus/test_corpus.py tests later versions with it. Until
the first release, make it again after every change of the training code. This takes about two
minutes of processor time, divided among the processors, and needs Python 3.11 and the package
indexes, but no container engine: a bundle without an image has 100 kB, while a bundle with an image
contains its base layer, which is too large for git. The bundle with an embedded image is made by
the test that verifies it.

usage: python scripts/corpus.py [NAME...]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from capsule.bundle.keys import PrivateKey

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "corpus"
LARGEST = 5_000_000  # bytes, of all files together

CARTPOLE: dict[str, Any] = {
    "schema": "capsule/spec/v1",
    "environment": {"suite": "gymnasium", "id": "CartPole-v1", "max_episode_steps": 60},
    "evaluation": {
        "interval": 400,
        "starts": 2,
        "candidates": 4,
        "shortlist": 3,
        "min_actions": 0,
        "max_actions": 5,
        "max_minutes": 0.01,
    },
    "recording": {"trace_interval": 40, "tensor_interval": 200, "checkpoint_interval": 200},
    "limits": {"memory_mb": 4096, "minutes": 10},
}
DQN = {
    "algorithm": "dqn",
    "network": "mlp",
    "hidden_units": 16,
    "total_steps": 400,
    "replay_capacity": 400,
    "replay_start": 200,
    "target_interval": 40,
    "exploration_steps": 100,
}
R2D2 = {
    "algorithm": "r2d2",
    "network": "mlp",
    "recurrent_units": 8,
    "hidden_units": 8,
    "actors": 4,
    "update_interval": 5,
    "actor_update_interval": 10,
    "burn_in": 4,
    "sequence_length": 8,
    "sequence_stride": 4,
    "replay_capacity": 400,
    "replay_start": 200,
    "batch_size": 4,
    "micro_batches": [2, 2],
    "target_interval": 7,
    "total_steps": 400,
}
IMPALA = {
    "algorithm": "impala",
    "network": "mlp",
    "recurrent_units": 8,
    "hidden_units": 8,
    "total_steps": 400,
    "actors": 4,
    "unroll_length": 10,
    "batch_size": 4,
    "micro_batches": [2, 2],
}
RECORDED = {**IMPALA, "schedule": {"mode": "recorded", "policy_lag": 3}}
PROGRAM: dict[str, Any] = {
    "schema": "capsule/spec/v1",
    "code": {"path": "tree"},
    "image": {"packages": []},
    "trainer": {"command": ["python", "train.py"]},
    "limits": {"memory_mb": 1024, "minutes": 5},
}
TREE = """\
import json
import random
from pathlib import Path

Path("scores.json").write_text(json.dumps([random.random() for _ in range(5)]))
print("trained")
"""
SPECS: dict[str, dict[str, Any]] = {
    "dqn": {
        **CARTPOLE,
        "trainer": DQN,
        "recording": {**CARTPOLE["recording"], "segment_states": True},
    },
    "r2d2": {**CARTPOLE, "trainer": R2D2},
    "impala": {**CARTPOLE, "trainer": IMPALA},
    "impala-recorded": {**CARTPOLE, "trainer": RECORDED},
    "program": PROGRAM,
    "program-recorded": {**PROGRAM, "entropy": {"mode": "recorded"}},
}
STUDIES: dict[str, dict[str, Any]] = {
    "study": {
        "base": "dqn",
        "runs": 2,
        "groups": {"deterministic": {}, "exploration": {"vary": ["exploration"]}},
    },
    "study-program": {
        "base": "program",
        "runs": 2,
        "groups": {"seeds": {"vary": ["root"]}},
        "scores": {"last": "scores.json#/4", "all": "scores.json#"},
    },
}
VERIFIED = ("dqn", "program")  # with a receipt beside them
AUTHOR, VERIFIER = "author", "verifier"


def make_keys(folder: Path) -> None:
    """Write the two test keys, which are the same in every corpus and protect nothing."""
    for number, name in enumerate((AUTHOR, VERIFIER), 1):
        key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
        private = folder / name
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        private.chmod(0o600)
        private.with_suffix(".pub").write_text(PrivateKey(key).public.openssh())


def write_spec(name: str, spec: Mapping[str, Any], folder: Path) -> None:
    """Write a spec, ``NAME.yaml``, and the program that some of them run."""
    (folder / "tree").mkdir(exist_ok=True)
    (folder / "tree" / "train.py").write_text(TREE)
    (folder / f"{name}.yaml").write_text(json.dumps({**spec, "name": name}))


def make(name: str, spec: Mapping[str, Any], folder: Path, *options: str) -> Path:
    """Run a spec and return its bundle, ``NAME.capsule.tar`` in a folder that has the keys."""
    write_spec(name, spec, folder)
    facts = json.loads(
        _capsule(folder, "run", f"{name}.yaml", "--key", AUTHOR, "--json", "--quiet", *options)
    )
    return Path(folder, facts["bundle"]).rename(folder / f"{name}.capsule.tar")


def make_study(name: str, study: Mapping[str, Any], folder: Path) -> Path:
    """Run a study; return its bundle, ``NAME.capsule-study.tar``, with ``NAME.members`` beside."""
    base = f"{study['base']}.yaml"
    (folder / f"{name}.yaml").write_text(
        json.dumps({"schema": "capsule/study/v1", **study, "name": name, "base": base})
    )
    _capsule(
        *(folder, "study", "run", f"{name}.yaml", "--key", AUTHOR, "--engine", "process"),
        *("--on", "local:1", "--quiet"),
    )
    facts = json.loads(
        _capsule(folder, "study", "bundle", f"studies/{name}", "--key", AUTHOR, "--json")
    )
    kept = folder / f"{name}.members"
    kept.mkdir()
    for path in sorted((folder / "studies" / name / "members").glob("*/*.capsule.tar")):
        shutil.copyfile(path, kept / f"{path.parent.name}.capsule.tar")
    return Path(folder, facts["bundle"]).rename(folder / f"{name}.capsule-study.tar")


def vouch(bundle: Path, folder: Path) -> Path:
    """Verify a bundle with the key of another person, and return the receipt."""
    receipt = bundle.with_name(f"{bundle.name}.{VERIFIER}.receipt.json")
    options = ("--engine", "process", "--sign", VERIFIER, "--receipt", receipt.name)
    _capsule(folder, "verify", bundle.name, "--key", f"{AUTHOR}.pub", "--quiet", *options)
    return receipt


def _capsule(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "capsule", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # this checkout, whatever is installed
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return done.stdout


def make_entry(name: str, folder: Path) -> list[Path]:
    """Make the files of one bundle or study, in a new folder.

    Returns:
        The files that the corpus keeps.
    """
    folder.mkdir()
    make_keys(folder)
    if name in STUDIES:
        base = STUDIES[name]["base"]
        write_spec(base, SPECS[base], folder)
        kept = [make_study(name, STUDIES[name], folder)]
        kept += sorted((folder / f"{name}.members").iterdir())
    else:
        kept = [make(name, SPECS[name], folder, "--engine", "process")]
    if name in VERIFIED:
        kept.append(vouch(kept[0], folder))
    sys.stdout.write(f"made {name}\n")
    return kept


def main(names: Iterable[str]) -> None:
    """Make bundles and receipts, one per processor at a time, and store them in the corpus."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        folders = {name: Path(scratch, name) for name in names}
        made = pool.map(make_entry, folders, folders.values())
        for folder, kept in zip(folders.values(), made, strict=True):
            keys = [folder / f"{key}.pub" for key in (AUTHOR, VERIFIER)]
            for path in (*keys, *kept):
                target = FOLDER / path.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    sys.stdout.write(f"{FOLDER}: {size} bytes, at most {LARGEST}\n")


if __name__ == "__main__":
    # The ones that take longest begin first.
    main(sys.argv[1:] or [*STUDIES, *SPECS])
