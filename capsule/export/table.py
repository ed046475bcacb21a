"""Metrics as CSV: one row for each value, under the same six columns for every run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from capsule.export.runs import ExportedRun
from capsule.host.outputs import write_output

# episode: place of a return among those of its evaluation; time: seconds since the epoch. Either is
# empty where there is none.
COLUMNS = ("run", "metric", "step", "episode", "value", "time")
RETURN = "return"
Row = tuple[str | int, ...]


def export_table(runs: Iterable[ExportedRun], path: Path) -> None:
    """Write what runs logged, and the return of every evaluated episode.

    Raises:
        OSError: The file cannot be written.
    """
    text = table_text([COLUMNS])
    for run in runs:
        text += table_text(_rows(run))
    write_output(path, text.encode())


def table_text(rows: Iterable[Row]) -> str:
    """Return rows as lines of CSV."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()


def row(run: str, metric: str, step: int, value: float, time: float | None) -> Row:
    """Return the row of a value; numbers keep all of their digits."""
    return run, metric, step, "", repr(value), "" if time is None else repr(time)


def _rows(run: ExportedRun) -> Iterator[Row]:
    for metric in run.logged:
        for point in metric.points:
            yield row(run.name, metric.name, point.step, point.value, point.time)
    for prefix, networks in run.evaluations.items():
        for network in networks:
            for number, value in enumerate(network.returns):
                yield run.name, prefix + RETURN, network.step, number, repr(value), ""
