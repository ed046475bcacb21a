"""The page: what it says, that it says no more than is known, and that it stays inert."""

import re
from math import inf
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import load_public
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.report.facts import claimed_results
from capsule.report.model_card import model_card
from capsule.report.page import _spread, report_page
from capsule.report.story import tell
from capsule.report.subject import NetworkReturns
from capsule.report.summary import show_subject
from capsule.report.text import MAX_CHARACTERS
from capsule.verification.vary import VariedResult, VaryReport
from capsule.verification.verdict import DivergenceMap
from tests.report import runs
from tests.report.conftest import different, make_report, read, write
from tests.report.pages import Reader
from tests.report.runs import HOSTILE, hostile_bundle
from tests.report.terminals import printed


def page_of(bundle, *reports, trusted=True):
    page = report_page(read(bundle, *reports, trusted=trusted))
    reader = Reader(page)
    assert reader.open == []
    return page, reader


# --- what it says -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dqn", "r2d2", "impala", "own"])
def test_every_kind_of_run_has_a_page(bundles, kind):
    subject = read(bundles[kind])
    page, reader = page_of(bundles[kind])
    assert subject.claims.claim_id() in reader.words
    assert "Signed, not reproduced yet" in reader.words
    for file in subject.files:
        assert file.path in reader.words
        assert file.sha256 in reader.words
    for row in subject.ledger.rows:
        assert row.source in reader.words
    assert page.count("<svg") >= 2


def test_components_without_a_licence_do_not_count_as_one(bundles):
    page, _ = page_of(bundles["dqn"])
    found = re.search(r"(\d+) of (\d+) components? with a licence", page)
    assert found is not None
    assert int(found[1]) <= int(found[2])


def test_evaluations_are_told_as_numbers_and_drawn(bundles):
    page, reader = page_of(bundles["dqn"])
    for returns in runs.RETURNS.values():
        assert f"{fmean(returns):.6g}" in reader.words
    assert 'class="band s0"' in page


def test_it_is_told_which_starts_the_networks_played_from(bundles):
    page, _ = page_of(bundles["dqn"])
    digest = runs.evaluation().start_set
    made = f"start sequences ranked by the final network of this run, SHA-256 {digest}"
    assert made in page


def test_a_population_is_shown_with_its_members_and_a_panel_for_each_game(bundles):
    _, reader = page_of(bundles["impala"])
    assert "of 3 generations" in reader.words
    assert "Evaluation: pong" in reader.words
    assert "Evaluation: breakout" in reader.words
    assert "learning_rate 0.003" in reader.words


def test_a_program_has_the_curves_of_its_metrics_and_its_outputs(bundles):
    page, reader = page_of(bundles["own"])
    assert [series.name for series in read(bundles["own"]).series] == ["loss", "return"]
    assert "Outputs of the program" in reader.words
    assert page.count('class="curve s0"') >= 2


def test_equal_input_gives_equal_bytes(bundles, saved):
    reports = saved(make_report(read(bundles["dqn"])))
    pages = {report_page(read(bundles["dqn"], *reports)) for _ in range(2)}
    assert len(pages) == 1


# --- the verdict --------------------------------------------------------------------------------


def test_a_signature_that_nobody_checked_is_said_at_the_top(bundles):
    _, unchecked = page_of(bundles["dqn"], trusted=False)
    _, checked = page_of(bundles["dqn"])
    assert unchecked.words.index("Untrusted.") < unchecked.words.index("What was shown")
    assert "Untrusted." not in checked.words
    assert any(
        "signed with a trusted key" in sentence for sentence in tell(read(bundles["dqn"])).shown
    )


def test_a_signer_whom_the_reader_does_not_trust_is_refused(bundles):

    mallory = load_public(bundles["own"].parent / "alice.pub")
    with pytest.raises(CapsuleError) as caught:
        open_bundle(bundles["dqn"], [mallory])
    assert caught.value.exit_code == ExitCode.TAMPERED


# --- where runs differ --------------------------------------------------------------------------


def test_one_reproduction_does_not_hide_another_that_failed(bundles, saved):
    bare = {"replica": None, "differences": (), "first_difference": None}
    verdicts = ("reproduced-bitwise", "not-reproduced")
    subject = read(bundles["dqn"])
    reports = saved(*(make_report(subject, verdict, **bare) for verdict in verdicts))
    _, reader = page_of(bundles["dqn"], *reports)
    assert "Every result was reproduced" not in reader.words
    assert "They do not differ in one execution (1.json), but another ended" in reader.words


def test_a_plain_process_is_not_said_to_have_an_image(bundles):
    page, reader = page_of(bundles["dqn"])
    assert "The image contains" not in reader.words
    assert "rebuild its image" not in reader.words
    assert "--key SIGNER.pub --engine process<" in page


def test_equal_runs_have_one_calm_line_and_no_map(bundles, saved):
    page, reader = page_of(bundles["dqn"], *saved(make_report(read(bundles["dqn"]))))
    assert (
        "The runs do not differ. In 400 agent steps, all 5 components of the trace are the same"
        in reader.words
    )
    assert 'class="differs"' not in page


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("reproduced-prefix", "The runs do not differ in the part that was executed again"),
        ("not-reproduced", "The repetition ended before its results could be compared"),
        ("intact", "The run was not executed again"),
        ("reproduced-bitwise", "The runs do not differ. Every result was reproduced (1.json)."),
    ],
)
def test_a_report_without_a_comparison_says_what_was_executed(bundles, saved, verdict, said):
    bare = make_report(read(bundles["dqn"]), verdict).model_copy(
        update={"replica": None, "differences": (), "first_difference": None}
    )
    _, reader = page_of(bundles["dqn"], *saved(bare))
    assert said in reader.words


def test_a_difference_is_mapped_named_and_drawn_beside_the_recorded_curve(bundles, saved):
    page, reader = page_of(bundles["dqn"], *saved(different(read(bundles["dqn"]))))
    assert page.count('class="differs"') == 3
    assert "By component: differ: loss, parameters." in reader.words
    assert "first: step 200, loss" in reader.words
    assert 'class="curve s1"' in page
    assert page.count('class="band s1"') == 2
    assert "cause: arithmetic (likely)" in reader.words
    assert "Minibatches are equal." in reader.words
    assert "Use a portable profile." in reader.words  # however long the evidence is
    assert "other kernels" in reader.words


# --- reports ------------------------------------------------------------------------------------


def test_what_a_result_depends_on_is_shown_beside_its_control(bundles, saved):
    control = make_report(read(bundles["dqn"]))
    rows = (
        VariedResult(name="threads", outcome="equal", was="1", became="2", report=control),
        VariedResult(name="timezone", outcome="shielded", was="UTC", reason="it does not start"),
    )
    report = VaryReport(
        bundle="b",
        conclusion="The result does not depend on: threads.",
        control=control,
        variations=rows,
        seconds=1.0,
    )
    (path,) = saved(report)
    subject = read(bundles["dqn"], path)
    assert subject.reports == ((path.name, control),)
    assert subject.varied == ((path.name, report),)
    words = page_of(bundles["dqn"], path)[1].words
    assert "What the result depends on" in words
    assert "The result does not depend on: threads." in words
    assert "it does not start" in words
    assert "What the result depends on" not in page_of(bundles["dqn"])[1].words


@pytest.mark.parametrize("returns", [(inf, -inf, 1.0, 2.0), (1.7e308,) * 4])
def test_returns_without_a_mean_have_a_report(tmp_path, returns):
    subject = read(runs.pack(tmp_path, evaluation=runs.evaluation({400: returns})))
    shown = (
        printed(show_subject, subject, width=120),
        model_card(subject),
        claimed_results(subject.lock, subject.claims, subject.evaluation),
    )
    assert all("nan" in text for text in (report_page(subject), *shown))


# --- receipts -----------------------------------------------------------------------------------


def test_receipts_by_named_keys_are_the_verdict(bundles, receipt):
    (one, bob), (two, carol) = receipt("bob"), receipt("carol")
    subject = read(bundles["dqn"], one, two, others=[bob, carol])
    story = tell(subject)
    assert (story.tone, story.headline) == ("good", "Reproduced, bit for bit")
    assert any("by 2 signers on 1 kind of machine" in sentence for sentence in story.shown)
    assert not any("they are not signed" in sentence for sentence in story.not_shown)
    reader = Reader(report_page(subject))
    assert bob.fingerprint in reader.words
    assert "Receipts of re-executions" in reader.words


def test_a_receipt_of_another_run_is_listed_as_refused(bundles, receipt):
    path, bob = receipt("bob", claim="e" * 64)
    subject = read(bundles["dqn"], path, others=[bob])
    assert tell(subject).headline == "Signed, not reproduced yet"
    assert "CAP-B172" in Reader(report_page(subject)).words


def test_a_strangers_machine_is_text(bundles, receipt):
    path, bob = receipt("bob", machine=HOSTILE)
    page = report_page(read(bundles["dqn"], path, others=[bob]))
    assert "script" not in Reader(page).tags
    assert "\u202e" not in page


# --- hostile text -------------------------------------------------------------------------------


def test_text_from_a_stranger_is_text(tmp_path):
    bundle = hostile_bundle(tmp_path)
    subject = read(bundle)
    report = make_report(
        subject, "not-reproduced", summary=HOSTILE * 50, expected=HOSTILE, relaxations=(HOSTILE,)
    )
    evil = {HOSTILE: ((1, 2),), "x" * 10_000: ()}
    report = report.model_copy(
        update={
            "replica": report.replica.model_copy(
                update={"divergence": DivergenceMap(steps=3, components=evil)}
            )
        }
    )
    page, reader = page_of(bundle, write(tmp_path / f"{HOSTILE[-9:-6]}<i>.json", report))
    assert "script" not in reader.tags
    assert "img" not in reader.tags
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name == "style"]
    assert "<script>alert(1)</script>" in reader.words
    assert not set("\x1b\u202e") & set(page)
    assert "x" * (MAX_CHARACTERS + 1) not in page
    assert subject.unread == 1


def test_a_long_table_says_what_it_leaves_out(tmp_path):
    outputs = {f"f{number:04}": "x" for number in range(200 + 7)}
    _, reader = page_of(runs.pack(tmp_path, runs.PROGRAM, outputs=outputs))
    assert "7 more rows are not shown." in reader.words


# --- charts -------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50))
def test_quartiles_are_numpys(returns):
    low, first, median, mean, third, high = _spread(NetworkReturns(0, tuple(returns)))
    expected = np.quantile(returns, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose([low, first, median, third, high], expected, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(mean, np.mean(returns), rtol=1e-9, atol=1e-6)
