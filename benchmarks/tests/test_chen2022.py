"""The statistics of the case study, against hand-made cases and scipy."""

import itertools
import statistics
from pathlib import Path

import chen2022
import pytest
from chen2022 import Pair, Run, differences, magnitude, rank_sum
from hypothesis import given
from hypothesis import strategies as st

from capsule.entropy.profile import check_consumed, merge, parse


def classifier(accuracy: float, per_class: list[float], predictions: list[int]) -> Run:
    evaluation = {
        "accuracy": accuracy.hex(),
        "per_class_accuracy": [value.hex() for value in per_class],
        "predictions": predictions,
    }
    process = {
        "epochs": 2,
        "training_loss": [(0.5).hex()] * 2,
        "validation_loss": [(0.5).hex()] * 2,
    }
    return Run({"evaluation": evaluation, "process": process}, b"weights", 1.0, 2.0)


def regressor(error: float, predictions: list[float], epochs: int = 3) -> Run:
    evaluation = {
        "mean_absolute_error": error.hex(),
        "predictions": [value.hex() for value in predictions],
    }
    return Run({"evaluation": evaluation, "process": {"epochs": epochs}}, b"weights", 1.0, 2.0)


def test_differences_of_classifiers() -> None:
    pairs = [
        Pair(classifier(0.75, [0.5, 1.0], [0, 1, 1]), classifier(0.5, [0.75, 0.5], [0, 0, 0])),
        Pair(classifier(0.5, [0.5, 0.5], [0, 1, 1]), classifier(0.5, [0.5, 0.5], [0, 1, 1])),
    ]
    assert differences(pairs) == {
        "accuracy": [0.25, 0.0],
        "per_class_accuracy": [0.25, 0.5, 0.0, 0.0],
        "predictions": [2.0, 0.0],
    }


def test_differences_of_regressors_count_predictions_that_differ_in_any_bit() -> None:
    pair = Pair(regressor(2.0, [0.1, 0.2, 0.3]), regressor(2.5, [0.1, 0.2, 0.1 + 0.2]))
    assert differences([pair]) == {"mean_absolute_error": [0.5], "predictions": [1.0]}


@pytest.mark.parametrize(
    ("second", "reproduced"),
    [
        (regressor(2.0, [0.1]), True),
        (Run(regressor(2.0, [0.1]).results, b"weights", 9.0, 9.0), True),  # time does not count
        (regressor(2.0, [0.1], epochs=4), False),
        (regressor(2.5, [0.1]), False),
        (Run(regressor(2.0, [0.1]).results, b"other weights", 1.0, 2.0), False),
    ],
)
def test_a_pair_is_reproduced_if_all_but_the_time_is_identical(
    second: Run, reproduced: bool
) -> None:
    assert Pair(regressor(2.0, [0.1]), second).reproduced is reproduced


@pytest.mark.parametrize(
    ("delta", "name"),
    [(0.146, "negligible"), (-0.147, "small"), (0.33, "medium"), (-0.474, "large"), (1, "large")],
)
def test_magnitudes_of_romano_et_al(delta: float, name: str) -> None:
    assert magnitude(delta) == name


def exact_rank_sum(first: list[float], second: list[float]) -> float:
    """Enumerate every way to divide the ranks: as extreme a sum, or more, on either side."""
    ranks = {value: rank for rank, value in enumerate(sorted(first + second), start=1)}
    middle = len(first) * (len(ranks) + 1) / 2
    distances = [
        abs(sum(chosen) - middle) for chosen in itertools.combinations(ranks.values(), len(first))
    ]
    seen = abs(sum(ranks[value] for value in first) - middle)
    return statistics.fmean(distance >= seen for distance in distances)


@given(st.lists(st.integers(0, 99), min_size=4, max_size=9, unique=True), st.integers(1, 3))
def test_the_rank_sum_test_is_exact_for_small_samples(values: list[int], size: int) -> None:
    first, second = [float(v) for v in values[:size]], [float(v) for v in values[size:]]
    assert rank_sum(first, second) == pytest.approx(exact_rank_sum(first, second))


def test_tables_hold_the_paired_figures(capsys: pytest.CaptureFixture[str]) -> None:
    ours = [Pair(classifier(0.75, [0.5], [1]), classifier(0.75, [0.5], [1]), 4)] * 2
    original = [
        Pair(classifier(0.75, [0.5], [1]), classifier(0.5, [0.5], [0])),
        Pair(classifier(0.75, [0.5], [1]), classifier(0.25, [0.5], [1])),
    ]
    pairs = {"lenet1": {"C1": original, "C2": ours, "C3": ours}}
    chen2022.print_table3(pairs)
    chen2022.print_table4(pairs)
    chen2022.print_reproduced(pairs)
    rows = [line for line in capsys.readouterr().out.splitlines() if "lenet1" in line]
    overhead = "1.000 | 1.000 | 1.000 | 1.000 | 1.000 | 1.000 | +0.00 (negligible) | 1.000"
    assert rows == [
        f"| lenet1 | {overhead} | 0.0 kB | 0.0 kB | 57.1% |",
        "| Overall acc. | lenet1 | 0 | 0 | 0 | 0 | 50.00% | 17.68% |",
        "| Per-class acc. | lenet1 | 0 | 0 | 0 | 0 | 0 | 0 |",
        "| Predictions | lenet1 | 0 | 0 | 0 | 0 | 1 | 0.7071 |",
        "| lenet1 | 0 of 2 | 2 of 2 | 2 of 2 | 2 | 56.25% |",
    ]


def test_torch_versions_are_compared_by_the_runs_of_equal_seeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = [Pair(classifier(0.75, [0.5], [1, 2]), classifier(0.0, [0.0], [9, 9]))] * 2
    other = [
        Pair(classifier(0.5, [0.5], [1, 3]), classifier(1.0, [1.0], [8, 8])),
        Pair(classifier(0.75, [0.5], [1, 2]), classifier(1.0, [1.0], [8, 8])),
    ]
    chen2022.print_between({"lenet1": {"C2": one, "C5": other}})
    rows = [line for line in capsys.readouterr().out.splitlines() if "lenet1" in line]
    assert rows == [
        "| Overall acc. | lenet1 | 25.00% | 17.68% |",
        "| Per-class acc. | lenet1 | 0 | 0 |",
        "| Predictions | lenet1 | 1 | 0.7071 |",
    ]


def test_interpreters_take_turns_at_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[str, int]] = []

    def train_pairs(arguments: list[str], seed: int, folder: Path, python: str) -> list[Pair]:
        trained.append((python, seed))
        run = regressor(2.0, [float(len(trained))])
        return [Pair(run, run)] * 3

    monkeypatch.setattr(chen2022, "train_pairs", train_pairs)
    pairs = chen2022.study("lstm", 2, 1, ["python-a", "python-b"])
    assert trained == [("python-a", 0), ("python-b", 0), ("python-a", 42), ("python-b", 42)]
    assert list(pairs) == ["C1", "C2", "C3", "C4", "C5", "C6"]
    assert [pair.first.evaluation["predictions"] for pair in pairs["C6"]] == [
        [(2.0).hex()],
        [(4.0).hex()],
    ]


def test_times_of_runs_that_differ_in_length_are_not_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    longer = Pair(regressor(2.0, [0.1]), regressor(2.0, [0.1], epochs=4))
    equal = Pair(regressor(2.0, [0.1]), regressor(2.0, [0.1]), 4)
    chen2022.print_table3({"lstm": {"C1": [equal, longer], "C2": [equal] * 2, "C3": [equal] * 2}})
    row = capsys.readouterr().out.splitlines()[-1]
    assert row == f"| lstm |{' - |' * 8} 0.0 kB | 0.0 kB | 57.1% |"


@pytest.mark.slow
def test_an_unseeded_run_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    arguments = ["--model", "lstm", "--data", "series", "--epochs", "2"]
    recording, replay = tmp_path / "recording", tmp_path / "replay"
    recorded = chen2022.run(arguments, tmp_path, launcher=chen2022.launch(recording))
    profile = merge(recording)
    replayed = chen2022.run(arguments, tmp_path, launcher=chen2022.launch(replay, profile))
    assert check_consumed(replay, parse(profile)) == ()
    assert Pair(recorded, replayed).reproduced
