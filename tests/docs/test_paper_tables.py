"""The tables of the papers hold what the shipped specs hold, and nothing of a spec is left out."""

import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import chen2022
import pytest

from capsule.host.spec_file import load_spec
from capsule.study.study_file import StudyFile
from tests.command_lines import parse
from tests.docs.paper_tables import OURS, PAPERS, disagreements, named, rows

ROOT = Path(__file__).parents[2]
SPECS = ROOT / "specs"
TRAINING = ("environment", "trainer", "evaluation")
TABLES = {
    "nagarajan2019.md": ("dqn-breakout.yaml", TRAINING),
    "kapturowski2019.md": ("r2d2-atari.yaml", TRAINING),
    "espeholt2018.md": ("impala-atari.yaml", TRAINING),
    "verl2026.md": ("impala-atari.yaml", ("determinism",)),
}


def spec_of(name, overrides=()):
    return load_spec(SPECS / name, list(overrides)).model_dump(mode="json", by_alias=True)


@pytest.mark.parametrize("page", TABLES)
def test_a_papers_table_has_every_field_of_its_spec_with_the_specs_value(page):
    spec, sections = TABLES[page]
    assert disagreements(PAPERS / page, spec_of(spec), sections) == []


@pytest.mark.parametrize("page", sorted(path.name for path in PAPERS.glob("*.md")))
def test_no_cell_of_a_papers_table_is_empty(page):
    found = list(rows(PAPERS / page))
    assert found
    assert all(cell for row in found for cell in row.values())


@pytest.mark.parametrize("page", TABLES)
def test_every_table_of_a_spec_says_where_it_differs(page):
    assert all({"paper", OURS, "difference"} <= row.keys() for row in rows(PAPERS / page))


# --- the comparison can fail --------------------------------------------------------------------


def test_a_value_that_the_spec_does_not_have_is_found():
    page = PAPERS / "nagarajan2019.md"
    changed = spec_of("dqn-breakout.yaml", ["trainer.discount=0.98"])
    assert disagreements(page, changed, TRAINING) == [
        "trainer.discount: the page has 0.99, the spec 0.98"
    ]


def test_a_field_that_the_page_lacks_is_found(tmp_path):
    text = (PAPERS / "nagarajan2019.md").read_text()
    page = tmp_path / "page.md"
    page.write_text(text.replace("`trainer.discount: 0.99`", "as in the paper"))
    found = disagreements(page, spec_of("dqn-breakout.yaml"), TRAINING)
    assert found == ["trainer.discount: the page lacks it"]


def test_a_field_that_no_spec_has_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"| what | {OURS} |\n|---|---|\n| a | `trainer.colour: red` |\n")
    assert list(named(page)) == [("trainer.colour", "red")]
    found = disagreements(page, {"trainer": {"colour": 1}}, ("trainer",))
    assert found == ["trainer.colour: the page has 'red', the spec 1"]
    found = disagreements(page, {"trainer": {"rate": 1}}, ("trainer",))
    assert found[:1] == ["trainer.colour: the page has 'red', the spec 'no such field'"]
    assert found[1:] == ["trainer.rate: the page lacks it"]


def test_nested_fields_and_absent_sections_are_compared(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        f"| what | {OURS} |\n|---|---|\n"
        "| a | `trainer.schedule.policy_lag: 16`, `trainer.replay: null` |\n"
        "| b | `trainer.shards: [16, 16]` |\n"
    )
    spec = {"trainer": {"schedule": {"policy_lag": 16}, "replay": None, "shards": [16, 16]}}
    assert disagreements(page, spec, ("trainer",)) == []


# --- the case study of Chen et al. --------------------------------------------------------------

NAMED = re.compile(r"`([A-Za-z_0-9.]+) = ([^`]+)`")


def test_the_case_studys_table_has_the_defaults_of_the_benchmark(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["chen2022.py"])
    defaults = {
        **{f"MODELS.{model}": arguments for model, arguments in chen2022.MODELS.items()},
        "SETUPS": " ".join(name for names in chen2022.SETUPS for name in names),
        "SEEDS": " ".join(map(str, chen2022.SEEDS)),
        "pairs": str(chen2022.arguments().pairs),
    }
    found = [pair for row in rows(PAPERS / "chen2022.md") for pair in NAMED.findall(row[OURS])]
    assert dict(found) == defaults
    assert len(found) == len(defaults)


# --- the commands -------------------------------------------------------------------------------

PAGES = sorted(path.name for path in PAPERS.glob("*.md"))


def commands(page):
    """Return the commands of a page's code blocks, joined where a backslash continues them."""
    text = (PAPERS / page).read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_paper_name_specs_with_such_fields_and_scripts_that_are_there(page):
    folder = ROOT
    for words in commands(page):
        program = words[0]
        if program == "cd":
            folder = (folder / words[1]).resolve()
        elif program == "capsule":
            parse(shlex.join(words))
            check_spec(folder, words)
        elif program == "python" and words[1] != "-m":
            assert (folder / words[1]).exists()


def check_spec(folder, words):
    """Load the spec of a command with what the command sets."""
    specs = [word for word in words if word.endswith(".yaml")]
    overrides = [value for option, value in pairwise(words) if option == "--set"]
    if words[1] == "study":
        for study in specs:
            assert list(StudyFile.load(folder / study).member_specs(None))
        return
    for spec in specs:
        load_spec(folder / spec, [shown(each) for each in overrides])
    assert specs or not overrides


def shown(override):
    """Return an override of a loop with a value that the loop could give it."""
    values = {"$seed": "1", "$state": "stored", "$steps": "10", "$correction": "epsilon"}
    field, _, value = override.partition("=")
    return f"{field}={values.get(value, value)}"
