"""What the tests of layers share."""

import numpy as np
import pytest
import torch

from capsule.training.layers import kernels


@pytest.fixture(params=["AVX2", "AVX-512"])
def instructions(request):
    found = kernels.limit_instruction_set(request.param)
    yield found
    kernels.limit_instruction_set("AVX-512")


def normal(*shape, key=0):
    generator = torch.Generator().manual_seed(key)
    return torch.randn(shape, generator=generator)


def same_bits(ours, expected):
    ours, expected = (np.asarray(array, np.float32) for array in (ours, expected))
    return ours.shape == expected.shape and ours.tobytes() == expected.tobytes()
