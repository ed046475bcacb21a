"""The cost of random profiles: DQN under the launcher in each mode, and without the launcher.

Training speed is compared in short segments that take turns (``turns.py``), and start-up with whole
processes that import torch and end. Ratios are medians over the rounds::

    python benchmarks/entropy.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dqn import Contender, spec_of, start_contender
from turns import end, median_ratio, segment, take_turns

from capsule.entropy.launch import REPLAYED, launch_arguments
from capsule.entropy.profile import merge
from capsule.experiment.spec import EntropySpec, Spec
from capsule.experiment.variables import environment_variables
from capsule.native import FOLDER, native_part

PLAIN = "without the launcher"
MODES = ("virtual", "record", "replay")


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of random profiles.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--segment", type=int, default=200, help="agent steps per segment")
    parser.set_defaults(task="breakout", shards="20,12", baseline=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="capsule-benchmark-") as scratch:
        compare_training(options, Path(scratch))
        compare_start_up(options, Path(scratch))


def compare_training(options: argparse.Namespace, scratch: Path) -> None:
    contender = Contender("capsule", "capsule")
    spec = spec_of(contender, options)
    # A replay needs a profile of this program. It draws randomness only while it warms up.
    recorded = scratch / "training-recorded"
    process = start_contender(contender, options, launcher(spec, "record", recorded, None))
    segment(process)
    end(process)
    profile = scratch / "training.profile"
    profile.write_bytes(merge(recorded))
    commands: dict[str, list[str]] = {PLAIN: []} | {
        mode: launcher(spec, mode, scratch / f"training-{mode}", profile) for mode in MODES
    }
    processes = {
        name: start_contender(contender, options, words) for name, words in commands.items()
    }
    report("agent steps/s", take_turns(processes, options.rounds))


def compare_start_up(options: argparse.Namespace, scratch: Path) -> None:
    spec = spec_of(Contender("capsule", "capsule"), options)
    command = [sys.executable, "-c", "import torch; torch.seed()"]
    environment = {**os.environ, **environment_variables(spec)}
    environment["LD_PRELOAD"] = str(native_part("libcapsule-math.so"))

    def seconds(words: list[str]) -> float:
        started = time.perf_counter()
        subprocess.run([*words, *command], env=environment, check=True)
        return time.perf_counter() - started

    recorded = scratch / "start-up-recorded"
    seconds(launcher(spec, "record", recorded, None))
    profile = scratch / "start-up.profile"
    profile.write_bytes(merge(recorded))
    times: dict[str, list[float]] = {name: [] for name in (PLAIN, *MODES)}
    for number in range(options.rounds):
        times[PLAIN].append(seconds([]))
        for mode in MODES:
            folder = scratch / f"start-up-{mode}-{number}"
            times[mode].append(seconds(launcher(spec, mode, folder, profile)))
    report("seconds to import torch", times)


def launcher(spec: Spec, mode: str, folder: Path, profile: Path | None) -> list[str]:
    """Return the launcher's command line for a mode, with a new folder."""
    folder.mkdir()
    if mode == "replay":
        if profile is None:
            raise ValueError("a replay needs a profile")
        shutil.copy(profile, folder / REPLAYED)
    entropy = EntropySpec(mode="virtual" if mode == "virtual" else "recorded")
    return launch_arguments(
        spec.model_copy(update={"entropy": entropy}),
        native=str(FOLDER),
        directory=str(folder),
        replay=mode == "replay",
    )


def report(unit: str, values: dict[str, list[float]]) -> None:
    print(f"{unit:28} {'median':>9}   ratio to the same without the launcher")
    for name, found in values.items():
        ratio = median_ratio(found, values[PLAIN])
        print(f"{name:28} {statistics.median(found):9.3f}   {ratio:6.4f}")


if __name__ == "__main__":
    main()
