"""The GPUs of a machine: which members still get one after a member has failed on it."""

import threading

import pytest

from capsule.study.directory import Outcome
from capsule.study.gpu_pool import GpuPool
from tests.conftest import wait_until

DONE = Outcome(bundle="x", claim_id="a" * 64)


def failed(code):
    return Outcome(code=code, message="it failed", fix="-")


@pytest.mark.parametrize("code", ["CAP-M011", "CAP-T115"])
def test_a_gpu_that_does_not_fit_the_torch_of_a_member_serves_members_with_another(code):
    notes, begun = [], []
    pool = GpuPool(["GPU-a"], notes.append)

    def run(name, pins, outcome):
        return pool.run(name, pins, lambda gpu: begun.append((name, gpu)) or outcome)

    assert run("old.1", 0, failed(code)).code == code
    assert run("old.2", 0, DONE) is None
    assert run("new.1", 1, DONE) == DONE
    assert begun == [("old.1", "GPU-a"), ("new.1", "GPU-a")]
    assert notes == [
        "GPU-a is not used again for members with the packages of old.1, which failed on it with "
        + code,
        "no GPU is left for them, so no further one of them is started",
    ]


def test_a_member_takes_a_gpu_that_fits_its_torch():
    pool, begun = GpuPool(["GPU-a", "GPU-b"], lambda _: None), []
    pool.run("one", 0, lambda _: failed("CAP-T115"))
    for name in ("two", "three"):
        pool.run(name, 0, lambda gpu: begun.append(gpu) or DONE)
    assert begun == ["GPU-b", "GPU-b"]


def test_a_gpu_that_is_lost_serves_no_member():
    notes = []
    pool = GpuPool(["GPU-a"], notes.append)
    pool.run("one", 0, lambda _: failed("CAP-T110"))
    assert pool.run("two", 1, lambda _: DONE) is None
    assert notes[1:] == ["no GPU is left, so no further member is started"]


@pytest.mark.parametrize(("code", "second"), [(None, DONE), ("CAP-T115", None)])
def test_a_member_waits_until_a_gpu_is_free_or_none_is_left(code, second):
    pool, ended = GpuPool(["GPU-a"], lambda _: None), []
    begun, go = threading.Event(), threading.Event()

    def first(_):
        begun.set()
        assert go.wait(600)
        return DONE if code is None else failed(code)

    threads = [threading.Thread(target=pool.run, args=("one", 0, first))]
    threads[0].start()
    wait_until(begun.is_set, seconds=600)
    threads.append(
        threading.Thread(target=lambda: ended.append(pool.run("two", 0, lambda _: DONE)))
    )
    threads[1].start()
    assert ended == []
    go.set()
    for thread in threads:
        thread.join(600)
    assert ended == [second]
