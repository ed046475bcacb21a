"""A repository for Hugging Face's hub: the model card, the weights and the bundle.

The card begins with the metadata that the hub reads, among them the results in its model index.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from math import isfinite
from pathlib import Path

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.trust import TrustPolicy
from capsule.export.deposit import Details
from capsule.export.folders import new_folder
from capsule.report.facts import verify_options
from capsule.report.markdown import code, plain
from capsule.report.model_card import model_card
from capsule.report.scores import by_task
from capsule.report.subject import ReportedRun, read_subject
from capsule.report.text import printable

COPIED = ("checkpoint", "output")  # roles of files that are also laid out one by one
# As in the hub's own new repositories: these are stored as large files.
ATTRIBUTES = "".join(
    f"{pattern} filter=lfs diff=lfs merge=lfs -text\n"
    for pattern in ("*.safetensors", "*.tar", "*.zip", "*.pt", "*.pth", "*.bin", "*.npz")
)
_TAGS = ("reinforcement-learning", "deep-reinforcement-learning", "capsule")
_VERIFICATION = """
## Verification

The model was made by the run that {bundle} records, and the files here are copies of its
files. To check the bundle and execute the run again:

    pip install capsule-rl
    capsule verify {word} {options}
"""


def export_huggingface(path: Path, trust: TrustPolicy, details: Details, folder: Path) -> None:
    """Write a repository of the bundle of a run.

    Args:
        path: The bundle.
        trust: Whose signatures count.
        details: What the card says of the model's people, licence and related works.
        folder: Is made.

    Raises:
        CapsuleError: CAP-P203, the folder exists; CAP-B146, the bundle of a study; CAP-B…, CAP-V…,
            the bundle is not intact or not consistent.
        OSError: A file cannot be written.
    """
    with open_bundle(path, trust) as bundle, new_folder(folder) as place:
        subject = read_subject(bundle, path.name, [], trust.keys)
        card = model_card(subject, "\n".join(_metadata(subject, details)), _stated(details))
        readme = card + _VERIFICATION.format(
            bundle=code(path.name),
            word=shlex.quote(printable(path.name)),
            options=verify_options(subject),
        )
        (place / "README.md").write_bytes(readme.encode())
        (place / ".gitattributes").write_bytes(ATTRIBUTES.encode())
        shutil.copyfile(path, place / path.name)
        # A member that no run makes could have the name of a file that is written above.
        shown = [
            file.path
            for file in bundle.manifest.files
            if file.role in COPIED and file.path not in subject.unchecked
        ]
        for name in (run_bundle.CLAIMS, run_bundle.LOCK, *shown):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.member(name), place / name)


def _stated(details: Details) -> dict[str, str]:
    """Return the items of the card that follow from the options, in Markdown."""
    people = (
        each.name + f" ({each.affiliation})" * (each.affiliation is not None)
        for each in details.creators
    )
    related = (f"{relation} {identifier}" for relation, identifier in details.related)
    return {
        "Developed by": plain("; ".join(people)),
        "Licence": plain(details.licence or ""),
        "Citation and contact": plain("; ".join(related)),
    }


def _metadata(subject: ReportedRun, details: Details) -> Iterator[str]:
    """Yield the lines of the card's metadata. Texts are JSON, which is YAML."""
    yield "---"
    if details.licence is not None:
        # The hub writes SPDX identifiers in lower case.
        yield f"license: {json.dumps(details.licence.lower())}"
    yield "tags:"
    yield from (f"- {tag}" for tag in _TAGS)
    results = [
        {
            "task": {"type": "reinforcement-learning"},
            "dataset": {"type": task.name, "name": task.name},
            "metrics": [{"type": "mean_reward", "value": points[-1].mean}],
        }
        for task, points in by_task(subject.lock, subject.evaluation)
        # JSON has no form for a mean that is not finite.
        if points and points[-1].returns and isfinite(points[-1].mean)
    ]
    if results:
        name = details.title or subject.lock.spec.name
        yield f"model-index: {json.dumps([{'name': name, 'results': results}])}"
    yield "---"
