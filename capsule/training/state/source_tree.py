"""Modules of the user's source tree (``code``), which a run may import."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from capsule.experiment import contract


def project_folder() -> Path:
    """Return where the source tree is: an image holds it at one place, an engine may elsewhere."""
    return Path(os.environ.get(contract.PROJECT_VARIABLE, contract.PROJECT_FOLDER))


def import_module(name: str) -> ModuleType:
    """Import a module of a package, or else of the source tree, if the run has one.

    Raises:
        ImportError: There is none of that name, or it cannot be executed.
    """
    folder = project_folder()
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))  # after the packages, none of which a module of it replaces
    return importlib.import_module(name)
