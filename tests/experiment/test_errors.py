"""Errors: what is sent from one process to another says the same there."""

import pickle

from capsule.experiment.errors import CapsuleError, ExitCode

ERROR = CapsuleError("CAP-T103", "the device is busy", fix="wait")


def parts(error):
    return error.code, error.message, error.fix, error.exit_code


def test_an_error_passes_between_processes():
    again = pickle.loads(pickle.dumps(ERROR))  # noqa: S301 - its own bytes
    assert type(again) is CapsuleError
    assert parts(again) == parts(ERROR)
    assert str(again) == "CAP-T103 the device is busy"


def test_an_error_names_the_part_that_it_was_raised_in():
    named = ERROR.within("process 2")
    assert parts(named) == (
        "CAP-T103",
        "process 2: the device is busy",
        "wait",
        ExitCode.INCONCLUSIVE,
    )
