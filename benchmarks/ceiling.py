"""The ceiling of a learner on a CPU: the rate of large matrix products in binary32.

An update counts as the operations that the algorithm requires (:func:`operations`), whatever number
an implementation executes. Updates per second times these operations, divided by the rate of
products of 1024 x 1024 matrices, is the learner's share of the ceiling. The products are those of
torch and of Capsule, which take turns with the learner; the faster one is the ceiling.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

SIDE = 1_024  # of the matrices
SECONDS = 1.0  # of matrix products in a segment
# Outputs of each filter of the network of Mnih et al. 2015.
PLACES = {"conv1": 20 * 20, "conv2": 9 * 9, "conv3": 7 * 7}


def operations(
    shapes: Mapping[str, Sequence[int]],
    places: Mapping[str, int],
    *,
    trained: int,
    burn_in: int = 0,
    beyond: int = 0,
) -> float:
    """Count the multiplications and additions of the products of one update of Q-learning.

    Both the online and the target network see all observations. No heads are needed in the burn-in;
    the backward pass, twice the forward one, goes through the trained observations of one network
    and needs no gradient for images. Operations other than products are not counted.

    Args:
        shapes: Parameter name to shape.
        places: Outputs of each filter, by layer; 1 for layers not named.
        trained: Number of observations with a gradient.
        burn_in: Number of observations before the trained ones, in all sequences.
        beyond: Number of observations after them, which are used only to bootstrap.
    """
    row = {
        name: 2.0 * math.prod(shape) * places.get(name.removesuffix(".weight"), 1)
        for name, shape in shapes.items()
        if name.endswith(".weight")
    }
    heads = sum(count for name, count in row.items() if name.startswith(("advantage", "value")))
    forward = sum(row.values())
    backward = 2 * forward - row["conv1.weight"]
    everything = 2 * burn_in * (forward - heads) + 2 * (trained + beyond) * forward
    return everything + trained * backward


def torch_products(workers: int) -> Iterator[float]:
    """Multiply matrices with torch, on ``workers`` threads; yield operations of each segment."""
    import torch

    torch.set_num_threads(workers)
    left, right = torch.randn(2, SIDE, SIDE)
    result = torch.empty(SIDE, SIDE)
    return _repeat(lambda: torch.mm(left, right, out=result), 1)


def own_products(workers: int) -> Iterator[float]:
    """Do what :func:`torch_products` does with Capsule's kernel, one product for each thread."""
    import torch

    from capsule.training.layers import kernels

    torch.set_num_threads(1)
    left, right = torch.randn(2, SIDE, SIDE)
    pool = ThreadPoolExecutor(workers)

    def product(_: int) -> None:
        kernels.matrix_product(left, right)

    return _repeat(lambda: list(pool.map(product, range(workers))), workers)


PRODUCTS: Mapping[str, Callable[[int], Iterator[float]]] = {  # role to contender
    "matrix product, torch": torch_products,
    "matrix product, capsule": own_products,
}


def _repeat(multiply: Callable[[], object], products: int) -> Iterator[float]:
    """Multiply matrices for a second at a time; yield the number of operations."""
    while True:
        done, until = 0, time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            multiply()
            done += products
        yield done * 2.0 * SIDE**3


def print_products(speeds: Mapping[str, Sequence[float]]) -> None:
    """Print the rates of products, by name."""
    print(f"{'billion operations/s':34} {'median':>8} {'best':>8}")
    for name, values in speeds.items():
        print(f"{name:34} {figures(values, 1e-9)}")


def figures(values: Sequence[float], scale: float = 1.0) -> str:
    """Return the median and the maximum of values times ``scale``, in columns."""
    return f"{statistics.median(values) * scale:8.3f} {max(values) * scale:8.3f}"
