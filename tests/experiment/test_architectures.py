"""Which GPUs code runs on, by the CUDA documentation's own examples."""

import pytest

from capsule.experiment.architectures import runs_on


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_80"], "8.0", True),
        (["sm_80"], "8.6", True),  # binary code runs on later minor versions
        (["sm_86"], "8.0", False),
        (["sm_86"], "8.9", True),
        (["sm_80"], "9.0", False),
        (["compute_80"], "9.0", True),  # PTX is compiled for any later GPU
        (["compute_80"], "7.5", False),
        (["sm_100", "sm_120"], "10.3", True),
        (["sm_100", "sm_120"], "11.0", False),
        (["sm_120"], "12.1", True),
        (["sm_90a"], "9.0", True),
        (["sm_100a"], "10.3", False),
        (["compute_90a"], "10.0", False),
        (["sm_100f"], "10.3", True),
        (["compute_100f"], "12.0", False),
        ([], "9.0", False),
        (["gfx942"], "9.0", False),  # of another vendor
    ],
)
def test_code_runs_where_nvidia_says(architectures, capability, runs):
    assert runs_on(architectures, capability) is runs
