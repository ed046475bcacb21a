"""Training, early stopping and the criteria of the case study."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import train
from criteria import accuracy, exact, mean_absolute_error, per_class_accuracy
from datasets import Data, Split
from models import LstmRegressor

from capsule.experiment.trainers import CommandTrainer
from capsule.host.spec_file import load_spec

SCRIPT = Path(train.__file__)


@pytest.mark.parametrize(
    ("patience", "losses", "stops_after"),
    [
        (2, [3.0, 2.0, 2.0, 2.5], 4),  # an equal loss is no better one
        (2, [3.0, 4.0, 2.0, 5.0, 5.0], 5),  # a better one starts the count again
        (1, [1.0, float("nan")], 2),
        (2, [3.0, 2.0, 1.0, 0.5], None),
        (None, [1.0, 2.0, 3.0, 4.0], None),
    ],
)
def test_early_stopping(patience: int | None, losses: list[float], stops_after: int | None) -> None:
    stopping = train.EarlyStopping(patience)
    reached = []
    for loss in losses:
        stopping.observe(loss)
        reached.append(stopping.reached)
    assert (reached.index(True) + 1 if any(reached) else None) == stops_after


def tiny_sequences() -> Data:
    split = Split(np.ones((8, 4, 1), np.float32), np.ones(8, np.float32))
    return Data(split, split, split)


@pytest.mark.slow
def test_a_loss_that_stands_still_ends_training_after_the_case_studys_five_epochs() -> None:
    recipe, network = train.RECIPES["lstm"], LstmRegressor()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    process = train.train(network, optimizer, tiny_sequences(), recipe, train.Randomness(0))
    assert process.metrics()["epochs"] == 6
    assert len(process.training_loss) == len(process.validation_loss) == 6
    assert len(set(process.validation_loss)) == 1


@pytest.mark.slow
def test_the_learning_rate_falls_at_the_milestones() -> None:
    recipe = replace(train.RECIPES["lstm"], epochs=4, milestones=(0.5, 0.75), patience=None)
    network = LstmRegressor()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    train.train(network, optimizer, tiny_sequences(), recipe, train.Randomness(0))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_an_epoch_takes_each_instance_once_in_another_order() -> None:
    split = Split(np.arange(10, dtype=np.float32).reshape(10, 1, 1), np.arange(10))
    batches = list(train.training_batches(split, 4, train.Randomness(1)))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    order = [target for batch in batches for target in batch.targets.tolist()]
    assert sorted(order) == list(range(10)) != order
    assert [int(value) for batch in batches for value in batch.inputs.ravel()] == order


@pytest.mark.parametrize(("colours", "mirrored"), [(False, {False}), (True, {False, True})])
def test_augmentation_moves_images_and_mirrors_only_colour(
    colours: bool, mirrored: set[bool]
) -> None:
    image = np.zeros((3, 16, 16), np.uint8)
    image[:, 8, 8], image[:, 8, 9] = 1, 2
    image[0, 8, 8] += colours
    moved = train.augment(np.stack([image] * 200), random.Random(0))  # noqa: S311
    seen = set()
    for result in moved:
        (row, column), (other_row, other) = np.argwhere(result[2])
        assert row == other_row
        assert abs(row - 8) <= 2
        seen.add(bool(result[2, row, column] > result[2, row, other]))
    assert seen == mirrored
    assert len({result.tobytes() for result in moved}) >= 25


def test_images_are_scaled_to_minus_one_to_one() -> None:
    assert train.as_tensor(np.array([0, 255], np.uint8)).tolist() == [-1.0, 1.0]


def test_a_model_refuses_data_of_the_other_task() -> None:
    with pytest.raises(ValueError, match="the model does not take sequences"):
        train.prepare(tiny_sequences(), train.RECIPES["lenet1"])
    images = Split(np.zeros((2, 1, 8, 8), np.uint8), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="the model does not take images"):
        train.prepare(Data(images, images, images), train.RECIPES["lstm"])


def test_accuracies_are_the_papers() -> None:
    labels, predictions = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 0, 1, 1, 0])
    assert accuracy(predictions, labels) == 4 / 6
    assert per_class_accuracy(predictions, labels, 2) == [0.75, 0.5]
    with pytest.raises(ValueError, match="no instance of class 2"):
        per_class_accuracy(predictions, labels, 3)


def test_mean_absolute_error_is_the_papers() -> None:
    assert mean_absolute_error(np.array([1.0, 2.0, 5.0]), np.array([2.0, 2.0, 1.0])) == 5 / 3


def test_floats_are_written_exactly() -> None:
    document = {"a": [0.1, 2], "b": {"c": "x", "d": None}}
    assert exact(document) == {"a": [(0.1).hex(), 2], "b": {"c": "x", "d": None}}


def run(folder: Path, *arguments: str) -> tuple[bytes, bytes, bytes]:
    """Train in a process of its own; return what it wrote and printed."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--output", str(folder), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
    )
    files = (folder / "results.json").read_bytes(), (folder / "model.safetensors").read_bytes()
    return *files, done.stdout


@pytest.mark.slow
def test_a_seed_makes_two_runs_equal(tmp_path: Path) -> None:
    arguments = ["--model", "lenet5", "--data", "digits", "--epochs", "2", "--seed", "42"]
    one, other = run(tmp_path / "one", *arguments), run(tmp_path / "other", *arguments)
    assert one == other
    results = json.loads(one[0])
    assert results["seed"] == 42
    assert results["parameters"] == 61_706
    assert results["process"]["epochs"] == 2
    assert len(results["evaluation"]["predictions"]) == 299
    assert 0.5 < float.fromhex(results["evaluation"]["accuracy"]) <= 1


@pytest.mark.slow
def test_without_a_seed_two_runs_differ_in_everything(tmp_path: Path) -> None:
    arguments = ["--model", "lstm", "--data", "series", "--epochs", "2"]
    one, other = run(tmp_path / "one", *arguments), run(tmp_path / "other", *arguments)
    assert all(a != b for a, b in zip(one, other, strict=True))
    results = json.loads(one[0])
    assert results["seed"] is None
    assert 0 < float.fromhex(results["evaluation"]["mean_absolute_error"]) < 30
    assert len(results["evaluation"]["predictions"]) == 396


@pytest.mark.parametrize("path", sorted(SCRIPT.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_specs_run_the_script_as_its_command_line_allows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(path)
    assert isinstance(spec.trainer, CommandTrainer)
    python, script, *arguments = spec.trainer.command
    assert (python, script) == ("python", SCRIPT.name)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    options = train.parse()
    assert options.seed is None
    assert spec.name == f"supervised-{path.stem}"
    assert path.stem.startswith(options.model)
    if spec.data is not None:
        assert options.directory == Path("/data", *spec.data)


@pytest.mark.slow
def test_a_fixed_image_size_cannot_be_changed(tmp_path: Path) -> None:
    arguments = ["--model", "lenet5", "--data", "digits", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--image-size", "16"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--image-size 16: lenet5 has a fixed one" in done.stderr
