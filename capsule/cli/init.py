"""``capsule init``: write a first spec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from capsule.cli.common import guarded, print_json, shell_word
from capsule.cli.options import DEFAULT_SPEC, JsonOption, option

TEMPLATES = {
    "dqn": "dqn-breakout-small.yaml",
    "r2d2": "r2d2-breakout-small.yaml",
    "impala": "impala-breakout-small.yaml",
    "own-program": "own-program.yaml",
}


@guarded
def command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = DEFAULT_SPEC,
    *,
    template: Annotated[
        Literal["dqn", "r2d2", "impala", "own-program"],
        option(
            "--template NAME",
            "dqn, r2d2 or impala: a training on Breakout that is small enough for two CPU "
            "cores. own-program: your own program, in the same folder as the spec.",
        ),
    ] = "dqn",
    as_json: JsonOption = False,
) -> None:
    """Write an annotated spec as a starting point.

    Examples:
        # Write ./capsule.yaml, which trains DQN on Breakout.
        capsule init

        # Write a spec for your own program.
        capsule init experiment.yaml --template own-program
    """
    from capsule.host.errors import CapsuleError
    from capsule.host.outputs import write_new
    from capsule.image.recipe import data_file

    text = data_file("specs", TEMPLATES[template]).read_text(encoding="utf-8")
    try:
        write_new(path, text.encode())
    except FileExistsError:
        raise CapsuleError(
            "CAP-S005",
            f"{path} already exists and was not changed",
            fix="Choose another file name.",
        ) from None
    except OSError as error:
        raise CapsuleError(
            "CAP-S005",
            f"cannot write {path}: {error.strerror}",
            fix="Choose a folder that you may write to.",
        ) from error
    if as_json:
        print_json({"schema": "capsule/init/v1", "spec": str(path)})
        return
    typer.echo(f"wrote {path}")
    first = "put your command into it, then " if template == "own-program" else ""
    typer.echo(f"next: {first}capsule build {shell_word(path)}", err=True)
