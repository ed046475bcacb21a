"""Where members run."""

import pytest

from capsule.host.errors import CapsuleError
from capsule.study import backends
from capsule.study.backends import Local, parse_backend


def test_local_backends():
    assert parse_backend("local") == Local()
    assert parse_backend("local:12") == Local(12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "local:",
        "local:0",
        "local:-1",
        "local:1.5",
        "local: 2",
        "local:99999",
        "LOCAL",
        "nonsense",
        "local:2\n",
    ],
)
def test_other_words_are_refused(text):
    with pytest.raises(CapsuleError) as caught:
        parse_backend(text)
    assert caught.value.code == "CAP-Y014"
    assert repr(text) in caught.value.message
    assert "local:N" in caught.value.fix


@pytest.mark.parametrize(
    ("chosen", "cores", "wanted"), [(None, 1, 8), (None, 3, 2), (None, 16, 1), (5, 3, 5)]
)
def test_as_many_members_run_as_the_cores_of_the_study_allow(
    directory, monkeypatch, chosen, cores, wanted
):
    ran = []
    monkeypatch.setattr(backends, "run_locally", lambda *given: ran.append(given[3]))
    monkeypatch.setattr(backends.os, "sched_getaffinity", lambda _: range(8))
    resources = directory.lock.study.resources.model_copy(update={"cores": cores})
    study = directory.lock.study.model_copy(update={"resources": resources})
    directory.lock = directory.lock.model_copy(update={"study": study})
    Local(chosen).run(directory, [], None, lambda: None)
    assert ran == [wanted]
