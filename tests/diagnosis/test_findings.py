"""The catalogue of findings, and what the accounts of entropy find."""

import re
from pathlib import Path

import pytest

from capsule.diagnosis.entropy import entropy_findings, race_findings, unreached_findings
from capsule.diagnosis.findings import CATALOGUE, shortened
from capsule.entropy.report import EntropyReport, ProgramReport, RequestTally
from capsule.training.instruments.report import Location

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/diagnose.md").read_text()


def test_the_page_lists_every_finding_with_level_cause_and_fix():
    row = re.compile(r"^\| (CAP-D\d{3}) \| ([^|]+) \| ([^|]+) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
    rows = row.findall(PAGE)
    assert [code for code, _, _ in rows] == list(CATALOGUE)
    for code, level, title in rows:
        assert level.startswith(CATALOGUE[code].level)
        assert title == CATALOGUE[code].title


def test_a_location_is_shown_without_the_folders_of_the_run():
    for file in ("/run/workspace/train.py", "/x/workspace/train.py", "train.py"):
        assert shortened(Location(file=file, line=1, function="f")).file == "train.py"
    deep = Location(file="/usr/lib/python3/dist-packages/gym/core.py", line=1, function="f")
    assert shortened(deep).file == "gym/core.py"


def make_report(mode="virtual", **program):
    facts = {
        "process": "0",
        "executable": "/bin/tool",
        "getrandom": RequestTally(),
        "executed": True,
        "preloaded": True,
        "inside_libc": RequestTally(calls=1, bytes=8),
        "devices": RequestTally(),
        "unanswered": 0,
        **program,
    }
    return EntropyReport.model_construct(
        mode=mode, supervised=True, programs=(ProgramReport.model_construct(**facts),)
    )


STRACE = b'12 getrandom("\\x1f", 8, GRND_NONBLOCK) = 8\n'
INTERRUPTED = (
    b'12 getrandom( <unfinished ...>\n12 <... getrandom resumed>"\\x1f", 8, GRND_NONBLOCK) = 8\n'
)
PROBES = (
    b'12 getrandom("\\x65", 1, 0)           = 1\n'
    b"12 getrandom(0x7f0000001000, 1, 0)      = -1 EFAULT (Bad address)\n"
    b"12 getrandom( <unfinished ...>\n"
    b'12 <... getrandom resumed>"\\x65", 1, 0) = 1\n'
)


@pytest.mark.parametrize(
    ("report", "strace", "expected"),
    [
        (make_report(), STRACE, []),
        (make_report(), STRACE * 2, [("CAP-D303", "warning")]),
        (make_report(), STRACE + INTERRUPTED, [("CAP-D303", "warning")]),
        (make_report(), STRACE + PROBES, []),
        (make_report("system"), STRACE, [("CAP-D301", "warning")]),
        (make_report(getrandom=RequestTally(calls=2)), STRACE * 3, [("CAP-D302", "note")]),
        (make_report(unanswered=1), b"", [("CAP-D302", "warning")]),
    ],
)
def test_the_accounts_of_entropy(tmp_path, report, strace, expected):
    (tmp_path / "strace.txt").write_bytes(strace)
    found = entropy_findings(report, tmp_path / "strace.txt")
    assert [(item.code, item.level) for item in found] == expected


def test_a_link_in_the_place_of_what_strace_wrote_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_bytes(STRACE * 2)
    (tmp_path / "strace.txt").symlink_to(tmp_path / "elsewhere")
    assert entropy_findings(make_report(), tmp_path / "strace.txt") == []


def test_threads_that_draw_more_in_one_run_are_named():
    same = {("0.2x", "0"): 3}
    assert race_findings(same, same) == race_findings({}, {}) == []
    (item,) = race_findings({**same, ("0.2x", "0-1"): 5}, {**same, ("0.2x", "0-2"): 5})
    assert item.code == "CAP-D111"
    assert "thread 0-1 of process 0.2x 5 and 0, thread 0-2 of process 0.2x 0 and 5" in item.message
    many = {("0.2x", f"0-{number}"): 1 for number in range(9)}
    assert "and 6 more threads" in race_findings(many, {})[0].message
    four = dict(list(many.items())[:4])
    assert race_findings(four, {})[0].message.endswith("and 1 more thread")


def test_programs_beyond_the_preloaded_library_are_named():
    assert unreached_findings(make_report()) == []
    (item,) = unreached_findings(make_report(preloaded=False))
    assert (item.code, item.message) == ("CAP-D112", "/bin/tool")
    assert "RDRAND" in item.mitigation
