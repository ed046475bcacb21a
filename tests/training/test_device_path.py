"""The way that trainers take on a GPU, without one: every operator of it, on a stand-in device.

A tensor that was left on the CPU fails in the process that trains
(``tests/training/stand_in_device.py``). What torch's libraries compute there is what Capsule's own
layers compute on the CPU, but for the rounding of sums in another order.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.device_path import CASES, GRAPHED, HALTS, PAGE, TITLES, page

ROOT = Path(__file__).parents[2]
ROUNDING = 1e-4  # float32, after some updates

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each case learned at both places, in one process of its own."""
    command = [sys.executable, "-m", "tests.training.device_path", tmp_path_factory.mktemp("cases")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_on_the_device_learns_what_one_on_the_cpu_learns(trained, case):
    there, here = trained[case]["elsewhere"], trained[case]["cpu"]
    assert there["device"] == "elsewhere:0"
    assert len(there["losses"]) > 1
    assert there["losses"] == pytest.approx(here["losses"], rel=ROUNDING)
    assert there["norms"] == pytest.approx(here["norms"], rel=ROUNDING)
    assert there["lengths"] == here["lengths"]


@pytest.mark.parametrize("case", GRAPHED)
def test_updates_as_graphs_have_the_bits_of_updates_without_also_when_resumed(trained, case):
    found = trained[case]
    assert found["graphs"] == found["elsewhere"]
    # Of each attempt the gradient and the descent.
    assert found["captured"] == (4 if case in HALTS else 2)


@pytest.mark.parametrize("case", CASES)
def test_no_operator_of_that_way_is_nondeterministic_on_a_gpu(trained, case):
    used = trained[case]["operators"]
    assert {"aten::mm", "aten::addmm", "aten::convolution"} & used.keys()
    assert {status for statuses in used.values() for status in statuses} <= TITLES.keys(), used


def test_the_operators_are_documented(trained):
    """If it fails: python -m tests.training.device_path --page."""
    text = PAGE.read_text()
    assert page(text, trained) == text


def test_tensors_of_both_places_are_not_mixed():
    script = (
        "import torch\n"
        "from tests.training.stand_in_device import DEVICE, MixedDevicesError, stand_in_device\n"
        "with stand_in_device():\n"
        "    here, there = torch.ones(2, 2), torch.ones(2, 2, device=DEVICE)\n"
        "    assert (there * 2 + torch.tensor(1.0)).cpu().tolist() == [[3.0, 3.0]] * 2\n"
        "    for mixed in ('there + here', 'torch.mm(here, there)', 'there[here.long()]'):\n"
        "        try:\n"
        "            eval(mixed)\n"
        "        except MixedDevicesError:\n"
        "            print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "refused\n" * 3
