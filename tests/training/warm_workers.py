"""Worker processes that begin in a process which has imported torch, as that is most of their work.

They are forked from the fork server of :mod:`multiprocessing`, which computes nothing. Each gets
the environment variables of the moment, as a process that is spawned would.
"""

import multiprocessing
import multiprocessing.forkserver
import os

import pytest

from capsule.training.acting import worker_process
from capsule.training.impala.actors import replicas

MODULES = (
    "ale_py",
    "gymnasium",
    "capsule.training.impala.factory",
    "capsule.training.r2d2.factory",
)


class WarmContext:
    """What trainers use of a context of :mod:`multiprocessing`."""

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*MODULES])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPENBLAS_NUM_THREADS", "1")  # a process with threads should not fork
            multiprocessing.forkserver.ensure_running()
        self.Pipe, self.Value = self._context.Pipe, self._context.Value

    def Process(self, *, target, args, **options):  # noqa: N802 - the name that a context has
        begin = dict(os.environ), target, args
        return self._context.Process(target=work, args=begin, **options)


def work(environment, target, args):
    """Do the work of a process under these environment variables."""
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


def fork_workers(patch):
    """Have trainers of this process fork their workers, until the end of a patch."""
    warm = WarmContext()
    for module in (worker_process, replicas):
        patch.setattr(module, "get_context", lambda _method: warm)
