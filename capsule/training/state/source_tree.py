"""Modules of the user's source tree (``code``), which a run may import."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from capsule.experiment import contract


def import_module(name: str) -> ModuleType:
    """Import a module of a package, or else of the source tree, if the run has one.

    Raises:
        ImportError: There is none of that name, or it cannot be executed.
    """
    folder = os.environ.get(contract.PROJECT_VARIABLE, contract.PROJECT_FOLDER)
    if Path(folder).is_dir() and folder not in sys.path:
        sys.path.append(folder)  # after the packages, none of which a module of it replaces
    return importlib.import_module(name)
