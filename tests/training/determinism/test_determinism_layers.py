"""The determinism layers: each holds, and each that is switched off is noticed.

Noticed means three things: it is among the relaxations, it reads back as off, and two processes or
settings that were equal differ. ``test_child_processes.py`` and ``test_torch_flags.py`` have the
layers of those modules, and ``acting/test_inference.py`` those that concern many actors.
"""

import os
import sys

import pytest

from capsule.experiment.variables import environment_variables
from tests.training.conftest import start_variables
from tests.training.determinism.conftest import run, spec_with

CPU = {"kind": "cpu"}


# --- the switches ---------------------------------------------------------------------------------


# --- hash seed ------------------------------------------------------------------------------------

ORDER = "import json; print(json.dumps([hash('capsule'), list({str(n) for n in range(50)})]))"


@pytest.mark.parametrize("seed", [0, 42])
def test_a_hash_seed_fixes_the_order_of_sets(seed):
    variables = environment_variables(spec_with(hash_seed=seed))
    assert run(sys.executable, ORDER, variables) == run(sys.executable, ORDER, variables)


def test_without_a_hash_seed_it_differs():
    variables = environment_variables(spec_with(hash_seed=None))
    one, other = (run(sys.executable, ORDER, variables) for _ in range(2))
    assert one[0] != other[0]
    assert one[1] != other[1]


# --- threads --------------------------------------------------------------------------------------

SUM = """
import json, os, sys
cores = sorted(os.sched_getaffinity(0))[: int(sys.argv[1])]
os.sched_setaffinity(0, cores)
import torch
values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
print(json.dumps([torch.get_num_threads(), values.sum().item().hex()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_number_of_cores_changes_bits_unless_threads_are_fixed():
    def total(cores, **determinism):
        variables = start_variables(spec_with(**determinism))
        return run(sys.executable, SUM, variables, arguments=[cores])

    one, two = total("1", threads=None), total("2", threads=None)
    assert (one[0], two[0]) == (1, 2)
    assert one[1] != two[1]
    assert total("1", threads=2) == two
