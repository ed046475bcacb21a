"""The story of a run on a terminal."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from capsule.bundle.claims import ImageClaim
from capsule.report.facts import verify_options
from capsule.report.story import tell
from capsule.report.subject import NetworkReturns
from capsule.report.summary import show_subject
from tests.report import runs
from tests.report.conftest import different, make_report, read, write
from tests.report.runs import hostile_bundle
from tests.report.terminals import printed

CORPUS = Path(__file__).parents[1] / "corpus"
MAX_LINES = 30


def told(subject):
    return printed(show_subject, subject, width=120)


@pytest.mark.parametrize("kind", ["dqn", "r2d2", "impala", "own"])
def test_the_terminal_tells_the_story_of_the_page(bundles, subjects, saved, kind):
    subject = read(bundles[kind], *saved(different(subjects[kind])), trusted=False)
    text = told(subject)
    story = tell(subject)
    assert story.headline in text
    assert all(sentence in text for sentence in (*story.shown, *story.not_shown)[:4])
    assert subject.claims.claim_id() in text
    assert len(text.splitlines()) <= MAX_LINES


def test_many_reports_and_evaluations_stay_within_thirty_lines(tmp_path):
    returns = dict.fromkeys(range(1, 60), (1.0,) * 4)
    bundle = runs.pack(tmp_path, evaluation=runs.evaluation(returns))
    subject = read(bundle)
    # Equal reports would count once.
    reports = [
        write(tmp_path / f"{number}.json", make_report(subject, summary=f"execution {number}"))
        for number in range(40)
    ]
    text = told(read(bundle, *reports))
    assert len(text.splitlines()) <= MAX_LINES
    assert "more on the page" in text
    assert "step 1:" in text
    assert "step 59:" in text


def test_text_from_a_stranger_cannot_steer_the_terminal(tmp_path):
    text = told(read(hostile_bundle(tmp_path)))
    assert "\x1b" not in text
    assert "\u202e" not in text


# --- lines --------------------------------------------------------------------------------------


def labelled(subject, label):
    """Return the lines of a label: the one with it, and those below it without any."""
    lines = told(subject).splitlines()
    (start,) = (n for n, line in enumerate(lines) if line[:17].strip() == label)
    end = start + 1
    while end < len(lines) and lines[end].startswith(" "):
        end += 1
    return [line[17:] for line in lines[start:end]]


def test_evaluations_have_mean_and_range(subjects):
    assert labelled(subjects["dqn"], "evaluation") == [
        "step 200: mean return 4 over 4 starts (lowest 1, highest 9)",
        "step 400: mean return 26 over 4 starts (lowest 10, highest 44)",
    ]


@pytest.mark.parametrize(
    ("steps", "shown"),
    [([1, 2, 3], [1, 2, 3]), ([1, 2, 3, 4, 5], [1, 4, 5]), ([1_000_000], [1_000_000])],
)
def test_the_first_and_the_last_evaluations_are_shown(subjects, steps, shown):
    points = tuple(NetworkReturns(step, (1.0,)) for step in steps)
    lines = labelled(replace(subjects["dqn"], evaluation=points), "evaluation")
    assert [line.split(":")[0] for line in lines] == [f"step {step:,}" for step in shown]


def test_evaluations_without_returns_are_left_out(subjects):
    points = (NetworkReturns(1, ()), NetworkReturns(2, (3.0, 5.0)))
    lines = labelled(replace(subjects["own"], evaluation=points), "evaluation")
    assert lines == ["step 2: mean return 4 over 2 starts (lowest 3, highest 5)"]


def test_scores_are_those_of_the_final_and_of_the_best_network(tmp_path):
    returns = {200: (10.0, 20.0, 30.0, 40.0), 400: (1.0,) * 4}
    lines = labelled(read(runs.pack(tmp_path, evaluation=runs.evaluation(returns))), "scores")
    final, best = lines
    assert final.startswith("final network, step 400: 1, standard deviation 0 ")
    deviation = f"{statistics.stdev(returns[200]):.6g}"
    assert best.startswith(f"best network, step 200: 25, standard deviation {deviation} ")


def test_several_games_have_their_scores_on_the_page_only(subjects):
    text = told(subjects["impala"])
    assert "\nevaluation " in text
    assert "\nscores " not in text


def test_returns_of_several_games_are_not_mixed(tmp_path):
    returns = {640: (-21.0, 40.0, -19.0, 50.0)}
    bundle = runs.pack(tmp_path, runs.POPULATION, evaluation=runs.evaluation(returns))
    (line,) = labelled(read(bundle), "evaluation")
    assert line == (
        "step 640: pong: mean return -20 over 2 starts (lowest -21, highest -19); "
        "breakout: mean return 45 over 2 starts (lowest 40, highest 50)"
    )


def test_a_rejected_receipt_is_named(bundles, tmp_path):
    receipt = CORPUS / "dqn.capsule.tar.verifier.receipt.json"
    text = told(read(bundles["dqn"], receipt))
    assert f"What {receipt.name} states. It was rejected: the receipt is about another run" in text


def test_the_command_that_verifies_is_that_of_the_page(bundles, subjects):
    subject = subjects["dqn"]
    (command,) = labelled(subject, "verify with")
    assert command == f"capsule verify BUNDLE {verify_options(subject)}"


def test_a_program_without_evaluations_has_neither_scores_nor_parameters(subjects):
    labels = {line[:17].strip() for line in told(subjects["own"]).splitlines()}
    assert {"claim id", "lock", "files", "verify with"} <= labels
    assert not {"evaluation", "scores", "parameters", "image"} & labels


def test_digests_are_those_of_the_claims_and_files_are_counted(subjects):
    subject = subjects["dqn"]
    claims = subject.claims.model_copy(
        update={"image": ImageClaim(config=f"sha256:{'c' * 64}", layers=())}
    )
    subject = replace(subject, claims=claims)
    assert labelled(subject, "lock") == [claims.lock]
    assert labelled(subject, "image") == [f"sha256:{'c' * 64}"]
    assert labelled(subject, "parameters") == [claims.parameters]
    bytes_of_all = sum(file.size for file in subject.files)
    assert labelled(subject, "files") == [f"{len(subject.files)}, {bytes_of_all:,} bytes"]


def test_a_report_that_contradicts_is_the_headline(bundles, subjects, saved):
    subject = read(bundles["dqn"], *saved(different(subjects["dqn"])))
    assert told(subject).startswith("An unsigned report says: not reproduced  According to")
