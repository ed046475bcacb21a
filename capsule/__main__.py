"""``python -m capsule``, and the program ``capsule``."""

import sys

_INTERRUPTED = 130  # as ExitCode.INTERRUPTED, which is not imported yet


def main() -> None:
    """Import the command line and run it; an interruption before a command is no traceback."""
    try:
        from capsule.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
