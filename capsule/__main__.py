"""``python -m capsule``, and the program ``capsule``."""

import atexit
import gc
import sys

_INTERRUPTED = 130  # as ExitCode.INTERRUPTED, which is not imported yet
_NEW_OBJECTS = 10_000  # between two collections of garbage; Python's default is 700


def main() -> None:
    """Import the command line and run it; an interruption before a command is no traceback.

    Most objects of a command are those of modules, which last until its end. To look for garbage
    among them would take a fifth of the time of a short command.
    """
    gc.set_threshold(_NEW_OBJECTS)
    atexit.register(gc.freeze)  # the last collection has nothing to visit then
    try:
        from capsule.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
