"""Scores of programs: what pointers lead to, and whole studies of a program."""

import json

import pytest

from capsule.bundle.claims import ProgramClaims
from capsule.bundle.keys import generate, load_private
from capsule.bundle.trust import TrustPolicy
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.contract import Output
from capsule.host.errors import CapsuleError
from capsule.study import program_scores
from capsule.study.program_scores import ScoreReader, program_tasks
from capsule.study.report import StudyReport, csv_report, page_report
from capsule.study.results import MemberIdentity, StudyResults, member_result
from capsule.study.study_bundle import open_study, pack_study
from capsule.study.tables import tables_of
from tests.study.studies import BASE, GROUPS, ZERO, make_file, make_lock

METRICS = "results/metrics.json"
SCORES = {"accuracy": f"{METRICS}#/test/accuracy", "loss": f"{METRICS}#/loss"}
PROGRAM = {
    "schema": "capsule/spec/v1",
    "name": "mine",
    "code": {"path": "."},
    "trainer": {"command": ["python", "train.py"]},
}
RUNS = {"seeded": {"runs": 3}, "other": {"runs": 3, "vary": ["root"]}}


def program_lock(scores=SCORES):
    return make_lock(RUNS, base=PROGRAM, scores=scores)


def scores_of(text, pointer):
    study = program_lock({"x": f"a.json#{pointer}"}).study
    ((_, points),) = program_tasks(study, {"a.json": text.encode()})
    return [point.returns for point in points]


def result(lock, member, content, sha256=None, scores=None):
    """Return the result of a member whose program wrote this file."""
    claims = ProgramClaims(
        lock=member.lock,
        image=None,
        relaxations=("engine=process",),
        flags={},
        libraries={},
        outputs={METRICS: Output(size=len(content), sha256=sha256 or sha256_hex(content))},
        standard_output=None,
    )
    identity = MemberIdentity(
        name=member.name, claim_id=claims.claim_id(), bundle=sha256_hex(member.name.encode())
    )
    scores = scores or ScoreReader(lock.study)
    return member_result(lock, identity, claims, lambda _claims, _path: content, scores)


def make_program_results(lock):
    contents = [
        json.dumps({"test": {"accuracy": [0.5, 0.875, 0.75 + place / 100]}, "loss": place}).encode()
        for place in range(len(lock.members))
    ]
    contents[1] = contents[2] = contents[0]
    members = zip(lock.members, contents, strict=True)
    return StudyResults(lock, tuple(result(lock, *each) for each in members))


def test_members_that_share_a_file_share_its_scores_and_do_not_fill_the_memory(monkeypatch):
    """A bundle stores the file once, however many members claim it."""
    lock, content = program_lock(), b'{"test": {"accuracy": [1, 2, 3]}, "loss": 4}'
    scores = ScoreReader(lock.study)
    first, second, third, *_ = lock.members
    tasks = [result(lock, each, content, scores=scores).tasks for each in (first, second)]
    assert tasks[0] is tasks[1]
    monkeypatch.setattr(program_scores, "MAX_SCORES", 11)
    scores = ScoreReader(lock.study)
    for member in (first, second):
        result(lock, member, content, scores=scores)
    with pytest.raises(CapsuleError, match="the members of the study have more than 11 scores"):
        result(lock, third, content, scores=scores)
    monkeypatch.setattr(program_scores, "MAX_SCORES", 3)
    with pytest.raises(CapsuleError, match="more than 3 scores"):
        result(lock, first, content)


def test_a_file_with_scores_has_no_more_values_than_a_document(monkeypatch):
    """Each takes up to a hundred times its two bytes."""
    monkeypatch.setattr(program_scores, "MAX_VALUES", 6)
    lock = program_lock({"loss": f"{METRICS}#/loss"})
    result(lock, lock.members[0], b'{"loss": 1, "other": [1, 2]}')
    with pytest.raises(CapsuleError, match="has more than 6 values"):
        result(lock, lock.members[0], b'{"loss": 1, "other": [1, 2, 3, 4, 5]}')


# The document and the values are those of RFC 6901, section 5; those that are no numbers are not
# scores.
RFC_6901 = json.dumps(
    {"foo": ["bar", "baz"], "": 0, "a/b": 1, "c%d": 2, "e^f": 3, "g|h": 4, "i\\j": 5}
    | {'k"l': 6, " ": 7, "m~n": 8}
)


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        *[("/", 0), ("/a~1b", 1), ("/c%d", 2), ("/e^f", 3), ("/g|h", 4), ("/i\\j", 5)],
        *[('/k"l', 6), ("/ ", 7), ("/m~0n", 8)],
    ],
)
def test_pointers_are_those_of_rfc_6901(pointer, value):
    assert scores_of(RFC_6901, pointer) == [(float(value),)]


def test_a_list_has_a_number_for_each_evaluation():
    assert scores_of("[1, 2.5]", "") == [(1.0,), (2.5,)]
    assert scores_of('{"a": [{"b": 3}]}', "/a/0/b") == [(3.0,)]
    assert scores_of('["0x1.8p-1", "-0x1p+1"]', "") == [(0.75,), (-2.0,)]


@pytest.mark.parametrize(
    ("text", "pointer", "reason"),
    [
        ("{", "", "does not exist or cannot be read"),
        pytest.param("[" * 100_000, "", "does not exist or cannot be read", id="brackets"),
        ("{}", "/a", "does not exist or cannot be read: 'a'"),
        ("[1]", "/1", "does not exist or cannot be read: list index out of range"),
        ("[1, 2]", "/01", "not an index"),
        ("[1, 2]", "/-", "not an index"),
        ("1", "/a", "does not exist or cannot be read"),
        ("[]", "", "is an empty list"),
        ("true", "", "neither a number nor a list of numbers: True"),
        ('"1"', "", "neither a number nor a list of numbers: '1'"),
        ('"0x"', "", "neither a number nor a list of numbers"),
        ('"0x1p9999"', "", "neither a number nor a list of numbers"),
        ("1" + "0" * 400, "", "neither a number nor a list of numbers"),
        ("[1, null]", "", "neither a number nor a list of numbers: None"),
    ],
)
def test_what_is_no_score_is_refused(text, pointer, reason):
    with pytest.raises(ValueError, match=reason):
        scores_of(text, pointer)


def test_tables_have_a_row_for_each_score():
    tables = tables_of(make_program_results(program_lock()))
    found = {(row.group, row.task, row.network): row for row in tables.groups}
    assert {key[1] for key in found} == {"accuracy", "loss"}
    row = found["seeded", "accuracy", "final"]
    assert (row.mean, row.standard_deviation) == (0.75, 0)
    assert found["seeded", "accuracy", "best"].mean == 0.875
    row = found["other", "loss", "final"]
    assert (row.mean, row.standard_deviation) == (4, 1)


@pytest.mark.slow
def test_a_bundle_has_the_outputs_that_scores_come_from(tmp_path):
    results = make_program_results(program_lock())
    key = generate(tmp_path / "alice")
    path, bundle = pack_study(results, load_private(tmp_path / "alice"), tmp_path)
    with open_study(path, TrustPolicy.of([])) as (opened, found):
        assert found.claims.tables == bundle.claims.tables
        kept = [name for name in opened.files if name.startswith("outputs/")]
        assert len(kept) == 4  # three members wrote the same file
    assert key
    report = StudyReport.of(results)
    assert ",accuracy,2,1,0.875," in csv_report(report)
    assert "evaluation" in page_report(report, "x")


@pytest.mark.parametrize(
    ("content", "sha256", "reason"),
    [
        (b'{"loss": 1}', None, "does not exist or cannot be read: 'test'"),
        (b'{"test": {"accuracy": NaN}, "loss": 1}', None, "not a finite number"),
        (b"{}", ZERO, "is not the one that it claims"),
    ],
)
def test_a_member_without_its_scores_is_refused(content, sha256, reason):
    lock = program_lock()
    with pytest.raises(CapsuleError, match=reason) as refused:
        result(lock, lock.members[0], content, sha256)
    assert refused.value.code == "CAP-Y016"
    assert "seeded.1" in refused.value.message


def test_a_program_whose_study_names_no_scores_is_not_scored():
    lock = program_lock(None)
    with pytest.raises(CapsuleError, match="does not say where") as refused:
        result(lock, lock.members[0], b"{}")
    assert refused.value.code == "CAP-Y016"
    assert "'scores'" in refused.value.fix


def test_an_output_that_is_not_claimed_is_refused():
    lock = program_lock({"x": "other.json#/x"})
    with pytest.raises(CapsuleError, match=r"no output other\.json"):
        result(lock, lock.members[0], b"{}")


def test_trainings_have_their_scores_from_evaluations():
    file = make_file(GROUPS, BASE, scores=SCORES)
    with pytest.raises(CapsuleError, match="scores: group deterministic trains by dqn") as refused:
        list(file.member_specs(None))
    assert refused.value.code == "CAP-S003"
