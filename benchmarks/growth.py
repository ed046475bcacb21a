"""The growth of costs with the length of a run, the number of actors, and the replay memory.

    python benchmarks/growth.py [--only length|actors|replay] [--folder FOLDER]

``length``: the trace of the Breakout study has a record every 3,200 steps, and a segment has
800,000 steps. CartPole is played with intervals that are twenty times shorter, up to the number of
records and segments that 100 million frames have. For each length, the table has the processor time
of the run, of an integrity check and of a challenge, and the size of the bundle.

``actors``: memory of IMPALA's processes on Breakout (the largest sum of proportional set sizes).

``replay``: resident memory of the replay memories of DQN and R2D2 with frames of Atari.

An exponent of 1 means that a column grows in proportion to the first column.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from capsule.training.dqn.replay import ReplayMemory  # noqa: E402
from capsule.training.r2d2.cutting import SequenceLayout  # noqa: E402
from capsule.training.r2d2.replay import Frames, SequenceReplay  # noqa: E402

STEPS = [78_080, 156_160, 312_320, 624_640, 1_249_280]  # the last: 7,808 records
RECORD, SEGMENT = 160, 39_040
FRAMES_A_STEP = 4
SHORTER = 20  # factor by which the intervals are shorter than those of the Breakout study
ACTORS = [16, 32, 64, 128, 256]
TRANSITIONS = [12_500, 25_000, 50_000, 100_000]
POLL_SECONDS = 0.1
MEGABYTE = 1e6


def capsule(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "capsule", *map(str, arguments)]


def make_key(folder: Path) -> Path:
    key = folder / "key"
    processor_seconds(capsule("keygen", key))
    return key


def processor_seconds(command: Sequence[str]) -> float:
    """Run a program to its end; return its processor time and that of its children, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def lengths(folder: Path) -> Iterator[tuple[float, ...]]:
    """Yield millions of frames; seconds of run, check and challenge; megabytes of the bundle."""
    key = make_key(folder)
    for steps in STEPS:
        made = folder / str(steps)
        settings = {
            "trainer.total_steps": steps,
            "evaluation.interval": SEGMENT,
            "recording.trace_interval": RECORD,
            "recording.tensor_interval": SEGMENT,
            "recording.checkpoint_interval": SEGMENT,
            "recording.segment_states": "true",
        }
        chosen = itertools.chain(*(("--set", f"{k}={v}") for k, v in settings.items()))
        spec = ROOT / "specs" / "impala-cartpole.yaml"
        run = capsule(
            "run", spec, *chosen, "--engine", "process", "--key", key, "--quiet", "-o", made
        )
        ran = processor_seconds(run)
        (bundle,) = made.rglob("*.capsule.tar")
        verify = ["verify", bundle, "--key", f"{key}.pub", "--quiet", "--report", os.devnull]
        checked = processor_seconds(capsule(*verify, "--mode", "integrity"))
        challenge = [*verify, "--challenge", 1, "--engine", "process"]
        challenged = processor_seconds(capsule(*challenge))
        frames = steps * SHORTER * FRAMES_A_STEP / 1e6
        yield frames, ran, checked, challenged, bundle.stat().st_size / MEGABYTE


def with_actors(folder: Path) -> Iterator[tuple[float, ...]]:
    """Yield numbers of actors, and the megabytes of all processes of a run."""
    key = make_key(folder)
    for actors in ACTORS:
        spec = ROOT / "specs" / "impala-breakout-small.yaml"
        settings = [
            f"trainer.actors={actors}",
            f"trainer.total_steps={actors * 20 * 8}",
            f"trainer.schedule.policy_lag={max(4, actors // 8)}",  # less cannot be kept
        ]
        chosen = itertools.chain(*(("--set", text) for text in settings))
        where = ["--engine", "process", "--key", key, "--quiet", "-o", folder / f"{actors}"]
        yield actors, most_memory(capsule("run", spec, *chosen, *where))


def most_memory(command: Sequence[str]) -> float:
    """Run a program to its end; return the peak memory of it and its descendants, in megabytes."""
    most = 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, sum(map(proportional_set_size, descendants(process.pid))))
            time.sleep(POLL_SECONDS)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with status {process.returncode}")
    return most


def descendants(process: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    children = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended
            # The name may contain spaces and parentheses; fields are counted from the last one.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children[int(fields[1])].append(int(folder.name))
    waiting = [process]
    while waiting:
        yield (found := waiting.pop())
        waiting += children[found]


def proportional_set_size(process: int) -> float:
    """Return the memory of a process in megabytes; shared pages are divided among the processes."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / MEGABYTE


def replays(_: Path) -> Iterator[tuple[float, ...]]:
    """Yield numbers of transitions, and the megabytes of DQN's and of R2D2's replay memory."""
    for transitions in TRANSITIONS:
        yield transitions, *(grown(fill, transitions) for fill in (fill_dqn, fill_r2d2))


def grown(fill: Callable[[int], object], transitions: int) -> float:
    """Return the megabytes by which the memory of this process grows."""
    before = resident()
    kept = fill(transitions)
    after = resident()
    del kept
    return after - before


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MEGABYTE


def fill_dqn(transitions: int) -> ReplayMemory:
    replay = ReplayMemory(
        None,
        capacity=transitions,
        slack=0,
        frame_shape=(84, 84),
        frame_dtype=np.uint8,
        frame_stack=4,
    )
    frame = np.ones((84, 84), np.uint8)
    for _ in range(transitions):
        replay.append(frame, 0, 0.0, False)
    return replay


def fill_r2d2(transitions: int) -> SequenceReplay:
    # Lengths and state of Kapturowski et al. 2019, table 2, and an LSTM with 512 units.
    replay = SequenceReplay(
        None,
        layout=SequenceLayout(burn_in=40, trained=80, period=40),
        actors=1,
        capacity=transitions,
        slack=0,
        frames=Frames((84, 84), np.dtype(np.uint8), 4),
        state_shape=(2, 512),
        priority_exponent=0.9,
    )
    frame, state = np.ones((84, 84), np.uint8), np.ones((2, 512), np.float32)
    for _ in range(transitions):
        replay.append(0, frame, 0, 0.0, False, ended=False, state=state)
    return replay


def exponents(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return, for each column but the first, its exponent between the last two rows."""
    (x0, *before), (x1, *after) = rows[-2:]
    scale = math.log(x1 / x0)
    return [math.log(b / a) / scale for a, b in zip(before, after, strict=True)]


def readable(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


MEASURES: dict[str, tuple[Callable[[Path], Iterator[tuple[float, ...]]], tuple[str, ...]]] = {
    "length": (
        lengths,
        ("frames, millions", "run, s", "integrity check, s", "challenge of 1, s", "bundle, MB"),
    ),
    "actors": (with_actors, ("actors", "memory, MB")),
    "replay": (replays, ("transitions", "DQN, MB", "R2D2, MB")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=MEASURES)
    parser.add_argument("--folder", type=Path, help="folder for temporary runs")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    for name in [options.only] if options.only else MEASURES:
        measure, columns = MEASURES[name]
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
        rows = []
        with TemporaryDirectory(dir=options.folder) as scratch:
            for row in measure(Path(scratch)):
                rows.append(row)
                print(f"| {' | '.join(map(readable, row))} |", flush=True)
        powers = " | ".join(f"{value:.2f}" for value in exponents(rows))
        print(f"| *exponent, last two rows* | {powers} |\n")


if __name__ == "__main__":
    main()
