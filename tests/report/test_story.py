"""The main statements about a run, and the command that shows them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from capsule.bundle import run_bundle
from capsule.cli.main import app
from capsule.report.story import tell
from capsule.report.summary import MAX_SENTENCES
from tests.hostile.genuine import edit_json, outside, packed, program
from tests.report.conftest import make_report, read

CORPUS = Path(__file__).parents[1] / "corpus"
FORMS = {
    "html": "<!DOCTYPE html>",
    "ro-crate": '{\n  "@context"',
    "neurips": "# NeurIPS",
    "acm": "# Artifact appendix",
    "model-card": "---\nlicense: TODO",
}


def told(bundle, *reports, trusted=True):
    return tell(read(bundle, *reports, trusted=trusted))


def test_without_a_report_nothing_was_reproduced(bundles):
    story = told(bundles["dqn"])
    assert (story.tone, story.headline) == ("open", "Signed, not reproduced yet")
    assert any("took place" in sentence for sentence in story.not_shown)


def test_a_signature_that_was_not_checked_is_not_said_to_be_one(bundles):
    trusted, untrusted = told(bundles["dqn"]), told(bundles["dqn"], trusted=False)
    assert any("unchanged since it was signed" in sentence for sentence in trusted.shown)
    assert untrusted.headline == "Not reproduced yet"
    assert not any("unchanged since" in sentence for sentence in untrusted.shown)
    assert any(
        sentence.startswith("The files are those that the bundle lists")
        for sentence in untrusted.shown
    )


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


def test_a_verification_that_failed_is_told_with_its_remedy(bundles, saved):
    subject = read(bundles["dqn"])
    error = {"code": "CAP-E010", "message": "no memory", "fix": "Free memory."}
    failed = make_report(subject, "inconclusive").model_copy(update={"error": error})
    story = told(bundles["dqn"], *saved(failed))
    assert any(sentence.endswith(". Free memory.") for sentence in story.shown)


def test_reports_are_said_to_be_unsigned(bundles, saved):
    story = told(bundles["dqn"], *saved(make_report(read(bundles["dqn"]))))
    assert any("they are not signed" in sentence for sentence in story.not_shown)


def test_receipts_by_anybody_else_count_for_nothing(bundles, receipt):
    path, _ = receipt("mallory")
    story = tell(read(bundles["dqn"], path))
    assert story.headline == "Signed, not reproduced yet"
    assert "What 1 of the receipts states. It does not count: not trusted." in story.not_shown


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


def test_reports_and_receipts_are_counted_as_such_and_copies_once(bundles, receipt, saved):
    (one, bob), (two, carol) = receipt("bob", "not-reproduced"), receipt("carol")
    copy = one.with_name("copy.json")
    copy.write_bytes(one.read_bytes())
    (report,) = saved(make_report(read(bundles["dqn"]), "not-reproduced"))
    story = tell(read(bundles["dqn"], one, copy, two, report, others=[bob, carol]))
    assert story.sentence == (
        "According to 1 report and 2 receipts, the run was executed again, and the results agreed "
        "in 1 of 3 reports and receipts."
    )


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


def test_files_that_could_not_be_checked_are_not_said_to_agree(tmp_path):
    def by_another_capsule(files):
        edit_json(files, run_bundle.OBSERVATIONS, lambda it: it.update(capsule_sha256="0" * 64))
        edit_json(files, run_bundle.LEDGER, lambda it: it["rows"][0].update(evidence="invented"))

    bundle = packed(outside("training"), tmp_path / "run.capsule.tar", by_another_capsule)
    story = told(bundle, trusted=False)
    assert not any("and its documents agree" in sentence for sentence in story.shown)
    (said,) = [sentence for sentence in story.not_shown if "not checked" in sentence]
    assert "another version of Capsule" in said
    subject = read(bundle, trusted=False)
    assert run_bundle.LEDGER in subject.unchecked
    assert subject.ledger.rows[0].evidence == "invented"


@pytest.mark.parametrize("recorded", [True, False])
def test_records_that_the_signer_may_have_chosen_are_told(tmp_path, recorded):
    run = program() if recorded else outside("training")
    bundle = packed(run, tmp_path / "run.capsule.tar")
    of_another_run = next(CORPUS.glob("*.receipt.json")).read_bytes()
    rejected = [tmp_path / f"{number}.receipt.json" for number in range(MAX_SENTENCES)]
    for number, path in enumerate(rejected):
        path.write_bytes(of_another_run + b"\n" * number)  # equal files are read once
    story = told(bundle, *rejected, trusted=False)
    assert sum("was rejected" in sentence for sentence in story.not_shown) == len(rejected)
    said = "That the recorded system's randomness and order of arrivals came about by itself."
    # The command shows the first sentences only.
    shown = story.not_shown[:MAX_SENTENCES]
    assert any(sentence.startswith(said) for sentence in shown) == recorded


# --- the command --------------------------------------------------------------------------------


def capsule(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_writes_a_page_and_nothing_else(bundles, tmp_path):
    key = bundles["dqn"].parent / "alice.pub"
    done = capsule(bundles["dqn"], "-o", tmp_path / "report.html", "--key", key)
    assert (done.exit_code, done.output) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_the_command_replaces_no_file_that_it_reads(bundles, tmp_path):
    bundle = tmp_path / "run.capsule.tar"
    bundle.write_bytes(bundles["dqn"].read_bytes())
    (tmp_path / "link").symlink_to(bundle)
    for output in (bundle, tmp_path / "link"):
        done = capsule(bundle, "-o", output)
        assert (done.exit_code, done.stderr.partition(":")[0]) == (2, "CAP-X004")
    assert bundle.read_bytes() == bundles["dqn"].read_bytes()


@pytest.mark.slow
def test_the_command_prints_the_story_or_a_form(bundles):
    assert capsule(bundles["dqn"]).output.startswith("Not reproduced yet")
    for form, start in FORMS.items():
        assert capsule(bundles["dqn"], "--format", form).output.startswith(start)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["-o", "/proc/report.html"], "CAP-X004"), (["missing.json"], "CAP-P101")],
)
def test_a_mistake_is_a_coded_error(bundles, arguments, code):
    done = capsule(bundles["dqn"], *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(code)
