# ruff: noqa: INP001
"""Write .cache/compile_commands.json, the commands that compile the C sources, for clang-tidy.

Editors read this file, too. The headers are those of the ``ziglang`` wheel for each part's target.

usage: PYTHONPATH=. python scripts/compile_commands.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from hatch_build import COMMON, PARTS, ROOT, SOURCES


def compiler_flags(target: str) -> list[str]:
    """Return the flags by which clang finds the headers that the compiler has for a target.

    Raises:
        subprocess.CalledProcessError: The compiler failed.
    """
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-E", "-v", "-xc"]
    done = subprocess.run(
        [*command, os.devnull], capture_output=True, check=True, text=True, cwd=ROOT
    )
    listed = done.stderr.split("#include <...> search starts here:\n")[1]
    folders = listed.split("End of search list.")[0].split()
    flags = ["--target=x86_64-linux", "-nostdinc", *(f"-isystem{ROOT / each}" for each in folders)]
    glibc = re.search(r"gnu\.2\.(\d+)", target)
    return [*flags, f"-D__GLIBC_MINOR__={glibc[1]}"] if glibc else flags


def main() -> None:
    """Write the file."""
    commands = []
    for files, flags in PARTS.values():
        target = flags[flags.index("-target") + 1]
        compiling = [
            flag
            for flag in (*COMMON, *flags)
            if flag not in ("-target", target, "-s", "-static", "-shared")
            and not flag.startswith("-l")
        ]
        arguments = ["clang", *compiling, *compiler_flags(target), "-c"]
        commands += [
            {"directory": str(SOURCES), "file": file, "arguments": [*arguments, file]}
            for file in files
        ]
    output = ROOT / ".cache" / "compile_commands.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(commands, indent=1))


if __name__ == "__main__":
    main()
