"""Makes the scripts of the supervised example importable, after all else."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples" / "supervised"))
