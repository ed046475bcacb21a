"""Members on this machine."""

import pytest

from capsule.study import local
from capsule.study.local import Local


@pytest.mark.parametrize(
    ("chosen", "cores", "wanted"), [(None, 1, 8), (None, 3, 2), (None, 16, 1), (5, 3, 5)]
)
def test_as_many_members_run_as_the_cores_of_the_study_allow(
    directory, monkeypatch, chosen, cores, wanted
):
    ran = []
    monkeypatch.setattr(local, "run_locally", lambda *given: ran.append(given[3]))
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: range(8))
    resources = directory.lock.study.resources.model_copy(update={"cores": cores})
    study = directory.lock.study.model_copy(update={"resources": resources})
    directory.lock = directory.lock.model_copy(update={"study": study})
    Local(chosen).run(directory, [], None, lambda: None)
    assert ran == [wanted]
