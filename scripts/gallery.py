# ruff: noqa: INP001
"""Publish a finished study of agents in results/, and write the table of all of them.

``publish`` signs the study of a folder into ``results/NAME``, with its report and with facts that a
study's bundle does not contain: the machines of its members, and their times. They are read from
the members' bundles, and the commit with their training code is found in the history of this
repository. ``table`` writes the section "Agents" of results/README.md from the published studies; a
test compares the section with the output of this script.

usage: python scripts/gallery.py publish studies/NAME --key KEY
       python scripts/gallery.py table
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.claims import Observations
from capsule.bundle.trust import TrustPolicy
from capsule.experiment.lock import Lock
from capsule.report.scores import Score, ScoredTask
from capsule.study.results import MemberResult
from capsule.study.study_bundle import StudyBundle, open_study

RESULTS = Path(__file__).parents[1] / "results"
FACTS = "members.json"
SECTION = re.compile(r"(<!-- agents -->\n).*(<!-- end of agents -->)", re.DOTALL)
HEAD = """\
| study | group | task | steps | runs | score | best run | hours | machine | commit | claim id |
|---|---|---|---|---|---|---|---|---|---|---|
"""
SEARCHED = 40  # commits
NORMAL_95 = 1.96  # standard errors on either side of a mean that 95 % of them cover


def publish(study: Path, key: Path) -> None:
    """Sign a study into the folder of its name in ``results``."""
    folder = RESULTS / study.name
    folder.mkdir(exist_ok=True)
    # The published bundle stays until the new one is signed.
    with tempfile.TemporaryDirectory(dir=folder) as made:
        _study(folder, "bundle", study.absolute(), "--key", key.absolute(), "-o", made)
        (new,) = Path(made).glob("*.capsule-study.tar")
        for old in folder.glob("*.capsule-study.tar"):
            old.unlink()
        signed = new.replace(folder / new.name)
    _study(folder, "report", signed.name, "-o", "report.html")
    facts = {path.parent.name: facts_of(path) for path in study.glob("members/*/*.capsule.tar")}
    commits = {code: commit_of(code) for code in {each["code"] for each in facts.values()}}
    for each in facts.values():
        each["commit"] = commits[each["code"]]
    (folder / FACTS).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")


def _study(folder: Path, *words: object) -> None:
    words = (sys.executable, "-m", "capsule", "study", *words)
    subprocess.run(list(map(str, words)), cwd=folder, check=True)


def facts_of(path: Path) -> dict[str, Any]:
    """Return the facts of a member's bundle about its machine, and the size of the bundle."""
    with open_bundle(path, []) as bundle:
        observed = bundle.read(run_bundle.OBSERVATIONS, Observations)
        lock = bundle.read(run_bundle.LOCK, Lock)
    cpu = observed.fingerprint.cpu
    return {
        "bytes": path.stat().st_size,
        "code": lock.image.code.sha256,
        "cores": cpu.usable_cores,
        "engine": observed.engine["name"],
        "processor": cpu.name,
        "seconds": round(observed.training_seconds),
    }


def commit_of(code: str) -> str:
    """Return the newest commit whose training code has this digest, searching back from HEAD.

    Raises:
        SystemExit: None of the last commits has it.
    """
    listed = ("rev-list", f"--max-count={SEARCHED}", "HEAD")
    for commit in _git(*listed).decode().split():
        if training_code_of(commit) == code:
            return commit[:7]
    raise SystemExit(f"none of the last {SEARCHED} commits has the training code {code}")


def training_code_of(commit: str) -> str:
    """Return the digest of a commit's training code, with native parts built from the commit."""
    digest = "from capsule.image.code import training_code_digest as d; print(d())"
    with tempfile.TemporaryDirectory() as root:
        packed = _git("archive", commit, "capsule", "images", "hatch_build.py")
        subprocess.run(["tar", "-x", "-C", root], input=packed, check=True)
        for words in (["hatch_build.py"], ["-c", digest]):
            told = subprocess.run(
                [sys.executable, *words],
                env={**os.environ, "PYTHONPATH": root},
                cwd=root,
                check=True,
                capture_output=True,
                text=True,
            )
    return told.stdout.strip()


def _git(*words: str) -> bytes:
    command = ["git", "-C", str(RESULTS.parent), *words]
    return subprocess.run(command, check=True, capture_output=True).stdout


def section() -> str:
    """Return the table of every study in ``results`` that has facts of its members."""
    rows: list[Sequence[str]] = []
    for facts in sorted(RESULTS.glob(f"*/{FACTS}")):
        (path,) = facts.parent.glob("*.capsule-study.tar")
        with open_study(path, TrustPolicy.of([])) as (_, study):
            rows += rows_of(study, json.loads(facts.read_text()))
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def rows_of(study: StudyBundle, facts: dict[str, dict[str, Any]]) -> Iterator[Sequence[str]]:
    """Yield a row for each group and task of a study."""
    name = study.results.lock.study.name
    groups: dict[tuple[str, ScoredTask], list[MemberResult]] = {}
    for member in study.results.members:
        for task in member.scores:
            groups.setdefault((member.plan.group, task), []).append(member)
    for (group, task), members in groups.items():
        scores = [member.scores[task]["final"] for member in members]
        ran = [facts[member.identity.name] for member in members]
        machines = {f"{each['cores']} cores of {each['processor']}" for each in ran}
        yield (
            f"[{name}]({name}/)",
            group,
            task.name,
            f"{scores[0].step:,}",
            str(len(scores)),
            interval_of(scores),
            rounded(max(score.summary.mean for score in scores), 4),
            f"{fmean(each['seconds'] for each in ran) / 3600:.2g}",
            "; ".join(sorted(machines)),
            ", ".join(sorted({f"`{each['commit']}`" for each in ran})),
            f"`{study.claim_id[:16]}...`",
        )


def interval_of(scores: Sequence[Score]) -> str:
    """Return the mean of several runs, or of the episodes of one run, and its 95 % interval."""
    if len(scores) == 1:
        summary, number = scores[0].summary, scores[0].episodes
        mean, deviation = summary.mean, summary.standard_deviation or 0.0
    else:
        means, number = [score.summary.mean for score in scores], len(scores)
        mean, deviation = fmean(means), stdev(means)
    return f"{rounded(mean, 4)} ± {rounded(NORMAL_95 * deviation / number**0.5, 2)}"


def rounded(number: float, digits: int) -> str:
    """Return a number with some significant digits, and without an exponent if it is large."""
    return f"{float(f'{number:.{digits}g}'):,.15g}"


def written(page: str) -> str:
    """Return results/README.md with the table in it."""
    return SECTION.sub(lambda found: found[1] + section() + found[2], page)


def main() -> None:
    """Execute the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    publishing = commands.add_parser("publish")
    publishing.add_argument("study", type=Path)
    publishing.add_argument("--key", type=Path, required=True)
    commands.add_parser("table")
    options = parser.parse_args()
    if options.command == "publish":
        publish(options.study, options.key)
    page = RESULTS / "README.md"
    page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
