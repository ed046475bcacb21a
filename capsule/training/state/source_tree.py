"""Modules of the user's source tree (``code``), which a run may import."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from capsule.experiment import contract


def project_folder() -> Path:
    """Return the folder of the source tree: that of the image, unless the engine names another."""
    return Path(os.environ.get(contract.PROJECT_VARIABLE, contract.PROJECT_FOLDER))


def import_module(name: str) -> ModuleType:
    """Import a module of an installed package or, if there is none of its name, of the source tree.

    Raises:
        ImportError: There is no such module, or it cannot be imported.
    """
    folder = project_folder()
    if folder.is_dir() and str(folder) not in sys.path:
        # Appended, so that a module of the source tree does not replace one of a package.
        sys.path.append(str(folder))
    return importlib.import_module(name)
