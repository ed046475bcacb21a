"""A model card, filled in as far as a bundle can."""

import re
from dataclasses import replace

import pytest
from ruamel.yaml import YAML

from capsule.report.model_card import model_card
from capsule.report.subject import NetworkReturns

# Mitchell et al. 2019, "Model Cards for Model Reporting", section 4, in their order.
SECTIONS = [
    "Model details",
    "Intended use",
    "Factors",
    "Metrics",
    "Evaluation data",
    "Training data",
    "Quantitative analyses",
    "Ethical considerations",
    "Caveats and recommendations",
]


def sections(card):
    """Return the text of each section by its heading."""
    _, *parts = re.split(r"^## (.*)\n\n", card, flags=re.MULTILINE)
    return dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))


@pytest.mark.parametrize("kind", ["dqn", "r2d2", "impala", "own"])
def test_a_card_has_the_sections_of_the_paper(subjects, kind):
    subject = subjects[kind]
    found = sections(model_card(subject))
    assert list(found) == SECTIONS
    assert all(found.values())
    assert f"- Version: claim id `{subject.claims.claim_id()}`" in found["Model details"]


def test_the_block_at_the_top_is_yaml_that_leaves_the_licence_open(subjects):
    """Hugging Face reads the metadata between two lines of three hyphens."""
    _, block, rest = model_card(subjects["dqn"]).split("---\n", 2)
    metadata = YAML(typ="safe").load(block)
    assert metadata["license"] == "TODO"
    assert "reinforcement-learning" in metadata["tags"]
    assert rest.startswith("\n# Model card: small-dqn\n")


def test_another_block_may_be_at_the_top(subjects):
    card = model_card(subjects["dqn"], "---\nlicense: mit\n---")
    assert card.startswith("---\nlicense: mit\n---\n\n# Model card: small-dqn\n")
    assert "license: TODO" not in card


def test_a_training_has_parameters_evaluation_and_training_data(subjects):
    subject = subjects["dqn"]
    found = sections(model_card(subject))
    assert f"Parameters: SHA-256 `{subject.claims.parameters}`" in found["Model details"]
    assert "one episode for each start" in found["Metrics"]
    assert "4 start sequences ranked" in found["Evaluation data"]
    assert "digests that cover every step in `run/trace.jsonl`" in found["Training data"]


def test_what_a_program_learns_is_left_to_a_person(subjects):
    found = sections(model_card(subjects["own"]))
    assert "Parameters:" not in found["Model details"]
    for section in ("Metrics", "Evaluation data", "Training data", "Quantitative analyses"):
        assert found[section].startswith("**TODO**: ")


def test_a_program_with_evaluations_has_results(subjects):
    subject = replace(subjects["own"], evaluation=(NetworkReturns(5, (1.0, 2.0)),))
    found = sections(model_card(subject))
    assert found["Metrics"].startswith("Returns as the program counts them.")
    assert "| 5 | 2 | 1.5 | 1 | 2 |" in found["Quantitative analyses"]


def test_every_evaluation_with_returns_has_a_row(subjects):
    points = (
        NetworkReturns(1000, (1.0, 2.0, 6.0)),
        NetworkReturns(2000, ()),
        NetworkReturns(3000, (1e9 / 3,)),
    )
    card = model_card(replace(subjects["dqn"], evaluation=points))
    table, open_part = sections(card)["Quantitative analyses"].split("\n\n")
    assert table.splitlines()[2:] == [
        "| 1,000 | 3 | 3 | 1 | 6 |",
        "| 3,000 | 1 | 3.33333e+08 | 3.33333e+08 | 3.33333e+08 |",
    ]
    assert open_part.startswith("**TODO**")


@pytest.mark.parametrize(
    ("relaxations", "named"), [((), "none"), (("engine=process", "x`y"), "`engine=process`, `x'y`")]
)
def test_the_caveats_name_the_seed_and_the_guarantees_that_were_given_up(
    subjects, relaxations, named
):
    subject = subjects["dqn"]
    claims = subject.claims.model_copy(update={"relaxations": relaxations})
    caveats = sections(model_card(replace(subject, claims=claims)))["Caveats and recommendations"]
    assert f"- Guarantees that were given up: {named}.\n" in caveats
    assert "- One run with root seed 7: nothing is known of other seeds.\n" in caveats
    assert "its run was not executed again" in caveats


def test_evaluations_of_several_games_are_in_rows_of_their_own(subjects):
    points = (NetworkReturns(640, (-21.0, 40.0, -19.0, 50.0)),)
    card = model_card(replace(subjects["impala"], evaluation=points))
    lines = sections(card)["Quantitative analyses"].splitlines()
    assert lines[0] == "| game | step | starts | mean return | lowest | highest |"
    assert lines[2:4] == [
        "| pong | 640 | 2 | -20 | -21 | -19 |",
        "| breakout | 640 | 2 | 45 | 40 | 50 |",
    ]
