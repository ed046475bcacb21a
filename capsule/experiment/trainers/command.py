"""A program that trains in place of Capsule's algorithms."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from capsule.experiment.fields import Model, Patterns, Word


class CommandTrainer(Model):
    """Any program: it runs as it is, in a copy of its source tree, and its outputs are claimed.

    An output is a file that the program wrote into its working folder, by the patterns below.
    """

    command: Annotated[tuple[Word, ...], Field(min_length=1)] = Field(
        description="The program and its arguments, e.g. [python, train.py]. '{seed}' is replaced "
        "by seeds.root."
    )
    outputs: Patterns = Field(
        ("*",),
        description="Patterns that select which of the written files are claimed. '*' matches any "
        "characters, including '/'; a leading '!' excludes; the last match wins. Example: ['*', "
        "'!*.log'].",
    )
    standard_output: bool = Field(
        True,
        description="Whether what the program prints to standard output is claimed. Standard error "
        "is kept but never claimed.",
    )
    resumable: bool = Field(
        False,
        description="Whether the program can resume, after an interruption, from what it saved in "
        "its state folder. Otherwise it starts from the beginning.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> CommandTrainer:
        if self.resumable and self.standard_output:
            raise ValueError(
                "resumable needs standard_output: false, because a resumed program prints only "
                "the rest"
            )
        return self
