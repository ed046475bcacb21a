"""Calls that have to end with an error of Capsule."""

import pytest

from capsule.experiment.errors import CapsuleError


def refusal(code, call, *arguments, status=None, **options):
    """Return the error with which a call ends, which has this code and, if given, exit status."""
    with pytest.raises(CapsuleError) as caught:
        call(*arguments, **options)
    assert caught.value.code == code, caught.value
    assert status in (None, caught.value.exit_code)
    return caught.value


def refused(code, call, *arguments, **options):
    """Return the message of the error with which a call ends: see :func:`refusal`."""
    return refusal(code, call, *arguments, **options).message
