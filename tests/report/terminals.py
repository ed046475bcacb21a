"""Reading what is printed on a terminal."""

import io

from rich.console import Console


def printed(show, *arguments, width):
    """Return what a function prints on a console, which it takes last."""
    stream = io.StringIO()
    show(*arguments, Console(file=stream, width=width))
    return stream.getvalue()
