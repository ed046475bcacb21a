"""The results in the repository are those of their signed files."""

import re
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from capsule.bundle.trust import load_policy
from capsule.experiment.lock import without_sources
from capsule.study.study_bundle import open_study
from capsule.study.study_file import StudyFile
from scripts import gallery

pytestmark = pytest.mark.slow  # every table is computed again, with its bootstrap intervals

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
STUDIES = sorted(RESULTS.glob("*/*.capsule-study.tar"))
AGENTS = [path for path in STUDIES if (path.parent / gallery.FACTS).exists()]


@cache
def opened(path):
    with open_study(path, load_policy(allowed_signers=[RESULTS / "allowed_signers"])) as (_, study):
        return study


def rows_of(page, heading):
    """Return the first table after a heading, without its head."""
    section = page.read_text().split(heading, 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_agents_is_that_of_the_signed_files():
    page = (RESULTS / "README.md").read_text()
    assert gallery.written(page) == page, "run: python scripts/gallery.py table"


def test_scores_are_rounded_without_exponents():
    found = [gallery.rounded(*each) for each in ((27_176.7, 4), (1_449.0, 2), (-0.04999, 2))]
    assert found == ["27,180", "1,400", "-0.05"]
    assert gallery.rounded(9_999.6, 4) == "10,000"


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_studies_are_signed_agree_with_themselves_and_are_listed(path):
    study = opened(path)
    heading = "## Agents" if (path.parent / gallery.FACTS).exists() else "## Studies"
    rows = [
        row
        for row in rows_of(RESULTS / "README.md", heading)
        if row[0].startswith(f"[{path.parent.name}]")
    ]
    if heading == "## Studies":
        assert [int(row[1]) for row in rows] == [len(study.results.members)]
    assert rows
    assert all(study.claim_id.startswith(row[-1].strip("`.")) for row in rows)
    assert study.results.lock.study.name == path.parent.name
    assert study.claim_id in (path.parent / "report.html").read_text()


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.parent.name)
def test_the_specs_are_those_of_the_agents(path):
    lock = opened(path).results.lock
    file = StudyFile.load(ROOT / "specs" / "studies" / f"{path.parent.name}.yaml")
    members = {member.name: without_sources(lock.specs[member.spec]) for member in lock.members}
    assert {plan.name: without_sources(spec) for plan, spec in file.member_specs(None)} == members


def test_members_without_a_container_are_sampled_with_the_process_engine():
    page = (RESULTS / "README.md").read_text()
    samples = re.findall(r"^ +capsule study verify (\S+)(.*--sample.*)$", page, re.MULTILINE)
    assert samples
    for name, options in samples:
        (path,) = (path for path in STUDIES if path.match(name))
        members = opened(path).results.members
        unconfined = {"engine=process" in each.claims.relaxations for each in members}
        assert unconfined == {"--engine process" in options}, name


@pytest.mark.parametrize(
    ("study", "heading"),
    [
        ("chen2022-small", "## The setups as a study"),
        ("chen2022-small-2.12", "With torch 2.12.1:"),
    ],
)
def test_the_page_of_chen_shows_the_claims_of_the_studies(study, heading):
    (path,) = (RESULTS / study).glob("*.capsule-study.tar")
    claimed = [row for row in opened(path).claims.tables.groups if row.network == "final"]
    rows = rows_of(ROOT / "docs" / "papers" / "chen2022.md", heading)
    assert [[row[0], *row[2:]] for row in rows] == [
        [row.group, f"{row.mean:.3g}", f"{row.standard_deviation:.3g}", str(row.claim_ids)]
        for row in claimed
    ]


def test_the_page_of_espeholt_shows_the_claims_of_the_small_study():
    (path,) = (RESULTS / "espeholt2018-small").glob("*.capsule-study.tar")
    tables = opened(path).claims.tables
    claimed = [row for row in tables.groups if row.network == "final"]
    rows = rows_of(
        ROOT / "docs" / "papers" / "espeholt2018.md", "## Figures E.2 and E.3 on MinAtar"
    )
    expected = []
    for row in claimed:
        scores = sorted(each.score for each in tables.settings if each.group == row.group)
        middle = row.interquartile_mean
        expected.append(
            [
                *(row.group, f"{row.mean:.2f}", f"{middle.estimate:.2f}"),
                *(f"{middle.low:.2f} to {middle.high:.2f}", f"{fmean(scores[-3:]):.2f}"),
                *(f"{scores[-1]:.2f}", f"{sum(score >= 1 for score in scores)} of {len(scores)}"),
            ]
        )
    assert rows == expected


@pytest.mark.parametrize(
    ("study", "heading"),
    [
        ("kapturowski2019-ablations", "## Figure 4 on CartPole without its velocities"),
        ("kapturowski2019-actors", "## Figure 6 with 8, 16 and 32 actors"),
    ],
)
def test_the_page_of_kapturowski_shows_the_claims_of_the_studies(study, heading):
    (path,) = (RESULTS / study).glob("*.capsule-study.tar")
    claimed = [row for row in opened(path).claims.tables.groups if row.network == "final"]
    expected = []
    for row in claimed:
        middle = row.interquartile_mean
        interval = f"{middle.low:.1f} to {middle.high:.1f}"
        numbers = (row.mean, row.standard_deviation, middle.estimate)
        expected.append([row.group, *(f"{number:.1f}" for number in numbers), interval])
    rows = rows_of(ROOT / "docs" / "papers" / "kapturowski2019.md", heading)
    assert [[row[0], *row[2:]] for row in rows] == expected


def test_the_page_of_nagarajan_shows_the_claims_of_the_small_study():
    (path,) = (RESULTS / "nagarajan2019-small").glob("*.capsule-study.tar")
    claimed = {(row.group, row.network): row for row in opened(path).claims.tables.groups}
    page = ROOT / "docs" / "papers" / "nagarajan2019.md"
    rows = rows_of(page, "## What it looks like on MinAtar")
    assert [row[0] for row in rows] == list(dict.fromkeys(group for group, _ in claimed))
    for group, *cells, ids in rows:
        expected = []
        for network in ("final", "best"):
            row = claimed[group, network]
            expected += [f"{row.mean:.3g}", f"{row.standard_deviation:.3g}"]
            expected.append(f"{row.relative_standard_deviation:.1%}")
        assert cells == expected
        assert int(ids) == claimed[group, "final"].claim_ids


# The studies of a row of the comparison with Young and Tian: of IMPALA, and of DQN.
MINATAR = {
    "Asterix": ("minatar", "minatar-dqn"),
    "Breakout": ("minatar", "minatar-dqn"),
    "Breakout, entropy cost 0.02": ("minatar-breakout", None),
    "Freeway": ("minatar", "minatar-dqn-freeway-seaquest"),
    "Freeway, entropy cost 0.003": ("minatar-freeway", None),
    "Seaquest": ("minatar", "minatar-dqn-freeway-seaquest"),
    "Space Invaders": ("minatar", "minatar-dqn"),
}
TIMES = ("no run", "one run", "two runs", "three runs", "four runs")


def returns_of(study, task):
    """Return the mean returns of the networks of each member in a task."""
    (path,) = (RESULTS / study).glob("*.capsule-study.tar")
    return [
        [fmean(network.returns) for network in networks]
        for member in opened(path).results.members
        for game, networks in member.tasks
        if game.name == task
    ]


def spread(returns):
    mean = fmean(returns)
    places = int(mean < 100)
    half_up = [f"{each + 1e-9:.{places}f}" for each in (min(returns), mean, max(returns))]
    low, middle, high = half_up
    return f"{middle} ({low} to {high})"


def reached(returns, goal):
    times = sum(each >= goal for each in returns)
    return f"reached by {'every run' if times == len(returns) else f'{TIMES[times]} of five'}"


def test_the_comparison_at_minatar_follows_from_the_signed_files():
    rows = rows_of(RESULTS / "README.md", "The following table compares the results on MinAtar")
    assert [row[0] for row in rows] == [*MINATAR]
    for game, *cells in rows:
        task = game.partition(",")[0].lower().replace(" ", "_")
        dqn, actor_critic = map(float, cells[2:4])
        expected = []
        for study, goal in zip(MINATAR[game], (max(dqn, actor_critic), dqn), strict=True):
            final = [each[-1] for each in returns_of(study, task)] if study else []
            expected.append((spread(final), reached(final, goal)) if final else ("", ""))
        assert [(cells[0], cells[4]), (cells[1], cells[5])] == expected


@pytest.mark.parametrize(
    ("study", "row"),
    [
        ("road-runner", "this run, 30 greedy games"),
        ("road-runner-impala", "IMPALA, 30 games"),
        ("road-runner-impala-sticky", "IMPALA in DQN's environment, 30 games"),
    ],
)
def test_the_games_of_road_runner_follow_from_the_signed_files(study, row):
    ((_before_training, *returns),) = returns_of(study, "road_runner")
    cells = " | ".join(f"{each:,.0f}" for each in returns)
    assert f"| {row} | {cells} |" in (RESULTS / "README.md").read_text().splitlines()


def test_the_games_of_freeway_follow_from_the_signed_files():
    (returns,) = returns_of("r2d2-freeway", "freeway")
    row = f"| R2D2 at Freeway, 30 greedy games | {' | '.join(f'{each:.1f}' for each in returns)} |"
    assert row in (RESULTS / "README.md").read_text().splitlines()
