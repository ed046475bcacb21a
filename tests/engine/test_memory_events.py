"""What the kernel counts of processes that it killed for their memory."""

from unittest.mock import Mock

import pytest

from capsule.engine import memory_events, process
from capsule.engine.memory_events import oom_kills

EVENTS = "low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"


@pytest.mark.parametrize(
    ("groups", "file", "content", "expected"),
    [
        ("0::/job_7\n", "job_7/memory.events", EVENTS, 2),
        ("0::/\n", "memory.events", EVENTS, 2),
        ("0::/\n", "other", EVENTS, None),
        ("0::/job_7\n", "job_7/memory.events", "low 0\n", None),
        ("8:pids:/x\n4:memory:/slurm/7\n0::/x\n", "memory/slurm/7/memory.oom_control", CONTROL, 3),
        ("0::/x\n4:cpu,memory:/7\n", "memory/7/memory.oom_control", CONTROL, 3),
        ("4:cpu:/7\n", "memory/7/memory.oom_control", CONTROL, None),
        ("", "memory.events", EVENTS, None),
    ],
)
def test_the_count_is_that_of_this_control_group(
    tmp_path, monkeypatch, groups, file, content, expected
):
    (tmp_path / "groups").write_text(groups)
    path = tmp_path / "mounts" / file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    monkeypatch.setattr(memory_events, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory_events, "_MOUNTS", tmp_path / "mounts")
    assert oom_kills() == expected


def test_a_machine_without_control_groups_has_no_count(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_events, "_GROUPS", tmp_path / "missing")
    assert oom_kills() is None


@pytest.mark.parametrize(
    ("counts", "killed"), [((2, 3), True), ((2, 2), False), ((None, None), False), ((5, 5), False)]
)
def test_a_process_was_out_of_memory_if_the_count_rose(monkeypatch, counts, killed):
    monkeypatch.setattr(process, "oom_kills", Mock(side_effect=counts))
    running = process.RunningProcess(Mock(), 0, enclosed=False)
    assert (running.was_out_of_memory() is not None) == killed
