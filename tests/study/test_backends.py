"""Where members run."""

import json

import pytest

from capsule.host.errors import CapsuleError
from capsule.study.backends import parse_backend
from capsule.study.kubernetes import Kubernetes
from capsule.study.local import Local
from capsule.study.ray import Ray
from capsule.study.slurm import Slurm


def test_local_backends():
    assert parse_backend("local", print) == Local(note=print)
    assert parse_backend("local:12", print) == Local(12, print)


def test_slurm():
    assert parse_backend("slurm", print) == Slurm(print)


def test_kubernetes(tmp_path):
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "spec": {"template": {"spec": {"containers": [{"image": "capsule"}]}}},
    }
    (tmp_path / "my job.yaml").write_text(json.dumps(manifest))
    backend = parse_backend(f"kubernetes:{tmp_path}/my job.yaml", print)
    assert isinstance(backend, Kubernetes)
    assert backend.template.document.tree == manifest


def test_ray():
    assert parse_backend("ray://head:10001", print) == Ray("ray://head:10001", print)


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
        "slurm:2",
        "local:2\n",
        "kubernetes",
        "kubernetes:",
        "ray",
        "ray://",
        "ray://head",
        "ray://head:",
        "ray://he ad:10001",
        "ray://head:10001/",
    ],
)
def test_other_words_are_refused(text):
    with pytest.raises(CapsuleError) as caught:
        parse_backend(text)
    assert caught.value.code == "CAP-Y014"
    assert repr(text) in caught.value.message
    assert "local:N" in caught.value.fix
