"""Train one model of the case study of Chen et al. (ICSE 2022) and write what it became.

    python train.py --model lenet5 --data digits --output out            # another result each time
    python train.py --model lenet5 --data digits --output out --seed 42  # the same on one machine

An ordinary script: it knows nothing of Capsule. Weights and dropout come from torch's generator,
shuffling from numpy's, augmentation from Python's own; without ``--seed`` each starts from the
operating system's randomness. ``results.json`` (floats in hexadecimal) and ``model.safetensors`` in
the output folder are what two equal runs agree in; the training time goes to standard error and,
where ``--timing`` says so, into a file of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from criteria import accuracy, exact, mean_absolute_error, per_class_accuracy
from datasets import LOADERS, Data, Split, fit, load
from models import CLASSES, MODELS
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        epochs: Most passes over the training data; the case study's number.
        batch_size: Instances per update.
        optimizer: Class in ``torch.optim``.
        arguments: Its arguments.
        channels: Channels of the images, None where the inputs are sequences.
        image_size: Height and width of the images.
        milestones: Shares of the epochs after which the learning rate is divided by ten.
        patience: Epochs without a better validation loss before training stops, None for never.
    """

    epochs: int
    batch_size: int
    optimizer: str
    arguments: dict[str, float]
    channels: int | None = None
    image_size: int = 32
    milestones: tuple[float, ...] = ()
    patience: int | None = None


SGD = {"lr": 0.05, "momentum": 0.9}
RESNET = Recipe(  # He et al. 2016, Section 4.2
    epochs=200,
    batch_size=128,
    optimizer="SGD",
    arguments={"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
    channels=3,
    milestones=(0.5, 0.75),
)
RECIPES = {
    "lenet1": Recipe(50, 32, "SGD", SGD, channels=1, image_size=28),
    "lenet4": Recipe(50, 32, "SGD", SGD, channels=1),
    "lenet5": Recipe(50, 32, "SGD", SGD, channels=1),
    "resnet38": RESNET,
    "resnet56": RESNET,
    "lstm": Recipe(50, 64, "Adam", {"lr": 0.005}, patience=5),
}


def main() -> None:
    """Train, evaluate, write and print."""
    options = parse()
    recipe = adjusted(RECIPES[options.model], options)
    randomness = Randomness(options.seed)
    data = prepare(load(options.data, options.directory), recipe)
    network = MODELS[options.model]()
    optimizer = getattr(torch.optim, recipe.optimizer)(network.parameters(), **recipe.arguments)
    started = time.perf_counter()
    process = train(network, optimizer, data, recipe, randomness)
    seconds = time.perf_counter() - started
    results = {
        "model": options.model,
        "data": options.data,
        "seed": options.seed,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "evaluation": evaluate(network, data),
        "process": process.metrics(),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    save_file(network.state_dict(), options.output / "model.safetensors")
    write(options.output / "results.json", exact(results))
    if options.timing:
        write(options.timing, {"training_seconds": seconds})
    report(results, seconds)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--data", choices=LOADERS, required=True)
    parser.add_argument("--directory", type=Path, help="folder of the files of MNIST or CIFAR-10")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--timing", type=Path, help="file for the training time")
    parser.add_argument("--seed", type=int, help="seed of all randomness; default: none")
    parser.add_argument("--epochs", type=int, help="default: the case study's number")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--image-size", type=int, help="height and width; ResNets only")
    options = parser.parse_args()
    if options.image_size and not options.model.startswith("resnet"):
        parser.error(f"--image-size {options.image_size}: {options.model} has a fixed one")
    return options


def adjusted(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """Return the recipe with what the command line says otherwise."""
    said = {
        name: getattr(options, name)
        for name in ("epochs", "batch_size", "image_size")
        if getattr(options, name) is not None
    }
    if options.learning_rate is not None:
        said["arguments"] = recipe.arguments | {"lr": options.learning_rate}
    return replace(recipe, **said)


class Randomness:
    """Where each kind of chance comes from; from the operating system if ``seed`` is None."""

    def __init__(self, seed: int | None) -> None:
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)  # initialization and dropout
        self.shuffling = np.random.default_rng(seed)
        self.augmentation = random.Random(seed)


def prepare(data: Data, recipe: Recipe) -> Data:
    """Bring the inputs to the shape that the model takes.

    Raises:
        ValueError: The model takes images and the data are sequences, or the other way round.
    """
    are_images = data.training.inputs.ndim == 4
    if are_images != (recipe.channels is not None):
        raise ValueError(f"the model does not take {'images' if are_images else 'sequences'}")
    if recipe.channels is None:
        return data
    channels, size = recipe.channels, recipe.image_size
    return data.map(lambda part: Split(fit(part.inputs, channels, size), part.targets))


@dataclass
class Process:
    """The process metrics: mean losses of each epoch."""

    training_loss: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)

    def metrics(self) -> dict[str, Any]:
        """Return them with the number of epochs."""
        return {"epochs": len(self.training_loss), **vars(self)}


def train(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    recipe: Recipe,
    randomness: Randomness,
) -> Process:
    """Train until all epochs have passed or the validation loss has stopped falling."""
    schedule = torch.optim.lr_scheduler.MultiStepLR(
        optimizer, [int(share * recipe.epochs) for share in recipe.milestones]
    )
    stopping = EarlyStopping(recipe.patience)
    process = Process()
    while len(process.training_loss) < recipe.epochs and not stopping.reached:
        batches = training_batches(data.training, recipe.batch_size, randomness)
        process.training_loss.append(train_epoch(network, batches, optimizer))
        schedule.step()
        outputs = predict(network, data.validation)
        process.validation_loss.append(loss_of(outputs, data.validation.targets).item())
        stopping.observe(process.validation_loss[-1])
    return process


def train_epoch(
    network: nn.Module, batches: Iterator[Split], optimizer: torch.optim.Optimizer
) -> float:
    """Make one update per batch; return the mean loss over the instances."""
    network.train()
    total, count = 0.0, 0
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(network(as_tensor(batch.inputs)), batch.targets)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(batch)
        count += len(batch)
    return total / count


class EarlyStopping:
    """Notices that a loss has not fallen below its least value for ``patience`` epochs."""

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self.best = float("inf")
        self.epochs_since = 0

    def observe(self, loss: float) -> None:
        """Take the loss of one more epoch."""
        self.epochs_since = 0 if loss < self.best else self.epochs_since + 1
        self.best = min(self.best, loss)

    @property
    def reached(self) -> bool:
        """Whether to stop."""
        return self.patience is not None and self.epochs_since >= self.patience


def training_batches(split: Split, size: int, randomness: Randomness) -> Iterator[Split]:
    """Yield the instances in random order, images moved a little; the last batch may be smaller."""
    order = randomness.shuffling.permutation(len(split))
    for start in range(0, len(order), size):
        batch = split[order[start : start + size]]
        if batch.inputs.ndim == 4:
            batch = Split(augment(batch.inputs, randomness.augmentation), batch.targets)
        yield batch


def augment(images: NDArray[Any], chance: random.Random) -> NDArray[Any]:
    """Move each image by up to an eighth of its size; mirror colour images half of the time.

    He et al. 2016, Section 4.2 (four pixels of 32). Digits, which are grey, would be others in a
    mirror.
    """
    size = images.shape[-1]
    margin = size // 8
    padded = np.pad(images, ((0, 0), (0, 0), (margin, margin), (margin, margin)))
    have_colour = bool((images != images[:, :1]).any())
    moved = np.empty_like(images)
    for index, image in enumerate(padded):
        down, right = chance.randint(0, 2 * margin), chance.randint(0, 2 * margin)
        moved[index] = image[:, down : down + size, right : right + size]
        if have_colour and chance.random() < 0.5:
            moved[index] = moved[index, :, :, ::-1]
    return moved


def as_tensor(inputs: NDArray[Any]) -> Tensor:
    """Return images as floats from -1 (black) to 1, anything else as it is."""
    tensor = torch.from_numpy(inputs)
    return tensor / 127.5 - 1 if tensor.dtype == torch.uint8 else tensor


def loss_of(predictions: Tensor, targets: NDArray[Any]) -> Tensor:
    """Return the mean cross entropy of logits, or the mean squared error of values."""
    expected = torch.from_numpy(targets)
    if expected.dtype == torch.int64:
        return functional.cross_entropy(predictions, expected)
    return functional.mse_loss(predictions, expected)


@torch.no_grad()
def predict(network: nn.Module, split: Split) -> Tensor:
    """Return the network's outputs for every instance, in order."""
    network.eval()
    batches = range(0, len(split), EVALUATION_BATCH)
    return torch.cat(
        [network(as_tensor(split.inputs[at : at + EVALUATION_BATCH])) for at in batches]
    )


def evaluate(network: nn.Module, data: Data) -> dict[str, Any]:
    """Return the evaluation metrics of the finished model on data it has not seen."""
    outputs, targets = predict(network, data.testing).numpy(), data.testing.targets
    if outputs.ndim == 2:
        predictions = outputs.argmax(1)
        return {
            "accuracy": accuracy(predictions, targets),
            "per_class_accuracy": per_class_accuracy(predictions, targets, CLASSES),
            "predictions": predictions.tolist(),
        }
    return {
        "mean_absolute_error": mean_absolute_error(outputs, targets) * data.scale,
        "predictions": outputs.tolist(),
    }


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON document."""
    path.write_text(json.dumps(document, indent=1) + "\n")


def report(results: dict[str, Any], seconds: float) -> None:
    """Print a summary, and to standard error the time, which no two runs share."""
    process, evaluation = results["process"], results["evaluation"]
    for epoch, losses in enumerate(
        zip(process["training_loss"], process["validation_loss"], strict=True), start=1
    ):
        print(f"epoch {epoch:3}  training loss {losses[0]:.6f}  validation loss {losses[1]:.6f}")
    for name in ("accuracy", "mean_absolute_error"):
        if name in evaluation:
            print(f"{name.replace('_', ' ')} {evaluation[name]:.6g} ({evaluation[name].hex()})")
    print(f"trained in {seconds:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
