"""What people read of a study: the page, CSV, LaTeX and the terminal."""

import csv
import html
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from capsule.host.errors import CapsuleError
from capsule.study.report import (
    StudyReport,
    csv_report,
    latex_report,
    page_report,
    show_report,
)
from capsule.study.results import StudyResults
from tests.report.terminals import printed
from tests.study.studies import CLAIMED, final_score, make_lock, make_results


@pytest.fixture(scope="module")
def report():
    return StudyReport.of(make_results())


class Texts(HTMLParser):
    """Collects the elements and texts of a page, which have to be balanced."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, _attributes):
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, _attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_every_number_of_the_csv_has_its_claim_id(report):
    rows = list(csv.DictReader(io.StringIO(csv_report(report))))
    members = {member.identity.claim_id: member for member in report.results.members}
    assert len(rows) == 3 * len(report.results.members)
    finals = {member.lock: final_score(member) for member in report.results.lock.members}
    for row in rows:
        member = members[row["claim_id"]]
        assert row["group"] == member.plan.group
        if row["step"] == "8":
            assert float(row["score"]) == finals[member.claims.lock]


def test_the_latex_table_is_that_of_the_paper(report):
    text = latex_report(report)
    assert text.count(r"\begin{tabular}{lrrr}") == text.count(r"\end{tabular}") == 1
    lines = [line for line in text.splitlines() if " & " in line]
    assert [line.split(" & ")[0] for line in lines] == [
        "Metric",
        "Average Score (Best)",
        "Standard Deviation (Best)",
        "Relative Standard Deviation (Best)",
        "Average Score (Final)",
        "Standard Deviation (Final)",
        "Relative Standard Deviation (Final)",
    ]
    assert lines[0] == r"Metric & deterministic & exploration & rates \\"
    assert not re.search(r"(?<!\\)%(?! )", text)  # a per cent sign would begin a comment


def test_the_page_has_all_tables_and_figures(report):
    page = page_report(report, "studies/tiny", "exploration.1")
    assert '<meta name="generator" content="Capsule">' in page[:1024]  # see resolution/project.py
    parsed = Texts(page)
    assert parsed.open == []
    text = " ".join(parsed.texts)
    for member in report.results.members:
        assert member.identity.claim_id in text
        assert member.identity.bundle in text
    charts = page.count('role="img"')
    assert charts == 3 + 1 + 1 + 2  # curves, profile, settings, the two starts of a member
    assert page.count('class="band') == 3 + 3  # of each group's curve and profile
    assert "capsule study bundle studies/tiny --key KEY" in text


def elsewhere(lock=None):
    """Return the report of a machine on which one member came to another result."""
    results = make_results(lock)
    member = results.members[0]
    identity = member.identity.model_copy(update={"claim_id": "f" * 64})
    members = (replace(member, identity=identity), *results.members[1:])
    return StudyReport.of(StudyResults(results.lock, members))


@pytest.mark.slow
def test_two_machines_are_compared_by_claim_ids_and_on_one_chart(report):
    both = report.compared(elsewhere())
    page = page_report(both, "studies/tiny")
    assert "8 of 9 members have the same claim id on both machines" in page
    assert "this one differs: deterministic.1." in page
    assert page.count("second machine") == 6  # in the legend and the description of each chart
    assert "this one differs: deterministic.1." in printed(show_report, both, width=200)
    same = report.compared(StudyReport.of(make_results(missing=("rates.1.1",))))
    text = "8 of 8 members have the same claim id on both machines, of 9 in the study."
    assert text in printed(show_report, same, width=200)


def test_two_machines_without_common_members_are_not_said_to_agree():
    lock = make_lock({"a": {"runs": 2}})
    first, second = (StudyReport.of(make_results(lock, missing=(name,))) for name in ("a.1", "a.2"))
    both = first.compared(second)
    text = "None of 2 members has results on both machines."
    assert text in printed(show_report, both, width=200)
    assert text in page_report(both, "studies/tiny")


def test_a_single_run_has_no_interval():
    lock = make_lock({"a": {"runs": 1}, "b": {"runs": 1}, "c": {"runs": 3, "vary": ["root"]}})
    texts = Texts(page_report(StudyReport.of(make_results(lock)), "studies/tiny")).texts
    found = [text.strip() for text in texts if text.strip()]
    place = found.index("a > b")
    assert found[place + 2] == "-"
    assert found[found.index("a > c") + 2].startswith("[")


def test_settings_are_ranked_on_a_terminal_and_named_as_their_members():
    sample = {"count": 12, "fields": {"trainer.learning_rate": {"log_uniform": [1e-5, 1e-2]}}}
    grid = {"trainer.learning_rate": [0.1, 0.2], "trainer.discount": [0.5]}
    report = StudyReport.of(make_results(make_lock({"s": {"sample": sample}, "g": {"grid": grid}})))
    text = printed(show_report, report, width=100)
    for name, rate in (("1-1", "0.1"), ("1-2", "0.2")):
        values = rf"trainer\.discount 0\.5, trainer\.learning_rate {rate} "
        assert re.search(rf"│ {name} +│ \d+ +│ [-.\d]+ +│ {values}", text)
    assert f"{name}</td>" in page_report(report, "studies/tiny")
    assert "2 further settings of s: see the page (-o FILE).\n" in text
    joined = "differences between its settings where it has several: s (12), g (2)."
    for shown in (" ".join(text.split()), page_report(report, "."), latex_report(report)):
        assert joined in shown
    rows = text.partition("settings of s,")[2].splitlines()
    scores = [float(row.split("│")[3]) for row in rows if row.count("│") > 3]
    assert scores == sorted((row.score for row in report.tables.settings if row.group == "s"),
                            reverse=True)[:10]  # fmt: skip


@pytest.mark.parametrize(("holm", "differ"), [(0.1, "differ"), (0.143, "differ only without")])
def test_a_difference_of_variances_is_one_of_all_pairs(report, holm, differ):
    test = report.tables.variances[0].model_copy(
        update={"network": "final", "permutation_p_value": 0.048, "holm_p_value": holm}
    )
    tables = report.tables.model_copy(update={"variances": (test,)})
    text = printed(show_report, report._replace(tables=tables), width=80)
    assert f"(CartPole-v1, final) {differ}" in text
    found = f": p = 0.048 by permutations, p = {holm:.3f} corrected for all pairs (level 0.1).\n"
    assert found in text


@pytest.mark.parametrize(("image", "engine"), [(None, " --engine process"), (CLAIMED, "")])
def test_commands_on_the_page_are_ones_that_the_study_accepts(image, engine):
    results = make_results(make_lock({"a": {"runs": 2}}), image=image)
    report = StudyReport.of(results)._replace(claim_id="0" * 64)
    page = html.unescape(page_report(report, "my studies/a b.tar"))
    assert f"study verify 'my studies/a b.tar' --key KEY.pub --sample 2{engine}<" in page


def test_another_study_is_not_compared(report):
    other = elsewhere(make_lock({"a": {}}))
    with pytest.raises(CapsuleError) as refused:
        report.compared(other)
    assert refused.value.code == "CAP-Y040"


def test_names_from_elsewhere_stay_text():
    lock = make_lock({"a": {"settings": [{"environment.id": "<b>x</b>"}, {}]}})
    page = page_report(StudyReport.of(make_results(lock)), "<i>folder</i>")
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "<b>x</b>" not in page
    assert "<i>folder</i>" not in page


def test_names_from_elsewhere_do_not_control_the_terminal(report):
    names = {"task": "[/x]\x1b[2J\nend"}
    tables = report.tables
    groups = tuple(row.model_copy(update=names) for row in tables.groups[:2])
    differs = names | {"network": "final", "permutation_p_value": 0.0}
    variances = tuple(row.model_copy(update=differs) for row in tables.variances[:1])
    changed = tables.model_copy(
        update={"groups": (*groups, *tables.groups), "variances": variances}
    )
    hostile = report._replace(tables=changed)
    text = printed(show_report, hostile, width=200)
    assert "deterministic, [/x]\ufffd[2J\ufffdend" in text
    assert "([/x]\ufffd[2J\ufffdend, final) differ" in text
    # A line that is not a comment would be executed by LaTeX.
    assert f"% {report.results.lock.study.name}, [/x]\ufffd[2J\ufffdend\n" in latex_report(hostile)


@pytest.mark.slow
def test_a_study_in_progress_is_reported_as_incomplete():
    report = StudyReport.of(make_results(missing=("exploration.2", "exploration.3")))
    assert "2 of 9 members have no results yet" in page_report(report, "studies/tiny")
    assert "2 of 9 members have no results yet." in printed(show_report, report, width=120)
    # A group without results has no column, which the reader of a paper could not notice.
    assert "\n% Incomplete: 2 of 9 members have no results yet.\n" in latex_report(report)


def test_one_missing_member_is_written_in_the_singular():
    report = StudyReport.of(make_results(missing=("exploration.2",)))
    assert "1 of 9 members has no results yet." in printed(show_report, report, width=120)


def test_the_terminal_shows_each_group(report):
    shown = printed(show_report, report, width=100)
    assert all(group in shown for group in report.results.lock.study.groups)


def test_long_names_leave_the_numbers_of_a_narrow_terminal_whole(report):
    first, *others = report.tables.groups
    long = first.model_copy(update={"group": "a-group-of-a-long-name-" * 4, "task": "task-" * 20})
    tables = report.tables.model_copy(update={"groups": (long, *others)})
    text = printed(show_report, StudyReport(report.results, tables, None), width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if "a-group" in line)
    assert [cell.strip() for cell in row.split("│")[2:4]] == [first.network, str(first.runs)]
    assert "…" not in text
