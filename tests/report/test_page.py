"""The page: what it says, that it says no more than is known, and that it stays inert."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from math import inf
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markupsafe import Markup
from rich.console import Console

from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import generate, load_private, load_public
from capsule.bundle.receipts import Detail, VerificationPolicy, make_statement, write_receipt
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.evaluation import StartSet
from capsule.machine.kind import MachineKind
from capsule.report.charts import Band, Curve, divergence_chart, line_chart, thinned
from capsule.report.facts import claimed_results, starts
from capsule.report.model_card import model_card
from capsule.report.page import _spread, report_page
from capsule.report.story import tell
from capsule.report.subject import NetworkReturns
from capsule.report.summary import show_subject
from capsule.report.templates import TEMPLATES, code
from capsule.report.text import MAX_CHARACTERS
from capsule.verification.vary import VariedResult, VaryReport
from capsule.verification.verdict import DivergenceMap
from tests.report import runs
from tests.report.conftest import different, make_report, read, write

HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\u202ekcab\x1b[31m\"'&"


class Reader(HTMLParser):
    """Collects what a parser of its own sees."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "br", "col"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def drawn(macro, *arguments):
    """Return what a macro of the page makes of these arguments."""
    source = f'{{% from "parts.html.jinja" import {macro} %}}{{{{ {macro}(*arguments) }}}}'
    return TEMPLATES.from_string(source).render(arguments=arguments)


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


@pytest.mark.parametrize(
    ("evaluation", "made"),
    [
        ({"noop_max": 30}, "of 1 to 30 no-ops"),
        ({}, "ranked by the final network of this run"),
        ({"start_set": {"run": "b" * 64}}, f"ranked by the final network of the run {'b' * 64}"),
    ],
)
def test_starts_are_told_with_what_made_them(bundles, evaluation, made):
    subject = read(bundles["dqn"])
    spec = subject.lock.spec
    if "start_set" in evaluation:
        evaluation = {"start_set": StartSet.model_construct(**evaluation["start_set"])}
    changed = spec.evaluation.model_copy(update=evaluation)
    lock = subject.lock.model_copy(update={"spec": spec.model_copy(update={"evaluation": changed})})
    told = starts(replace(subject, lock=lock))
    assert f"start sequences {made}, SHA-256 " in told


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


def told(bundle, *reports, trusted=True):
    return tell(read(bundle, *reports, trusted=trusted))


def test_without_a_report_nothing_was_reproduced(bundles):
    story = told(bundles["dqn"])
    assert (story.tone, story.headline) == ("open", "Signed, not reproduced yet")
    assert any("took place" in sentence for sentence in story.not_shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verdicts", "tone", "headline"),
    [
        (["reproduced-bitwise"], "open", "An unsigned report says: reproduced, bit for bit"),
        (["reproduced-bitwise", "reproduced-prefix"], "open", "reproduced in part"),
        (["reproduced-prefix"], "open", "reproduced in part"),
        (["not-reproduced"], "bad", "An unsigned report says: not reproduced"),
        (["reproduced-bitwise", "not-reproduced"], "bad", "Unsigned reports say: not always"),
        (["intact"], "open", "Signed, not reproduced yet"),
        (["environment-matches", "inconclusive"], "open", "Signed, not reproduced yet"),
        (["untrusted"], "open", "Signed, not reproduced yet"),
        (["reproduced-bitwise", "inconclusive"], "open", "An unsigned report says: reproduced"),
    ],
)
def test_the_headline_follows_from_every_report(bundles, saved, verdicts, tone, headline):
    subject = read(bundles["dqn"])
    reports = saved(*(make_report(subject, verdict) for verdict in verdicts))
    story = told(bundles["dqn"], *reports)
    assert story.tone == tone
    assert headline in story.headline
    assert ("nsigned report" in story.headline) == (not headline.startswith("Signed"))
    assert sum(".json, mode full" in sentence for sentence in story.shown) == len(verdicts)


def test_reports_are_said_to_be_unsigned(bundles, saved):
    story = told(bundles["dqn"], *saved(make_report(read(bundles["dqn"]))))
    assert any("they are not signed" in sentence for sentence in story.not_shown)


def test_a_signature_that_nobody_checked_is_said_at_the_top(bundles):
    _, unchecked = page_of(bundles["dqn"], trusted=False)
    _, checked = page_of(bundles["dqn"])
    assert unchecked.words.index("Untrusted.") < unchecked.words.index("What was shown")
    assert "Untrusted." not in checked.words
    assert any("signed with a trusted key" in sentence for sentence in told(bundles["dqn"]).shown)


def test_a_signer_whom_the_reader_does_not_trust_is_refused(bundles):
    from capsule.bundle.bundle import open_bundle
    from capsule.bundle.keys import load_public

    mallory = load_public(bundles["own"].parent / "alice.pub")
    with pytest.raises(CapsuleError) as caught:
        open_bundle(bundles["dqn"], [mallory])
    assert caught.value.exit_code == ExitCode.TAMPERED


# --- where runs differ --------------------------------------------------------------------------


def test_equal_runs_have_one_calm_line_and_no_map(bundles, saved):
    page, reader = page_of(bundles["dqn"], *saved(make_report(read(bundles["dqn"]))))
    assert "Nowhere. In 400 agent steps, all 5 components of the trace are the same" in reader.words
    assert 'class="differs"' not in page


def test_a_difference_is_mapped_named_and_drawn_beside_the_recorded_curve(bundles, saved):
    page, reader = page_of(bundles["dqn"], *saved(different(read(bundles["dqn"]))))
    assert page.count('class="differs"') == 3
    assert "By component: differ: loss, parameters." in reader.words
    assert "first: step 200, loss" in reader.words
    assert 'class="curve s1"' in page
    assert page.count('class="band s1"') == 2
    assert "cause: arithmetic (likely)" in reader.words
    assert "Minibatches are equal." in reader.words
    assert "other kernels" in reader.words


def test_components_stand_in_data_flow_order_and_unknown_ones_last():
    components = {"zeta": (), "parameters": ((1, 2),), "streams": (), "loss": ()}
    laid_out = divergence_chart("m", "map", DivergenceMap(steps=9, components=components))
    chart = drawn("divergence_chart", laid_out)
    names = re.findall(r'text-anchor="end">([a-z]+)<', chart)
    assert names == ["streams", "loss", "parameters", "zeta"]


def test_countless_intervals_are_merged_until_they_can_be_drawn():
    intervals = tuple((step, step) for step in range(0, 100_000, 10))
    components = {"loss": intervals}
    laid_out = divergence_chart("m", "map", DivergenceMap(steps=100_000, components=components))
    chart = drawn("divergence_chart", laid_out)
    assert 0 < chart.count('class="differs"') <= 400


# --- reports ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"schema":"capsule/verify-report/v1"}',
        b" " * (16 << 20) + b"{}",
    ],
)
@pytest.mark.slow
def test_what_is_no_report_is_refused(bundles, tmp_path, data):
    (tmp_path / "bad.json").write_bytes(data)
    with pytest.raises(CapsuleError) as caught:
        read(bundles["dqn"], tmp_path / "bad.json")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-P101", ExitCode.USAGE)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("replica", "divergence", "steps"), 10**400),
        (("replica", "evaluation", "points", 0, "returns"), ["not a number"]),
        (("replica", "evaluation", "points", 0, "returns"), ["0x1p99999"]),
        (("unknown",), 1),
    ],
)
def test_a_report_with_impossible_values_is_refused(bundles, tmp_path, path, value):
    document = json.loads(make_report(read(bundles["dqn"])).model_dump_json(by_alias=True))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(CapsuleError) as caught:
        read(bundles["dqn"], tmp_path / "bad.json")
    assert caught.value.code == "CAP-P101"


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


def test_a_missing_report_is_refused(bundles, tmp_path):
    with pytest.raises(CapsuleError, match="No such file") as caught:
        read(bundles["dqn"], tmp_path / "none.json")
    assert caught.value.code == "CAP-P101"


def test_a_report_on_another_run_is_refused(bundles, saved):
    with pytest.raises(CapsuleError) as caught:
        read(bundles["dqn"], *saved(make_report(read(bundles["r2d2"]))))
    assert caught.value.code == "CAP-P102"


def test_a_claimed_return_that_is_no_number_is_refused(tmp_path):
    points = runs.evaluation().points
    bad = points[0].model_copy(update={"returns": ("one",) * 4})
    evaluation = runs.evaluation().model_copy(update={"points": (bad,)})
    with pytest.raises(CapsuleError) as caught:
        read(runs.pack(tmp_path, evaluation=evaluation))
    assert (caught.value.code, caught.value.exit_code) == ("CAP-P103", ExitCode.TAMPERED)


@pytest.mark.parametrize("returns", [(inf, -inf, 1.0, 2.0), (1.7e308,) * 4])
def test_returns_without_a_mean_have_a_report(tmp_path, returns):
    subject = read(runs.pack(tmp_path, evaluation=runs.evaluation({400: returns})))
    console = Console(file=io.StringIO(), width=120)
    show_subject(subject, console)
    shown = (console.file.getvalue(), model_card(subject), claimed_results(subject.claims))
    assert all("nan" in text for text in (report_page(subject), *shown))


# --- receipts -----------------------------------------------------------------------------------


@pytest.fixture
def receipt(bundles, tmp_path):
    """A function that has somebody vouch for the DQN run, and returns the receipt and the key."""

    author = bundles["dqn"].parent / "alice.pub"

    def vouch(name, verdict="reproduced-bitwise", claim=None, machine="AMD EPYC", mode="full"):
        exists = (tmp_path / name).exists()
        key = load_public(tmp_path / f"{name}.pub") if exists else generate(tmp_path / name)
        kind = MachineKind(
            processor="AuthenticAMD 25/1",
            processor_name=machine,
            instructions=("avx2",),
            gpu=None,
            system="debian 12",
            engine="docker",
        )
        detail = Detail(
            verdict=verdict,
            expected="bitwise",
            policy=VerificationPolicy(mode=mode, own_code=True, tolerance=None),
            signers=(load_public(author).fingerprint,),
            machine=kind,
            difference=None,
        )
        with open_bundle(bundles["dqn"], []) as opened:
            manifest = sha256_hex(opened.manifest.document())
        claim = claim or read(bundles["dqn"]).claims.claim_id()
        statement = make_statement(claim, manifest, "2026-11-21T12:00:00Z", detail)
        path = tmp_path / f"{name}.receipt.json"
        return write_receipt(statement, load_private(tmp_path / name), path, path), key

    return vouch


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


def test_receipts_by_anybody_else_count_for_nothing(bundles, receipt):
    path, _ = receipt("mallory")
    story = tell(read(bundles["dqn"], path))
    assert story.headline == "Signed, not reproduced yet"
    assert any("What 1 of the receipts state" in sentence for sentence in story.not_shown)


def test_the_authors_own_receipt_counts_for_nothing(bundles, receipt, tmp_path):
    original = bundles["dqn"].parent
    for name in ("alice", "alice.pub"):
        (tmp_path / name).write_bytes((original / name).read_bytes())
    (tmp_path / "alice").chmod(0o600)
    path, _ = receipt("alice")
    assert tell(read(bundles["dqn"], path)).headline == "Signed, not reproduced yet"


def test_a_receipt_that_contradicts_is_not_outvoted(bundles, receipt):
    (one, bob), (two, carol) = receipt("bob"), receipt("carol", "not-reproduced")
    story = tell(read(bundles["dqn"], one, two, others=[bob, carol]))
    assert (story.tone, story.headline) == ("bad", "Not always reproduced")


@pytest.mark.parametrize(
    ("verdict", "mode", "headline"),
    [
        ("reproduced-statistical", "full", "Reproduced statistically"),
        ("reproduced-segments", "segments:all", "Reproduced in part"),
    ],
)
def test_weaker_grades_are_told_as_such(bundles, receipt, verdict, mode, headline):
    path, bob = receipt("bob", verdict, mode=mode)
    assert tell(read(bundles["dqn"], path, others=[bob])).headline == headline


def test_a_signed_voice_is_told_without_the_remark(bundles, receipt, saved):
    path, bob = receipt("bob")
    (report,) = saved(make_report(read(bundles["dqn"])))
    story = tell(read(bundles["dqn"], path, report, others=[bob]))
    assert (story.tone, story.headline) == ("good", "Reproduced, bit for bit")


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


def hostile_bundle(folder):
    """Pack a run in which whatever a stranger chooses is an attack."""
    metrics = [{"step": 1, HOSTILE: 1.0, "inf": 1e308}, {"step": 2, HOSTILE: -1e308, "nan": "nan"}]
    lines = "".join(json.dumps(line) + "\n" for line in metrics)
    return runs.pack(
        folder,
        {"name": "hostile", "trainer": {"command": ["python", HOSTILE]}},
        machine=runs.MACHINE.model_copy(
            update={"cpu": runs.MACHINE.cpu.model_copy(update={"name": HOSTILE}), "kernel": HOSTILE}
        ),
        name="a<b>&'\".capsule.tar",
        outputs={"metrics.jsonl": lines + "not json\n", HOSTILE.replace("/", "|"): "x"},
        log=HOSTILE,
        flags={"environment.PYTHONHASHSEED": HOSTILE},
    )


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


SAFE = st.text(max_size=40)


@given(SAFE, SAFE)
def test_any_text_is_read_back_as_text(content, attribute):
    paragraph = TEMPLATES.from_string('<p title="{{ attribute }}">{{ content }}</p>')
    reader = Reader(paragraph.render(content=content, attribute=attribute))
    assert reader.tags == ["p"]
    assert "".join(reader.text) == _seen(content)
    assert reader.attributes == [("title", _seen(attribute))]


def _seen(value):
    from capsule.report.text import printable

    return printable(value)


@given(st.lists(st.tuples(SAFE, SAFE), max_size=4))
def test_a_table_has_the_cells_it_was_given(rows):
    reader = Reader(drawn("table", "caption", ("a", "b"), rows))
    assert reader.tags.count("td") == len(rows)
    assert reader.attributes.count(("scope", "row")) == len(rows)
    assert reader.open == []


def test_only_markup_passes_unescaped():
    both = TEMPLATES.from_string("{{ one }}{{ other }}")
    assert both.render(one=Markup("<b>x</b>"), other="<b>") == "<b>x</b>&lt;b&gt;"
    assert code("<b>\x1b") == "<code>&lt;b&gt;\N{REPLACEMENT CHARACTER}</code>"


def test_a_template_does_not_leave_out_what_is_missing():
    with pytest.raises(UndefinedError):
        TEMPLATES.from_string("{{ missing }}").render()


def test_a_long_table_says_what_it_leaves_out(tmp_path):
    outputs = {f"f{number:04}": "x" for number in range(200 + 7)}
    _, reader = page_of(runs.pack(tmp_path, runs.PROGRAM, outputs=outputs))
    assert "7 more rows are not shown." in reader.words


def test_a_bundle_holds_events_only(tmp_path):
    told = {"time": 0.0, "kind": "progress", "step": 1}
    events = [
        told | {"loss": 2.0}, {"step": 1, "loss": 3.0}, "not json\n", [1], told | {"step": "one"},
        told | {"loss": "nan"}, told | {"loss": True}, told | {"loss": 1.0},
    ]  # fmt: skip
    subject = read(runs.pack(tmp_path, events=events))
    assert subject.unread == 0
    assert [series.points for series in subject.series] == [((1, 1.0),)]


def test_lines_of_metrics_that_are_none_are_counted(tmp_path):
    lines = [
        {"step": 1, "loss": 2.0}, {"step": "one"}, {"step": 1 << 60}, [1],
        {"step": 2, "loss": "nan"}, {"step": 3, "loss": True}, {"step": 1, "loss": 1.0},
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines) + "not json\n"
    subject = read(runs.pack(tmp_path, runs.PROGRAM, outputs={"metrics.jsonl": text}))
    assert subject.unread == 4
    assert [series.points for series in subject.series] == [((1, 1.0),)]


# --- charts -------------------------------------------------------------------------------------

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e90, max_value=1e90)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 2**53), NUMBERS), min_size=1, max_size=30))
def test_any_curve_lies_within_its_chart(points):
    points = tuple((float(x), y) for x, y in sorted(points))
    xs, ys = zip(*points, strict=True)
    laid_out = line_chart("c", "t", "x", "y", [Curve("l", points, (Band(xs, ys, ys),))])
    chart = drawn("line_chart", laid_out)
    places = re.findall(r"(-?[0-9.e+]+),(-?[0-9.e+]+)", chart)
    assert all(0 <= float(x) <= 400 and 0 <= float(y) <= 250 for x, y in places)
    assert "nan" not in chart
    assert Reader(chart).open == []


@given(st.lists(st.integers(), max_size=3000), st.integers(2, 100))
def test_thinning_keeps_the_ends_and_the_order(values, most):
    points = [(float(number), 0.0) for number in range(len(values))]
    kept = thinned(points, most)
    assert len(kept) <= max(most, 1)
    assert list(kept) == sorted(kept)
    assert kept[:1] == tuple(points[:1])
    assert kept[-1:] == tuple(points[-1:])


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50))
def test_quartiles_are_numpys(returns):
    low, first, median, mean, third, high = _spread(NetworkReturns(0, tuple(returns)))
    expected = np.quantile(returns, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose([low, first, median, third, high], expected, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(mean, np.mean(returns), rtol=1e-9, atol=1e-6)
