"""A program that trains in place of Capsule's algorithms."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from capsule.experiment.fields import Model, Patterns, Word


class CommandTrainer(Model):
    """Any program. It runs unchanged in a copy of its source tree, and its outputs are claimed.

    An output is a file that the program writes into its working folder and that 'outputs' selects.
    """

    command: Annotated[tuple[Word, ...], Field(min_length=1)] = Field(
        description="The program and its arguments, e.g. [python, train.py]. '{seed}' is replaced "
        "by seeds.root."
    )
    outputs: Patterns = Field(
        ("*",),
        description="Patterns that select which of the written files are claimed. '*' matches any "
        "characters, including '/'; a leading '!' excludes; the last pattern that matches decides. "
        "Example: ['*', '!*.log'].",
    )
    standard_output: bool = Field(
        True,
        description="Whether the program's standard output is claimed. Its standard error is kept "
        "but never claimed.",
    )
    resumable: bool = Field(
        False,
        description="Whether the program can resume after an interruption, from files that it "
        "saved in its state folder. Otherwise it starts from the beginning.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> CommandTrainer:
        if self.resumable and self.standard_output:
            raise ValueError(
                "resumable requires standard_output: false, because a resumed program prints only "
                "the rest of its output"
            )
        return self
