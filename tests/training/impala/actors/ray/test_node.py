"""A container as a node of a cluster; tests/end_to_end/test_cluster.py has real ones."""

import subprocess
import sys

import pytest

from capsule.training.impala.actors.ray import node

COUNTING = "import sys; p = open(sys.argv[1], 'a+'); p.write('.'); sys.exit(p.tell() < {})"


def attempts(monkeypatch, tmp_path, needed):
    """Start what succeeds in its ``needed``-th attempt; return how many were made."""
    monkeypatch.setattr(node, "_RAY", (sys.executable, "-c", COUNTING.format(needed)))
    node._start([str(tmp_path / "attempts")])
    return len((tmp_path / "attempts").read_text())


def test_a_node_has_several_attempts(monkeypatch, tmp_path):
    assert attempts(monkeypatch, tmp_path, 3) == 3


def test_a_node_that_never_starts_is_given_up(monkeypatch, tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        attempts(monkeypatch, tmp_path, 99)
    assert len((tmp_path / "attempts").read_text()) == node.ATTEMPTS


def test_rays_own_processes_may_keep_compiled_modules(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    variables = node._variables()
    assert "PYTHONDONTWRITEBYTECODE" not in variables
    assert variables["PYTHONPYCACHEPREFIX"] == node._COMPILED
    assert variables["PYTHONHASHSEED"] == "0"
