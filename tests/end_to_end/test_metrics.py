"""``capsule run --metrics``: the metrics of a run in a container, which it does not notice."""

import csv

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.conftest import run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.xdist_group("programs"),
]

SPEC = """\
schema: capsule/spec/v1
name: logged
code: {path: logged}
image: {packages: []}
trainer: {command: [python, train.py]}
limits: {memory_mb: 1024, minutes: 5}
"""
PROGRAM = """\
import random
from capsule.training import run

with run() as r:
    for step in range(1, 301):
        r.log(step, loss=random.random() / step)
"""


@pytest.fixture(scope="module")
def place(workplace):
    (workplace / "logged").mkdir()
    (workplace / "logged" / "train.py").write_text(PROGRAM)
    (workplace / "logged.yaml").write_text(SPEC)
    return workplace


def test_a_run_is_the_same_with_and_without_metrics(place, tmp_path):
    alone = run(place, spec="logged.yaml")
    table = tmp_path / "metrics.csv"
    with_csv = run(place, "--metrics", f"csv:{table}", spec="logged.yaml")
    logs = tmp_path / "logs"
    with_events = run(place, "--metrics", f"tensorboard:{logs}", spec="logged.yaml")
    assert alone.claim_id == with_csv.claim_id == with_events.claim_id

    with table.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["step"]) for row in rows] == list(range(1, 301))
    folder = logs / with_events.directory.name
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    shown = [event.value for event in accumulator.Scalars("training/loss")]
    assert shown == pytest.approx([float(row["value"]) for row in rows], rel=2**-23)
