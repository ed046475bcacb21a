"""A model card, filled in as far as a bundle can.

The sections are those of Mitchell et al. 2019, "Model Cards for Model Reporting" (section 4), with
the metadata block that Hugging Face reads at the top. What a bundle cannot know is a ``TODO``.
"""

from __future__ import annotations

from collections.abc import Mapping

from capsule.bundle.claims import TrainingClaims
from capsule.report import facts
from capsule.report.markdown import code, document, files, items, plain, rows, todo
from capsule.report.scores import by_task
from capsule.report.subject import ReportedRun

OBSERVED = files("observations.json")
METADATA = """\
---
license: TODO
tags:
- reinforcement-learning
- capsule
---"""


def model_card(
    subject: ReportedRun, metadata: str = METADATA, stated: Mapping[str, str] | None = None
) -> str:
    """Return a model card for the network that a run has trained.

    Args:
        subject: The run.
        metadata: The block above it.
        stated: Items of the details that a bundle does not know, in Markdown.
    """
    return document(
        metadata,
        f"# Model card: {plain(subject.lock.spec.name)}",
        "## Model details",
        items(_details(subject, stated or {})),
        "## Intended use",
        todo("primary uses and users, and uses that are out of scope."),
        "## Factors",
        todo("what performance depends on beyond the start of an episode."),
        "## Metrics",
        _metrics(subject),
        "## Evaluation data",
        _evaluation(subject),
        "## Training data",
        _training(subject),
        "## Quantitative analyses",
        _quantities(subject),
        "## Ethical considerations",
        todo("a bundle of a run does not show them."),
        "## Caveats and recommendations",
        items(_caveats(subject)),
    )


def _details(subject: ReportedRun, stated: Mapping[str, str]) -> list[str]:
    claims = subject.claims
    lines = [
        f"Developed by: {stated.get('Developed by') or todo('people or organisation.')}",
        f"Date: {plain(subject.observations.finished)}",
        f"Version: claim id {code(claims.claim_id())}",
        f"Type: {facts.what(subject)}",
        f"Files: {files(*facts.made(subject))}",
        f"Software: {facts.requested(subject)} ({files('image/sbom.cdx.json')})",
        f"Compute: {facts.machine(subject)}, {facts.lasted(subject.observations)} ({OBSERVED})",
        f"Licence: {stated.get('Licence') or todo('of the model.')}",
        f"Citation and contact: {stated.get('Citation and contact') or todo('both.')}",
    ]
    if isinstance(claims, TrainingClaims):
        lines.insert(4, f"Parameters: SHA-256 {code(claims.parameters)}")
    return lines


def _metrics(subject: ReportedRun) -> str:
    if not subject.evaluation:
        return todo("which of the outputs measure the model.")
    if not isinstance(subject.claims, TrainingClaims):
        return f"Returns as the program counts them. {todo('what they are.')}"
    greedy = subject.lock.spec.training().evaluation.actions == "greedy"
    policy = "the greedy policy" if greedy else "the policy, whose actions are drawn"
    return (
        f"Sum of the environment's own rewards in an episode of {policy}, one episode for "
        f"each start; the starts are the same in every evaluation. {todo('why this measure.')}"
    )


def _evaluation(subject: ReportedRun) -> str:
    starts = facts.starts(subject)
    if starts is None:
        return todo("what the program evaluates on.")
    return (
        f"The training environment, from {starts}, in {files('run/evaluation.json')}. "
        f"{todo('whether that is the intended use.')}"
    )


def _training(subject: ReportedRun) -> str:
    if facts.is_program(subject):
        return todo("what the program learns from.")
    return (
        f"What the agent saw during training: {facts.what(subject)}. All settings are in "
        f"{files('spec/lock.json')}, digests that cover every step in {files('run/trace.jsonl')}."
    )


def _quantities(subject: ReportedRun) -> str:
    if not subject.evaluation:
        return todo("results.")
    games = list(by_task(subject.lock, subject.evaluation))
    table = rows(
        ("game",) * (len(games) > 1) + ("step", "starts", "mean return", "lowest", "highest"),
        [
            (
                *[plain(task.name)] * (len(games) > 1),
                f"{point.step:,}",
                str(len(point.returns)),
                f"{point.mean:.6g}",
                *(f"{of(point.returns):.6g}" for of in (min, max)),
            )
            for task, points in games
            for point in points
            if point.returns
        ],
    )
    return f"{table}\n\n{todo('results by factor, and over seeds.')}"


def _caveats(subject: ReportedRun) -> list[str]:
    relaxations = ", ".join(map(code, subject.claims.relaxations)) or "none"
    return [
        f"One run with root seed {subject.lock.spec.seeds.root}: nothing is known of other seeds.",
        f"Guarantees that were given up: {relaxations}.",
        f"What was not controlled: {files('profiles/ledger.json')}.",
        f"{facts.reproduced(subject)}",
        todo("recommendations."),
    ]
