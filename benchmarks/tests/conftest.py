"""Makes the benchmarks importable, after all else, and has the fixtures of the other tests."""

import sys
from pathlib import Path

from tests.conftest import busy, deterministic, one_thread

__all__ = ["busy", "deterministic", "one_thread"]

sys.path.append(str(Path(__file__).resolve().parents[1]))
