"""The bundle of a study: one small signed file with the claims of every member.

It has the study's lock, each member's claims document and the tables, and so says with which claim
id each number came about; the members' own bundles, with their checkpoints and traces, are named by
their digests.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from capsule.bundle.archive import tampered
from capsule.bundle.bundle import Content, OpenedBundle, open_bundle, pack
from capsule.bundle.claims import ProgramClaims, claims_model
from capsule.bundle.keys import PrivateKey
from capsule.bundle.trust import TrustPolicy
from capsule.experiment.canonical import sha256_hex
from capsule.host.errors import CapsuleError
from capsule.host.wording import agreeing, counted
from capsule.study.lock import StudyLock
from capsule.study.program_scores import ScoreReader
from capsule.study.results import StudyResults, member_result
from capsule.study.tables import StudyClaims, differing_table, tables_of

SUFFIX = ".capsule-study.tar"
CLAIMS = "claims.json"
LOCK = "study/lock.json"
GUIDE = "REPRODUCING.md"
MEMBER = "members/{name}.json"
OUTPUT = "outputs/{sha256}"  # of a program, in which the scores of a member are
USUAL_SAMPLE = 3  # members
_JSON = "application/json"
_GUIDE = """# {name}

The signed results of a study of {runs} in {groups}. `study/lock.json` pins every
run, `members/` has what each of them claims, and `claims.json` has the tables that follow.

    # Check everything that needs no execution.
    capsule study verify {file} --key KEY.pub

    # Run {members} again, too{given}.
    capsule study verify {file} --key KEY.pub {options}

    # Show the tables. With -o FILE, write a page that has the figures, too.
    capsule study report {file}

Study claim id: {claim_id}
"""


class StudyBundle(NamedTuple):
    """The contents of a study's bundle, which agree with one another."""

    claims: StudyClaims
    results: StudyResults

    @property
    def claim_id(self) -> str:
        """SHA-256 of the claims."""
        return sha256_hex(self.claims.document())


def sample_of(members: int) -> int:
    """Return how many members the commands that are shown for a study run again."""
    return min(USUAL_SAMPLE, members)


def sampling_options(results: StudyResults) -> str:
    """Return the options with which any machine runs members of a study again."""
    options = [f"--sample {sample_of(len(results.lock.members))}"]
    if results.needs_bundles(None):
        options.append("--members FOLDER")  # on another machine, whose folders are not known
    if results.without_image:
        options.append("--engine process")
    return " ".join(options)


def pack_study(
    results: StudyResults,
    key: PrivateKey,
    destination: Path,
    ssh_sign: Callable[[bytes], bytes] | None = None,
) -> tuple[Path, StudyBundle]:
    """Write the bundle of a study.

    Args:
        results: What is signed.
        key: The key that signs.
        destination: A file, if its name ends with ``.tar``; or else a folder, in which the file is
            called ``NAME-CLAIM.capsule-study.tar``.
        ssh_sign: Makes a second signature.

    Raises:
        CapsuleError: CAP-Y017, members are missing; CAP-B…, it cannot be written.
    """
    name = results.lock.study.name
    if results.missing:
        raise CapsuleError(
            "CAP-Y017",
            f"{len(results.missing)} of {counted(len(results.lock.members), 'member')} of study "
            f"{name} {agreeing(len(results.missing), 'has', 'have')} no results; the first is "
            f"{results.missing[0]}",
            fix="Run the rest with 'capsule study run --resume'.",
        )
    claims = StudyClaims(
        lock=results.lock.digest(),
        members=tuple(member.identity for member in results.members),
        tables=tables_of(results),
    )
    bundle = StudyBundle(claims, results)
    if destination.suffix != ".tar":
        destination /= f"{name}-{bundle.claim_id[:8]}{SUFFIX}"
    guide = _GUIDE.format(
        name=name,
        runs=counted(len(results.members), "run"),
        groups=counted(len(results.lock.study.groups), "group"),
        file=shlex.quote(destination.name),
        options=sampling_options(results),
        members=counted(sample_of(len(results.members)), "member"),
        given="; FOLDER has the bundles of the members" if results.needs_bundles(None) else "",
        claim_id=bundle.claim_id,
    )
    files = {
        CLAIMS: Content(claims.document(), "claims", _JSON),
        LOCK: Content(results.lock.document(), "lock", _JSON),
        GUIDE: Content(guide.encode(), "guide", "text/markdown"),
    }
    for member in results.members:
        place = MEMBER.format(name=member.identity.name)
        files[place] = Content(member.claims.document(), "run", _JSON)
        for content in member.outputs.values():
            # It is named by its digest, so an output that several members share is stored once.
            files[OUTPUT.format(sha256=sha256_hex(content))] = Content(content, "output", _JSON)
    path = pack(files, bundle.claim_id, key, destination, ssh_sign, kind="study")
    return path, bundle


@contextmanager
def open_study(path: Path, trust: TrustPolicy) -> Iterator[tuple[OpenedBundle, StudyBundle]]:
    """Open the bundle of a study, and check that all of it agrees.

    The members are those of the lock, each claims document is the one that is named and belongs to
    its member's lock, and every table is computed anew from the claims.

    Raises:
        CapsuleError: CAP-Y015, CAP-Y018 it does not agree; CAP-B…, it is not intact or not signed
            as the policy asks.
    """
    with open_bundle(path, trust, kind="study") as opened:
        # The signature and every digest have been checked by now. From here on, the documents are
        # compared with one another, because a signer can sign documents that contradict each other.
        claims = opened.read(CLAIMS, StudyClaims)
        lock = opened.read(LOCK, StudyLock)
        _check_names(claims, lock)

        # Members may share an output, which then is in memory once, as it is in the file.
        contents: dict[str, bytes] = {}

        def read(claims: ProgramClaims, path: str) -> bytes:
            digest = claims.outputs[path].sha256
            if digest not in contents:
                contents[digest] = opened.content(OUTPUT.format(sha256=digest))
            return contents[digest]

        members, scores = [], ScoreReader(lock.study)
        for identity, member in zip(claims.members, lock.members, strict=True):
            model = claims_model(lock.lock_of(member))
            found = opened.read(MEMBER.format(name=identity.name), model)
            if found.claim_id() != identity.claim_id:
                raise _disagreement(f"the claims of member {identity.name} have another claim id")
            members.append(member_result(lock, identity, found, read, scores))
        results = StudyResults(lock, tuple(members))
        _check_files(opened, results)
        _check_tables(claims, results)
        yield opened, StudyBundle(claims, results)


def _check_names(claims: StudyClaims, lock: StudyLock) -> None:
    if claims.lock != lock.digest():
        raise _disagreement(f"the claims name the lock {claims.lock}, not {lock.digest()}")
    names = [member.name for member in lock.members]
    if names != [member.name for member in claims.members]:
        raise _disagreement("the members of the claims are not those of the lock")


def _check_files(opened: OpenedBundle, results: StudyResults) -> None:
    """Check the names, roles and media types of all files; the guide's text is the signer's word.

    The file with the role 'claims' is thus the one whose digest is the claim id of the manifest.
    """
    known = {CLAIMS: ("claims", _JSON), LOCK: ("lock", _JSON), GUIDE: ("guide", "text/markdown")}
    for member in results.members:
        known[MEMBER.format(name=member.identity.name)] = "run", _JSON
        for content in member.outputs.values():
            known[OUTPUT.format(sha256=sha256_hex(content))] = "output", _JSON
    listed = {file.path: (file.role, file.media_type) for file in opened.manifest.files}
    # A file that no document names would be signed without having been checked.
    if surplus := listed.keys() - known:
        raise _disagreement(f"it has the file {min(surplus)!a}, which no document names")
    for path, kind in known.items():
        if path not in listed:
            raise _disagreement(f"it has no file {path}")
        if listed[path] != kind:
            found, wanted = (" of type ".join(each) for each in (listed[path], kind))
            raise _disagreement(f"{path} is listed as {found}, not as {wanted}")


def _check_tables(claims: StudyClaims, results: StudyResults) -> None:
    name = differing_table(results, claims.tables)
    if name is not None:
        raise _disagreement(f"the table of {name} does not follow from the members' claims")


def _disagreement(reason: str) -> CapsuleError:
    return tampered("CAP-Y018", f"the bundle of the study contradicts itself: {reason}")
