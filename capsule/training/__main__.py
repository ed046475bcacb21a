"""``python -m capsule.training RUN_DIRECTORY``: execute the job of a run directory."""

from __future__ import annotations

import sys
from pathlib import Path

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.training.instruments.hooks import watched
from capsule.training.lifecycle import run
from capsule.training.state.run_directory import Interrupted


def main(arguments: list[str]) -> int:
    """Execute the job of the directory named by the only argument; return the exit status."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        sys.stderr.write("usage: python -m capsule.training RUN_DIRECTORY\n")
        return ExitCode.USAGE
    directory = Path(arguments[0])
    try:
        with watched(directory):
            run(directory)
    except Interrupted:
        return ExitCode.INTERRUPTED
    except CapsuleError as error:
        sys.stderr.write(f"{error}\n{error.fix}\n")
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
