"""The table of contenders on a GPU."""

import gpu
import pytest


def test_each_speed_stands_beside_the_one_without_determinism():
    speeds = {"ours, GPU": [3.0, 2.0, 8.0], f"ours, {gpu.OFF}": [4.0, 4.0, 5.0]}
    assert gpu.speed_table(speeds, "steps/s").splitlines() == [
        "| steps/s | median | best | / determinism off |",
        "|---|---|---|---|",
        "| ours, GPU | 3.00 | 8.00 | 0.750 |",
        "| ours, GPU, determinism off | 4.00 | 5.00 | 1.000 |",
    ]


def test_the_speed_without_determinism_is_required():
    with pytest.raises(ValueError, match="unpack"):
        gpu.speed_table({"ours, GPU": [3.0]}, "steps/s")
