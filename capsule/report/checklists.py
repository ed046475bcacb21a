"""Checklists for submissions, filled in as far as a bundle can answer.

An answer cites the files of the bundle that support it. Whatever a bundle cannot know is a
``TODO``: nothing is answered by guessing.

* NeurIPS Paper Checklist (neurips.cc/public/guides/PaperChecklist): sixteen questions, here by
  their titles and in words of our own.
* Artifact appendix for artifact evaluation (cTuning's template, which ACM conferences use), with
  the badges of ACM's policy "Artifact Review and Badging", version 1.1.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from capsule.bundle.claims import TrainingClaims
from capsule.image.code import training_code_digest
from capsule.image.releases import release_of
from capsule.report import facts
from capsule.report.markdown import code, document, files, items, plain, rows, todo
from capsule.report.subject import ReportedRun
from capsule.report.text import printable

# Yes is only answered where files of every bundle show it.
_YES, _OPEN = "[Yes]", todo("[Yes], [No] or [NA]")


@dataclass(frozen=True)
class _Question:
    """One question of the checklist, in Markdown."""

    title: str
    asks: str
    answer: str
    justification: str


def neurips(subject: ReportedRun) -> str:
    """Return the NeurIPS checklist, as far as this run can answer it."""
    asked = [
        part
        for number, each in enumerate(_questions(subject), start=1)
        for part in (
            f"## {number}. {each.title}",
            each.asks,
            f"Answer: {each.answer}\n\nJustification: {each.justification}",
        )
    ]
    return document(
        f"# NeurIPS paper checklist: {plain(subject.lock.spec.name)}",
        f"From one run with claim id {code(subject.claims.claim_id())}: {facts.what(subject)}. "
        "Files are those of its bundle. A paper rests on more than one run: check every answer "
        "against all of it.",
        *asked,
    )


def _questions(subject: ReportedRun) -> list[_Question]:
    person = "the bundle of a run does not show this."
    lasted = facts.lasted(subject.observations)
    return [
        _Question("Claims", "Do the main claims reflect what was found?", _OPEN, todo(person)),
        _Question(
            "Limitations",
            "Are the limitations of the work discussed?",
            _OPEN,
            f"{_limits(subject)} {todo('those of the method and of the study.')}",
        ),
        _Question(
            "Theory", "Does each result have its assumptions and proof?", _OPEN, todo(person)
        ),
        _Question(
            "Reproducibility of results",
            "Is everything disclosed that repeating the main results needs?",
            f"{_YES} for this run",
            f"{_pinned(subject)} pinned in "
            f"{files('spec/lock.json')}; {files('REPRODUCING.md')} says how to run it again, with "
            f"and without Capsule; {files('claims.json')} states the results to expect. "
            f"{facts.reproduced(subject)}",
        ),
        _Question(
            "Open access to data and code", "Are data and code open?", _OPEN, _access(subject)
        ),
        _Question(
            "Experimental setting",
            "Are all settings given that understanding the results needs?",
            f"{_YES} for this run",
            f"All of them, defaults written out, are in {files('spec/lock.json')}. "
            f"{todo('how they were chosen.')}",
        ),
        _Question("Statistical significance", "Are error bars given?", _OPEN, _statistics(subject)),
        _Question(
            "Compute resources",
            "Are the requirements of each experiment stated?",
            f"{_YES} for this run",
            f"{facts.machine(subject)}; {lasted} of training "
            f"({files('observations.json', 'machine/sbom.cdx.json')}). "
            f"{todo('the total of the project, with runs that are not in the paper.')}",
        ),
        _Question("Code of ethics", "Does the work conform to it?", _OPEN, todo(person)),
        _Question("Broader impacts", "Are they discussed?", _OPEN, todo(person)),
        _Question(
            "Safeguards", "Are there safeguards where misuse is a risk?", _OPEN, todo(person)
        ),
        _Question(
            "Licences of existing assets",
            "Are owners credited, and licences named and respected?",
            _OPEN,
            f"{files('image/sbom.cdx.json')} states the licences of {facts.licensed(subject)} of "
            "the software. "
            f"{todo('credit, and whether the terms are respected.')}",
        ),
        _Question(
            "New assets",
            "Are new assets documented?",
            _OPEN,
            f"{files(*facts.made(subject))}; the documentation is {files('REPRODUCING.md')}. "
            f"{todo('their licence, and a model card (capsule report --format model-card).')}",
        ),
        _Question("Crowdsourcing", "Are instructions and pay given?", _OPEN, todo(person)),
        _Question("Review boards", "Was there approval where it is due?", _OPEN, todo(person)),
        _Question("Use of language models", "Is it declared?", _OPEN, todo(person)),
    ]


def _pinned(subject: ReportedRun) -> str:
    if facts.in_image(subject):
        return "Every setting, package, seed and the container image are"
    return "Every setting, Python package and seed, but not the operating system's libraries, are"


def _limits(subject: ReportedRun) -> str:
    given = ", ".join(map(code, subject.claims.relaxations)) or "none"
    return (
        f"Guarantees that this run gave up: {given}. What was not controlled is in "
        f"{files('profiles/ledger.json')}. It is one run with one root seed."
    )


def _access(subject: ReportedRun) -> str:
    """Say where the code of a run is."""
    lock, program = files("spec/lock.json"), facts.is_program(subject)
    sentences = []
    if subject.lock.project is not None:
        whose = "program" if program else "environment"
        sentences.append(f"The {whose}'s source tree is {files('image/layer-project.tar.zst')}.")
    elif program and not facts.in_image(subject):
        sentences.append("The program is part of a Python package or of the machine.")
    elif program:
        sentences.append(
            f"The program is part of the image, whose content is pinned by SHA-256 in {lock}."
        )
    if not program:
        code = subject.lock.image.code.sha256
        own = code == training_code_digest() or release_of(code) is not None
        whose = "Capsule's own" if own else "of a version of Capsule that this one does not know"
        sentences.append(f"The training code is {whose}, named by digest in {lock}.")
    return " ".join([*sentences, todo("where the bundle and the data are available.")])


def _statistics(subject: ReportedRun) -> str:
    seen = ""
    if subject.evaluation:
        evidence = "run/evaluation.json" if isinstance(subject.claims, TrainingClaims) else None
        cited = f" ({files(evidence)})" if evidence else ""
        seen = f"Results of this run: {facts.results(subject)}{cited}. "
    return (
        f"{seen}The starts vary within one run; the seed does not. "
        f"{todo('variation over seeds, with the number of runs and the method.')}"
    )


# --- artifact evaluation ------------------------------------------------------------------------


def artifact_appendix(subject: ReportedRun) -> str:
    """Return an artifact appendix, as far as this run can fill it in."""
    within = "; environments are in the image" if facts.in_image(subject) else ""
    bundle = shlex.quote(printable(subject.bundle))
    return document(
        f"# Artifact appendix: {plain(subject.lock.spec.name)}",
        "## Abstract",
        f"One run, packed in one signed file of {facts.size(subject)}: {facts.what(subject)}. "
        f"{todo('what it supports in the paper.')}",
        "## Artifact check-list (meta-information)",
        rows(("item", "this artifact"), _meta(subject)),
        "## Description",
        f"**How to access.** {todo('where the bundle is available.')}",
        f"**Hardware dependencies.** {facts.hardware_needed(subject)}.",
        "**Software dependencies.** Python 3.11 or newer and pip for Capsule; "
        f"{_software(subject)} pinned by SHA-256 in {files('spec/lock.json')} and listed in "
        f"{files('image/sbom.cdx.json')}.",
        f"**Data sets.** {todo('any that the program reads' + within + '.')}",
        f"**Models.** {files(*facts.made(subject))}",
        "## Installation",
        "    pip install capsule-rl",
        "## Experiment workflow",
        f"    capsule verify {bundle} {facts.verify_options(subject)}",
        f"Without Capsule: {files('REPRODUCING.md')}.",
        "## Evaluation and expected results",
        f"`reproduced-bitwise`, exit status 0: every claim of {files('claims.json')} was "
        f"reproduced, among them {facts.results(subject)}.",
        "## Experiment customization",
        f"The spec is the field `spec` of {files('spec/lock.json')}. Written as YAML, it can be "
        "changed and run (`capsule run`); that is another experiment, with another claim id.",
        "## Badges (ACM Artifact Review and Badging 1.1)",
        items(_badges(subject)),
        "## Notes",
        f"{_limits(subject)} {facts.reproduced(subject)}",
    )


def _software(subject: ReportedRun) -> str:
    if facts.in_image(subject):
        return "Docker or Podman for the image, whose content is"
    python = subject.lock.spec.image.python
    return f"Python {python} for the run, which used no container and whose Python packages are"


def _meta(subject: ReportedRun) -> list[tuple[str, str]]:
    spec, image = subject.lock.spec, subject.claims.image
    lasted = facts.lasted(subject.observations)
    where, binary = "a plain process", "none; plain process"
    system, built = "the machine's operating system", "environment"
    if image is not None:
        where, binary = "the image", f"container image {code(image.config)}"
        system, built = code(spec.image.base), "image"
    return [
        ("Algorithm", facts.what(subject)),
        ("Program", f"{'own program' if facts.is_program(subject) else 'Capsule'}, in {where}"),
        ("Compilation", "none needed"),
        ("Binary", binary),
        ("Model", files(*facts.made(subject))),
        ("Data set", todo("any that the program reads.")),
        ("Run-time environment", f"{system}, Python {spec.image.python}"),
        ("Hardware", facts.hardware_needed(subject)),
        ("Run-time state", f"pinned; exceptions are in {files('profiles/ledger.json')}"),
        ("Execution", f"{lasted} of training on {facts.machine(subject)}"),
        ("Metrics", "returns" if subject.evaluation else todo("which of the outputs.")),
        ("Output", files("claims.json", "manifest.json")),
        ("Experiments", "one run; `capsule verify` repeats it"),
        ("Disk space", f"bundle {facts.size(subject)}; {todo(f'{built} and run.')}"),
        ("Time to prepare", todo("depends on the network and what is cached.")),
        ("Time to complete", f"{lasted} of training"),
        ("Publicly available", todo("where.")),
        ("Code licences", f"{files('image/sbom.cdx.json')}; {todo('of your own code.')}"),
        ("Data licences", todo("of any data.")),
        ("Workflow framework", f"Capsule {plain(subject.observations.capsule)}"),
        ("Archived", todo("DOI.")),
    ]


def _badges(subject: ReportedRun) -> list[str]:
    decide = todo("the reviewers decide.")
    functional = (
        f"documented in {files('REPRODUCING.md')}, complete (`capsule verify --mode integrity`), "
        "exercisable (`capsule verify`)."
    )
    return [
        f"Artifacts Available: {todo('a DOI of a public archive.')}",
        f"Artifacts Evaluated, functional: {functional} {decide}",
        f"Artifacts Evaluated, reusable: {decide}",
        f"Results Validated, reproduced: {facts.reproduced(subject)} {decide}",
        f"Results Validated, replicated: {todo('a study by others, with artifacts of their own.')}",
    ]
