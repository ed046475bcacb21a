"""The command of a task, which sees its folders at paths of the engine."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.engine.interface import NATIVE, RUN_DIRECTORY, Task
from capsule.experiment.spec import LimitsSpec


def command(*arguments, native="lib/native"):
    task = Task(
        run_directory=Path("/home/me/run"),
        environment={},
        limits=LimitsSpec(),
        arguments=arguments,
        native=native,
    )
    return task.command(run_directory="/out", prefix="/usr")


@pytest.mark.parametrize(
    ("word", "seen"),
    [
        (RUN_DIRECTORY, "/out"),
        (f"--directory={RUN_DIRECTORY}/start", "--directory=/out/start"),
        (f"{RUN_DIRECTORY}:{RUN_DIRECTORY}", "/out:/out"),
        (f"{NATIVE}/capsule-launch", "/usr/lib/native/capsule-launch"),
        (f"{NATIVE}/shim.so={RUN_DIRECTORY}", "/usr/lib/native/shim.so=/out"),
        ("{run directory}", "{run directory}"),
    ],
)
def test_places_in_arguments_become_those_that_the_task_sees(word, seen):
    assert command("program", word) == ["program", seen]


@given(st.lists(st.text().filter(lambda word: "{" not in word)))
def test_other_arguments_stay_as_they_are(words):
    assert command(*words) == words
