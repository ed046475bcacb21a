"""The catalogue of findings, and writing mitigations into a spec."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.diagnosis.apply import apply_patch, patch_of, patched
from capsule.diagnosis.attribution import line_findings
from capsule.diagnosis.entropy import entropy_findings, race_findings, unreached_findings
from capsule.diagnosis.findings import CATALOGUE, finding, shortened
from capsule.diagnosis.settings import described, given_up, in_force, tailored, with_settings
from capsule.entropy.report import EntropyReport, ProgramReport, RequestTally
from capsule.experiment.errors import CapsuleError
from capsule.host.spec_file import parse_spec
from capsule.training.instruments.report import InstrumentReport, Location, Variable

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/diagnose.md").read_text()
SPEC = """\
# What I try
schema: capsule/spec/v1
name: mine   # short
image:
  packages:
    - torch==2.13.0  # with CUDA
    - "numpy==2.4.6"
environment: {suite: gymnasium, id: CartPole-v1}
trainer: {algorithm: dqn, network: mlp, total_steps: 20_000_000}
determinism:
  # too slow otherwise
  algorithms: off  # really?

entropy: {mode: system}
"""


def test_the_page_lists_every_finding_with_level_cause_and_fix():
    row = re.compile(r"^\| (CAP-D\d{3}) \| ([^|]+) \| ([^|]+) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
    rows = row.findall(PAGE)
    assert [code for code, _, _ in rows] == list(CATALOGUE)
    for code, level, title in rows:
        assert level.startswith(CATALOGUE[code].level)
        assert title == CATALOGUE[code].title


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_patch_is_a_field_of_the_spec_and_is_named_in_its_effect(code):
    for remedy in CATALOGUE[code].remedies:
        setting = {remedy.field: remedy.value}
        assert described(setting) in remedy.effect
        assert parse_spec(patched(SPEC, setting).encode(), "patched")


def test_a_location_is_shown_without_the_folders_of_the_run():
    for file in ("/run/workspace/train.py", "/x/workspace/train.py", "train.py"):
        assert shortened(Location(file=file, line=1, function="f")).file == "train.py"
    deep = Location(file="/usr/lib/python3/dist-packages/gym/core.py", line=1, function="f")
    assert shortened(deep).file == "gym/core.py"


def test_a_patch_holds_what_errors_and_warnings_ask_for():
    found = [finding("CAP-D105", ""), finding("CAP-D202", ""), finding("CAP-D107", "")]
    assert patch_of(found) == {"determinism.algorithms": "error", "determinism.hash_seed": 0}
    assert patch_of([finding("CAP-D302", "", level="note")]) == {}


def test_comments_order_and_notation_survive():
    patch = {"determinism.algorithms": "error", "entropy.mode": "virtual"}
    expected = SPEC.replace("algorithms: off  #", "algorithms: error #")
    assert patched(SPEC, patch) == expected.replace("mode: system", "mode: virtual")
    assert patched(SPEC, {}) == SPEC


@pytest.mark.parametrize("path", sorted((ROOT / "specs").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_shipped_spec_only_gains_lines(path):
    before = path.read_text()
    after = patched(before, {"entropy.clock": "fixed", "determinism.hash_seed": 0})
    assert set(before.splitlines()) <= set(after.splitlines())
    assert parse_spec(after.encode(), path.name).entropy.clock == "fixed"


PATCHES = [
    (remedy.field, remedy.value) for entry in CATALOGUE.values() for remedy in entry.remedies
]


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(PATCHES)))
def test_patching_is_idempotent(patches):
    once = patched(SPEC, dict(patches))
    assert patched(once, dict(patches)) == once


def test_a_file_is_patched_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    apply_patch(path, {"entropy.mode": "virtual"})
    assert "mode: virtual" in path.read_text()
    before = path.read_text()
    with pytest.raises(CapsuleError) as caught:
        apply_patch(path, {"entropy.mode": "no such mode"})
    assert caught.value.code == "CAP-S003"
    assert path.read_text() == before
    monkeypatch.setattr("capsule.diagnosis.apply.write_atomic", refuse)
    with pytest.raises(CapsuleError) as caught:
        apply_patch(path, {"entropy.mode": "recorded"})
    assert caught.value.code == "CAP-D004"
    assert path.read_text() == before


def test_a_spec_that_names_a_file_is_patched(tmp_path):
    start_set = {
        "schema": "capsule/starts/v1", "run": "a" * 64, "task": "CartPole-v1",
        "full_action_set": False, "candidates": 1000, "shortlist": 250,
        "min_actions": 55, "max_actions": 95, "starts": [[1]],
    }  # fmt: skip
    (tmp_path / "starts.json").write_text(json.dumps(start_set))
    path = tmp_path / "spec.yaml"
    path.write_text(f"{SPEC}evaluation: {{starts: 1, start_set: starts.json}}\n")
    apply_patch(path, {"entropy.mode": "virtual"})
    assert "mode: virtual" in path.read_text()
    assert "start_set: starts.json" in path.read_text()


def test_a_comment_that_cannot_be_kept_is_refused_and_nothing_is_lost(tmp_path):
    text = SPEC.replace("name: mine   # short", "name: # short\n  mine\n")
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(CapsuleError) as caught:
        apply_patch(path, {"seeds.root": 2})
    assert caught.value.code == "CAP-D004"
    assert path.read_text() == text


def test_a_spec_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CapsuleError) as caught:
        apply_patch(tmp_path / "none.yaml", {})
    assert caught.value.code == "CAP-S001"


def refuse(path, data):
    raise PermissionError(13, "Permission denied")


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


@pytest.mark.parametrize(
    ("report", "strace", "expected"),
    [
        (make_report(), STRACE, []),
        (make_report(), STRACE * 2, [("CAP-D303", "warning")]),
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


def reported(run, **digests):
    """Return a report with the variable x of the first line of two modules of one name."""
    variables = []
    for module, digest in digests.items():
        where = Location(
            file=f"/runs/{run}/workspace/{module}/__init__.py", line=1, function="<module>"
        )
        facts = dict.fromkeys(("digest", "unordered", "elements"), digest)
        variables.append(
            Variable(where=where, name="x", values=1, kind="int", shown=(digest,), **facts)
        )
    return InstrumentReport.model_construct(
        variables=tuple(variables), sources=(), operators=(), text={}
    )


def test_variables_of_modules_of_one_name_are_told_apart():
    first, second = reported("run-1", a="1", b="2"), reported("run-2", a="3", b="2")
    (item,) = line_findings(first, second, spec_of())
    assert (item.code, item.where.file) == ("CAP-D109", "a/__init__.py")
    assert "(1 and 3)" in item.message


OWN = {
    "name": "own",
    "accelerator": {"kind": "cpu"},
    "code": {},
    "trainer": {"command": ["python", "train.py"]},
}


def spec_of(document=OWN, **sections):
    return parse_spec(json.dumps({**document, **sections}).encode(), "test")


@pytest.mark.parametrize("code", CATALOGUE)
def test_nothing_is_recommended_that_is_in_force(code):
    item = tailored(finding(code, ""), spec_of())
    assert item.patch == {}
    assert item.mitigation == CATALOGUE[code].fix


def test_what_is_not_in_force_is_recommended():
    item = tailored(finding("CAP-D102", ""), spec_of(entropy={"clock": "system"}))
    assert item.patch == {"entropy.clock": "virtual"}
    assert "entropy.clock: virtual" in item.mitigation
    uncurable = finding("CAP-D102", "", curable=False)
    assert tailored(uncurable, spec_of(entropy={"clock": "system"})).patch == {}


def test_a_field_that_the_spec_may_not_hold_is_not_recommended():
    assert with_settings(spec_of(), {"recording.trace_interval": 8}) is None
    assert with_settings(spec_of(), {"entropy.clock": "fixed"}).entropy.clock == "fixed"
    native = finding("CAP-D102", "").model_copy(update={"patch": {"recording.trace_interval": 8}})
    assert tailored(native, spec_of()).patch == {}


def test_the_default_clock_is_in_force_without_being_written():
    assert in_force(spec_of(), "entropy.clock") == "virtual"
    assert in_force(spec_of(), "determinism.threads") == 1


def test_every_guarantee_that_is_given_up_is_a_candidate():
    assert given_up(spec_of()) == []
    weak = {
        "entropy": {"clock": "system", "mode": "system", "address_randomization": True},
        "determinism": {"threads": None, "algorithms": "warn", "sorted_listings": False},
    }
    (item,) = given_up(spec_of(**weak))
    assert item.patch == {
        "entropy.mode": "virtual",
        "entropy.address_randomization": False,
        "entropy.clock": "virtual",
        "determinism.threads": 1,
        "determinism.algorithms": "error",
        "determinism.sorted_listings": True,
    }
    assert "entropy.clock: system" in item.message
    assert "determinism.threads: null" in item.message


def test_threads_that_draw_more_in_one_run_are_named():
    same = {("0.2x", "0"): 3}
    assert race_findings(same, same) == race_findings({}, {}) == []
    (item,) = race_findings({**same, ("0.2x", "0-1"): 5}, {**same, ("0.2x", "0-2"): 5})
    assert item.code == "CAP-D111"
    assert "thread 0-1 of process 0.2x 5 and 0, thread 0-2 of process 0.2x 0 and 5" in item.message
    many = {("0.2x", f"0-{number}"): 1 for number in range(9)}
    assert "and 6 more threads" in race_findings(many, {})[0].message


def test_programs_beyond_the_preloaded_library_are_named():
    assert unreached_findings(make_report()) == []
    (item,) = unreached_findings(make_report(preloaded=False))
    assert (item.code, item.message) == ("CAP-D112", "/bin/tool")
    assert "RDRAND" in item.mitigation
