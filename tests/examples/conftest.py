"""Makes the scripts of the supervised example and the benchmarks importable, after all else."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "examples" / "supervised"), str(ROOT / "benchmarks")]
