"""W&B's offline runs: records of W&B's own messages in LevelDB's log format."""

import json
import struct
import subprocess
import sys

import pytest

from capsule.bundle.trust import TrustPolicy
from capsule.export.runs import read_runs
from capsule.export.wandb import export_wandb
from capsule.host.errors import CapsuleError
from tests.export.conftest import TRAINING, logged

RUNS = read_runs(TRAINING, TrustPolicy.of([]))


BLOCK = 1 << 15


def chunks(data):
    """Yield the pieces of LevelDB's log format, each with its type.

    A file has 7 bytes of W&B's own in front, and blocks of 32 KiB: a piece does not cross their
    borders, and less than a header's 7 bytes at the end of a block are left unused.
    """
    position = 7
    while position < len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        yield kind, data[position + 7 : position + 7 + length]
        position += 7 + length


def records(path):
    """Return the records of a ``.wandb`` file, as W&B's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, found, parts = path.read_bytes(), [], b""
    assert data[:4] == b":W&B"
    for kind, chunk in chunks(data):
        parts += chunk
        if kind in (1, 4):  # a whole record, or its last piece
            record = Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def is_history(record):
    return record.WhichOneof("record_type") == "history"


def values_of(record):
    """Return the values of a record of history, by name."""
    items = record.history.item
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


@pytest.mark.slow
def test_wandb_reads_the_metrics_and_the_settings(tmp_path):
    export_wandb(RUNS, tmp_path / "out")
    (path,) = (tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")
    found = records(path)
    (run,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert (run.display_name, run.run_id, run.project) == (RUNS[0].name, RUNS[0].id, "dqn")
    settings = {each.key: json.loads(each.value_json) for each in run.config.update}
    assert settings["seeds.root"] == RUNS[0].parameters["seeds.root"]
    assert settings["capsule.claim_id"] == RUNS[0].claims.claim_id()
    assert run.host == "unknown"
    rows = list(map(values_of, filter(is_history, found)))
    assert {row["_step"]: row["training/loss"] for row in rows if "training/loss" in row} == logged(
        "loss"
    )
    assert all(record.WhichOneof("record_type") != "environment" for record in found)


def test_a_machine_without_wandb_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(CapsuleError, match="not installed") as raised:
        export_wandb(RUNS, tmp_path / "out")
    assert raised.value.code == "CAP-P205"
    assert not (tmp_path / "out").exists()


LISTENING = """
import socket, sys, time
from pathlib import Path

asked = []

def hook(event, arguments):
    if event == "socket.getaddrinfo":
        asked.append(arguments[0])
    elif event == "socket.connect" and arguments[0].family != socket.AF_UNIX:
        asked.append(arguments[1])

sys.addaudithook(hook)
from capsule.bundle.trust import TrustPolicy
from capsule.export.runs import read_runs
from capsule.export.wandb import export_wandb

export_wandb(read_runs(Path(sys.argv[1]), TrustPolicy.of([])), Path(sys.argv[2]))
time.sleep(1)  # for threads that W&B may have started
print(asked)
"""


@pytest.mark.slow
def test_nothing_is_asked_for_on_the_network(tmp_path):
    command = [sys.executable, "-c", LISTENING, TRAINING, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
