"""A verifier may lower the limits of a bundle, never raise them."""

import pytest

from capsule.experiment.spec import LimitsSpec
from capsule.host.errors import CapsuleError, ExitCode
from capsule.verification.execution.admission import lowered
from capsule.verification.request import parse_limits


def test_limits_are_only_lowered():
    limits = LimitsSpec(memory_mb=100, minutes=10)
    found = lowered(limits, parse_limits(["minutes=3", "memory_mb=500"]))
    assert (found.minutes, found.memory_mb) == (3, 100)
    assert found.model_copy(update={"minutes": 10}) == limits


@pytest.mark.parametrize("text", ["minutes", "minutes=", "minutes=0", "minutes=-1", "minutes=1.5",
                                  "hours=1", "minutes=1e3", "=5", "minutes=inf"])  # fmt: skip
def test_other_limits_are_refused(text):
    with pytest.raises(CapsuleError) as caught:
        parse_limits([text])
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V056", ExitCode.USAGE)
    assert "memory_mb" in caught.value.fix
