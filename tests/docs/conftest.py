"""Makes the benchmarks importable, after all else: the pages state their defaults."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
