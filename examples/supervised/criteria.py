"""When two trained models count as equal: the evaluation and process metrics of Section 3.3.

A model is reproducible if its evaluation metrics and its process metrics, except for the training
time, are identical to the last bit. Floats are therefore written in hexadecimal, which is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def accuracy(predictions: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the share of instances that were labelled correctly."""
    return float(np.count_nonzero(predictions == labels)) / len(labels)


def per_class_accuracy(
    predictions: NDArray[Any], labels: NDArray[Any], classes: int
) -> list[float]:
    """Return the accuracy among the instances of each class.

    Raises:
        ValueError: A class has no instance, so that its accuracy is undefined.
    """
    missing = sorted(set(range(classes)) - set(labels.tolist()))
    if missing:
        raise ValueError(f"no instance of class {missing[0]} to test with")
    return [accuracy(predictions[labels == k], labels[labels == k]) for k in range(classes)]


def mean_absolute_error(predictions: NDArray[Any], targets: NDArray[Any]) -> float:
    """Return the mean distance between prediction and target, summed in float64."""
    distances = np.abs(predictions.astype(np.float64) - targets.astype(np.float64))
    return float(distances.mean())


def exact(value: Any) -> Any:
    """Return ``value`` with every float in it as a hexadecimal string."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, list):
        return [exact(element) for element in value]
    if isinstance(value, dict):
        return {key: exact(element) for key, element in value.items()}
    return value
