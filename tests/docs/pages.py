"""Pages of the documentation, followed as a reader does: files are saved, and commands are run."""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"(?:as|Save this\nas) `([\w.]+)`")
ANYTHING = "…"


def follow(page, folder):
    """Save the files of a page in a folder, run its commands there, and compare their output.

    A block is a file if the text before it says "save this as".
    """
    text, end = (DOCS / page).read_text(), 0
    for block in FENCED.finditer(text):
        before, end = text[end : block.start()], block.end()
        if block[1] == "console":
            for command, shown in commands(block[2]):
                done = run(command, folder)
                assert matches(shown, done.stdout), f"{command}\n{done.stdout}"
                # A command may fail on purpose, but then its output is shown.
                compared = any(line != ANYTHING for line in shown.splitlines())
                assert compared or done.returncode == 0, f"{command}\n{done.stdout}"
        elif names := SAVED.findall(before):
            (folder / names[-1]).write_text(block[2])


def run(command, folder):
    """Run a command of a shell in a folder, with a configuration folder of its own."""
    configuration = str(folder / "configuration")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", command.replace("~/.config/capsule", configuration)],
        cwd=folder,
        env={**os.environ, "PATH": path, "CAPSULE_CONFIG": configuration, "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def commands(block):
    """Yield the commands of a console block, each with the output that is shown."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def matches(shown, printed):
    """Tell whether an output has the lines that are shown, in their order, with others between."""
    lines = iter(line.rstrip() for line in printed.splitlines())
    for wanted in shown.splitlines():
        if wanted == ANYTHING:
            continue
        pattern = ".*".join(map(re.escape, wanted.split(ANYTHING)))
        if not any(re.fullmatch(pattern, line) for line in lines):
            return False
    return True
