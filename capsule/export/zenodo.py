"""A deposit for Zenodo: a folder with the files to upload, and their metadata.

The metadata has the fields of Zenodo's API (developers.zenodo.org, "Deposit metadata"). The user
uploads it: nothing is sent from here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from capsule import __version__
from capsule.bundle import cosign
from capsule.bundle.bundle import open_bundle
from capsule.bundle.manifest import BundleKind
from capsule.bundle.receipts import receipts_beside
from capsule.bundle.run_bundle import RecordedRun
from capsule.bundle.trust import TrustPolicy, read_signature
from capsule.experiment.canonical import sha256_file
from capsule.export.deposit import Details
from capsule.export.folders import new_folder
from capsule.host.errors import CapsuleError
from capsule.host.folders import files_beside
from capsule.report.text import printable
from capsule.study.study_bundle import open_study
from capsule.verification.integrity.consistency import check_consistency

FILES = "files"  # what is uploaded
METADATA = ".zenodo.json"
DEPOSIT = "metadata.json"  # the same as the body of a request
MAX_BYTES = 50_000_000_000  # of all files of a record
MAX_FILES = 100
_KEY = "--key KEY.pub"
KEYWORDS = ["reinforcement learning", "reproducibility", "capsule"]


def export_zenodo(path: Path, trust: TrustPolicy, details: Details, folder: Path) -> None:
    """Write a deposit of a bundle, with the receipts and co-signatures beside it.

    Args:
        path: Bundle of a run or of a study.
        trust: Whose signatures count.
        details: Has at least one creator and a licence.
        folder: Is made.

    Raises:
        CapsuleError: CAP-P207, creators or a licence are missing; CAP-P208, Zenodo does not take
            so much; CAP-P203, the folder exists; CAP-B157, a signature is of another bundle;
            CAP-B…, CAP-V…, CAP-Y…, the bundle is not intact or not consistent.
        OSError: A file cannot be written.
    """
    if not details.creators or details.licence is None:
        missing = "--licence" if details.creators else "--creator"
        raise CapsuleError(
            "CAP-P207",
            f"a deposit for Zenodo requires {missing}",
            fix="Give --creator and --licence, or --citation with a CITATION.cff that has both.",
        )
    signatures = files_beside(path, cosign.SUFFIX)
    detached = (*trust.detached, *map(read_signature, signatures))
    kind, name, claim_id, options = _identify(path, replace(trust, detached=detached))
    files = [path, *receipts_beside(path), *signatures]
    _check_size(files)
    command = "capsule verify" if kind == "run" else "capsule study verify"
    further = "".join(f" --signature {_word(signature)}" for signature in signatures)
    command = f"{command} {_word(path)} {options}{further}"
    metadata = _metadata(kind, name, claim_id, command, details)
    with new_folder(folder) as place:
        (place / FILES).mkdir()
        for file in files:
            _copy(file, place / FILES / file.name)
        # A name need not be UTF-8.
        sums = "".join(f"{sha256_file(file)}  {file.name}\n" for file in files)
        (place / FILES / "SHA256SUMS").write_bytes(os.fsencode(sums))
        uploaded = sorted((place / FILES).iterdir())
        sums = "".join(f"{_md5(each)}  {each.name}\n" for each in uploaded)
        (place / "MD5SUMS").write_bytes(os.fsencode(sums))
        for file_name, document in ((METADATA, metadata), (DEPOSIT, {"metadata": metadata})):
            text = json.dumps(document, indent=2, ensure_ascii=False)
            (place / file_name).write_bytes(f"{text}\n".encode())


def _identify(path: Path, trust: TrustPolicy) -> tuple[BundleKind, str, str, str]:
    """Check a bundle; return its kind, its experiment's name, its claim id and verify's options."""
    with open_bundle(path, trust, kind=None) as opened:
        if opened.manifest.kind == "run":
            run = RecordedRun.read(opened)
            check_consistency(run)
            options = _KEY + " --engine process" * (run.claims.image is None)
            return "run", run.lock.spec.name, run.claims.claim_id(), options
    with open_study(path, trust) as (_, study):
        return "study", study.results.lock.study.name, study.claim_id, _KEY


def _word(path: Path) -> str:
    """Return the name of a deposited file as a word of a command."""
    return shlex.quote(printable(path.name))


def _check_size(files: list[Path]) -> None:
    size = sum(file.stat().st_size for file in files)
    if size > MAX_BYTES or len(files) >= MAX_FILES:  # and SHA256SUMS
        raise CapsuleError(
            "CAP-P208",
            f"the deposit has {len(files) + 1} files of {size} bytes together; Zenodo accepts "
            f"{MAX_FILES} files of {MAX_BYTES} bytes",
            fix="Move receipts or co-signatures away, make a bundle without --embed-image, or ask "
            "Zenodo for more.",
        )


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    # The bundle was checked at its own place, and the deposit must have the same bytes.
    if sha256_file(source) != sha256_file(target):
        raise OSError(0, "the copy differs from the file, which changed meanwhile", str(source))


def _md5(path: Path) -> str:
    """Return the digest that Zenodo shows of an uploaded file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _metadata(
    kind: BundleKind, name: str, claim_id: str, command: str, details: Details
) -> dict[str, Any]:
    # Markup.format() escapes its arguments: an experiment or a file may have any name.
    description = Markup(
        "<p>Signed results of the {} <strong>{}</strong>, with everything that is needed to check "
        "them and to execute the {} again.</p><p>Claim id: <code>{}</code></p>"
        "<p>To verify: <code>{}</code> (Capsule {}).</p>"
    ).format(kind, name, kind, claim_id, command, __version__)
    return {
        "upload_type": "dataset",
        "title": details.title or f"{name}: signed results of a {kind} (Capsule bundle)",
        "creators": [
            {key: value for key, value in asdict(each).items() if value is not None}
            for each in details.creators
        ],
        "description": str(description),
        "access_right": "open",
        "license": details.licence,
        "keywords": KEYWORDS,
        "notes": f"Capsule claim id: {claim_id}",
        "related_identifiers": [
            {"relation": relation, "identifier": identifier}
            for relation, identifier in details.related
        ],
    }
