"""The instruments of one process: operators of every thread, and each warning once."""

import threading
import warnings

import pytest
import torch

from capsule.training.instruments.hooks import MAX_WARNINGS, Instruments
from capsule.training.instruments.report import InstrumentReport

UNSUPPORTED = "{} does not have a deterministic implementation, but you set a flag"


@pytest.fixture
def report(tmp_path):
    """A function that calls another under the instruments for torch, and returns their report."""

    def report(function):
        instruments = Instruments(tmp_path, lines=False)
        with warnings.catch_warnings(record=True):
            instruments.start()
            instruments._watch_torch()
            try:
                function()
            finally:
                instruments.finish()
        (path,) = tmp_path.glob("*.json")
        return InstrumentReport.model_validate_json(path.read_bytes())

    return report


def test_operators_of_threads_with_a_run_method_of_their_own_are_counted(report):
    class Actor(threading.Thread):
        def run(self):
            torch.ones(2).cumsum(0)

    threads = [Actor(), threading.Thread(target=lambda: torch.ones(2).cumprod(0))]

    def work():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    start = threading.Thread.start
    found = {use.operator for use in report(work).operators}
    assert {"aten::cumsum", "aten::cumprod"} <= found
    assert threading.Thread.start is start
    assert not any("run" in vars(thread) for thread in threads)


def test_a_warning_that_is_repeated_leaves_room_for_others(report):
    def work():
        for _ in range(MAX_WARNINGS):
            warnings.warn(UNSUPPORTED.format("cumsum_cuda_kernel"), stacklevel=1)
        warnings.warn(UNSUPPORTED.format("index_add_cuda_"), stacklevel=1)

    found = report(work)
    assert [each.message.partition(" ")[0] for each in found.warnings] == [
        "cumsum_cuda_kernel",
        "index_add_cuda_",
    ]
    assert not found.truncated


def test_warnings_beyond_the_limit_are_said_to_be_missing(report):
    def work():
        for number in range(MAX_WARNINGS + 1):
            warnings.warn(UNSUPPORTED.format(f"kernel_{number}"), stacklevel=1)

    found = report(work)
    assert len(found.warnings) == MAX_WARNINGS
    assert found.truncated
