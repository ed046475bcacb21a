"""The cost of an integrity check: ``capsule verify --mode integrity`` compared with ``sha256sum``.

There are two bundles of a gigabyte: one is mostly a checkpoint, whose tensors are digested as well,
and one is mostly an image. Both programs run as whole processes, in turns, on the same file in the
page cache.

    python benchmarks/verify_cost.py [--rounds 7] [--megabytes 1000] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hostile import genuine  # noqa: E402

from capsule.bundle import run_bundle  # noqa: E402
from capsule.bundle.bundle import Content, pack  # noqa: E402
from capsule.experiment import contract  # noqa: E402
from capsule.experiment.canonical import sha256_hex  # noqa: E402
from capsule.verification.integrity.tensors import tensor_digests  # noqa: E402

TENSORS = 20
MEGABYTE = 1_000_000


def write_noise(path: Path, header: bytes, megabytes: int) -> None:
    with path.open("wb") as stream:
        stream.write(header)
        for _ in range(megabytes):
            stream.write(os.urandom(MEGABYTE))


def with_checkpoint(folder: Path, megabytes: int) -> dict[str, Content]:
    """Return a run whose final checkpoint has a given size in megabytes."""
    size = megabytes // TENSORS * MEGABYTE
    header = {
        f"layer.{number}": {
            "dtype": "F32",
            "shape": [size // 4],
            "data_offsets": [number * size, (number + 1) * size],
        }
        for number in range(TENSORS)
    }
    packed = json.dumps(header).encode()
    path = folder / "final.safetensors"
    write_noise(path, len(packed).to_bytes(8, "little") + packed, TENSORS * size // MEGABYTE)
    files = dict(genuine.training().files)
    tensors = tensor_digests(path)
    genuine.edit_json(
        files, genuine.INDEX, lambda index: index["checkpoints"][0].update(tensors=tensors)
    )
    index = contract.CheckpointIndex.model_validate_json(files[genuine.INDEX])
    claim = [{"step": 8, "digest": index.checkpoints[0].digest()}]
    genuine.edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(checkpoints=claim))
    return contents(files, {genuine.FINAL: path})


def with_image(folder: Path, megabytes: int) -> dict[str, Content]:
    """Return a run that contains an image of a given size in megabytes."""
    path = folder / "image.tar.zst"
    write_noise(path, b"", megabytes)
    return contents(dict(genuine.training().files), {run_bundle.IMAGE_ARCHIVE: path})


def contents(files: genuine.Files, large: dict[str, Path]) -> dict[str, Content]:
    placed = {**files, **dict.fromkeys(large, b"")}
    kinds = genuine.rederive(placed, genuine.training().files)
    sources: dict[str, Path | bytes] = {**placed, **large}
    return {name: Content(source, *kinds[name]) for name, source in sources.items()}


class Cost(NamedTuple):
    """The cost of one process.

    Attributes:
        seconds: Wall-clock time from its start to its end, in seconds.
        processor: Processor time in seconds, which depends little on other work on the machine.
        memory: Peak memory in megabytes.
    """

    seconds: float
    processor: float
    memory: float


def run(command: Sequence[str]) -> Cost:
    """Run a program to its end."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command[0]} ended with status {process.returncode}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / MEGABYTE)


def measure(name: str, bundle: Path, key: Path, rounds: int) -> None:
    verify = [sys.executable, "-m", "capsule", "verify", str(bundle), "--key", str(key)]
    verify += ["--mode", "integrity", "--quiet", "--report", os.devnull]
    commands = {"sha256sum": ["sha256sum", str(bundle)], "capsule": verify}
    run(commands["sha256sum"])  # into the page cache
    turns = [{who: run(command) for who, command in commands.items()} for _ in range(rounds)]
    ours, theirs = ([turn[who] for turn in turns] for who in ("capsule", "sha256sum"))
    ratios = [
        min(cost.seconds for cost in ours) / min(cost.seconds for cost in theirs),
        statistics.median(a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True)),
        statistics.median(a.processor / b.processor for a, b in zip(ours, theirs, strict=True)),
    ]
    print(
        f"| {name} | {min(theirs).seconds:.2f} s | {min(ours).seconds:.2f} s | "
        + " | ".join(f"{ratio:.2f}" for ratio in ratios)
        + f" | {max(cost.memory for cost in ours):.0f} MB |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="folder for the temporary bundles")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    print(
        "| mostly | sha256sum | capsule verify | ratio of the best | median ratio "
        "| of processor times | memory |"
    )
    print("|---|---|---|---|---|---|---|")
    variants: dict[str, Callable[[Path, int], dict[str, Content]]] = {
        "checkpoint": with_checkpoint,
        "image": with_image,
    }
    for name, make in variants.items():
        with TemporaryDirectory(dir=options.folder) as scratch:
            folder = Path(scratch)
            key = folder / "signer.pub"
            key.write_text(genuine.SIGNER.public.openssh())
            files = make(folder, options.megabytes)
            claims = files[run_bundle.CLAIMS].source
            if not isinstance(claims, bytes):
                sys.exit("the claims are not in memory")
            bundle = pack(files, sha256_hex(claims), genuine.SIGNER, folder / "b.capsule.tar")
            measure(name, bundle, key, options.rounds)


if __name__ == "__main__":
    main()
