"""A run on a GPU that had too little memory ends."""

import pytest
import torch

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.training.determinism.gpu_memory import check_memory

GPU = torch.device("cuda", 1)


def test_a_cpu_is_not_asked():
    check_memory(torch.device("cpu"))


@pytest.mark.parametrize("counted", [{"num_ooms": 0}, {}])  # nothing was allocated yet
def test_enough_memory_is_no_error(monkeypatch, counted):
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _device: counted)
    check_memory(GPU)


def test_an_allocation_that_failed_ends_the_run(monkeypatch):
    counted = {GPU: {"num_ooms": 3}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", counted.__getitem__)
    with pytest.raises(CapsuleError, match="too little memory 3 times") as caught:
        check_memory(GPU)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-T116", ExitCode.INCONCLUSIVE)
