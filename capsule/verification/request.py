"""A request to ``capsule verify``: how far, by whose signatures, of which experiment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from capsule.bundle import run_bundle
from capsule.bundle.archive import UntrustedError
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import Claims
from capsule.bundle.trust import TrustPolicy
from capsule.engine.select import EngineChoice
from capsule.experiment.lock import Lock, LockedProject, without_sources
from capsule.experiment.spec import LimitsSpec, SourcesSpec, Spec
from capsule.experiment.trainers import CommandTrainer
from capsule.host.errors import CapsuleError
from capsule.host.spec_file import load_spec
from capsule.host.wording import counted
from capsule.image.cache import Cache
from capsule.image.lockfile import read_lock
from capsule.image.pinning import capture
from capsule.image.registry.reference import Reference
from capsule.verification.analysis.comparison import compare_documents
from capsule.verification.variation import Variation
from capsule.verification.verdict import RequiredGrade

ImageChoice = Literal["rebuilt", "embedded", "registry"]
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Mode:
    """How far a verification goes.

    Attributes:
        name: What is done.
        steps: Agent steps of a prefix.
        segments: How many segments to choose; None: all.
    """

    name: Literal["integrity", "environment", "prefix", "full", "segments", "fresh-seed"]
    steps: int | None = None
    segments: int | None = None

    @property
    def challenges(self) -> bool:
        """Whether it asks for what the signer could not know."""
        return self.name in ("segments", "fresh-seed")

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Parse a mode as ``--mode`` takes it; each is a name of the class, two with a number.

        Raises:
            CapsuleError: CAP-V001, anything else; CAP-V060, segments of no number.
        """
        if text.startswith("segments:"):
            number = text.removeprefix("segments:")
            if number == "all":
                return cls("segments")
            if re.fullmatch(r"[1-9][0-9]{0,5}", number):
                return cls("segments", segments=int(number))
            raise CapsuleError(
                "CAP-V060",
                f"{number!r} is not a number of segments",
                fix="Give --challenge, or --mode segments:, a number from 1 on or 'all'.",
            )
        if match := re.fullmatch(r"prefix:([1-9][0-9]{0,14})", text):
            return cls("prefix", int(match[1]))
        if text in ("integrity", "environment", "fresh-seed", "full"):
            return cls(text)  # type: ignore[arg-type]
        raise CapsuleError(
            "CAP-V001",
            f"--mode {text!r} is not known",
            fix="Use integrity, environment, prefix:N (N agent steps), segments:N, fresh-seed or "
            "full.",
        )

    @classmethod
    def of_options(cls, mode: str, challenge: str | None, *, fresh_seed: bool) -> Mode:
        """Return the mode that the options ask for. A challenge includes a fresh seed.

        Raises:
            CapsuleError: CAP-V064, ``--mode`` beside another option; those of :meth:`parse`.
        """
        if challenge is None and not fresh_seed:
            return cls.parse(mode)
        # The option's default is full, so a --mode full that the user wrote cannot be told from
        # none.
        if mode != "full":
            raise CapsuleError(
                "CAP-V064",
                f"--mode {mode} contradicts {'--challenge' if challenge else '--fresh-seed'}",
                fix="Use only one of the two options.",
            )
        return cls.parse("fresh-seed" if challenge is None else f"segments:{challenge}")

    def __str__(self) -> str:
        if self.name == "segments":
            return f"{self.name}:{self.segments or 'all'}"
        return self.name if self.steps is None else f"{self.name}:{self.steps}"

    def check(self, lock: Lock) -> None:
        """Reject a mode that the run of a lock cannot be verified in, before anything runs.

        Raises:
            CapsuleError: CAP-V003, a prefix does not end on a trace record; CAP-V008, a prefix of
                a program; CAP-V062, the run cannot be challenged; CAP-V063, it has fewer segments.
        """
        if self.challenges:
            _check_challengeable(lock, self)
        if self.steps is None:
            return
        if isinstance(lock.spec.trainer, CommandTrainer):
            raise CapsuleError(
                "CAP-V008",
                f"--mode {self}: only Capsule's own trainers count steps; this bundle runs a "
                "program",
                fix="Use --mode full.",
            )
        # A trace record covers the steps since the record before it. The last steps of a prefix
        # that ends between two records would be in no record, and so not be compared.
        interval = lock.spec.recording.trace_interval
        total = lock.spec.trainer.total_steps
        if self.steps % interval or self.steps > total:
            raise CapsuleError(
                "CAP-V003",
                f"--mode {self}: the run has {counted(total, 'step')} and a trace record every "
                f"{counted(interval, 'step')}",
                fix=f"Give a multiple of {interval} up to {total}.",
            )


def _check_challengeable(lock: Lock, mode: Mode) -> None:
    if isinstance(lock.spec.trainer, CommandTrainer):
        raise _not_challengeable(
            "it is the run of a user program, whose states and seeds are unknown",
            fix="Use --mode full.",
        )
    if mode.name == "fresh-seed":
        # A fresh seed needs no state: its prefix starts from the beginning, with derived randomness
        # where the run recorded it.
        return
    fix = "Use --mode full or --fresh-seed, or ask the author for a run with "
    if not lock.spec.recording.segment_states:
        raise _not_challengeable(
            "its spec does not set recording.segment_states, so it saved no states",
            fix=f"{fix}recording.segment_states: true.",
        )
    if lock.spec.entropy.mode == "recorded":
        raise _not_challengeable(
            "it recorded the system's randomness, and how much of it was used before a segment "
            "begins is not known",
            fix=f"{fix}entropy.mode: virtual.",
        )
    total = segments_of(lock)
    if mode.segments is not None and mode.segments > total:
        raise CapsuleError(
            "CAP-V063",
            f"--challenge {mode.segments}: the run has {counted(total, 'segment')} between its "
            "checkpoints",
            fix=f"Give a number up to {total}, or 'all'.",
        )


def segments_of(lock: Lock) -> int:
    """Return how many segments a training has between its checkpoints; the last may be short."""
    training = lock.spec.training()
    return -(-training.trainer.total_steps // training.recording.checkpoint_interval)


def _not_challengeable(reason: str, fix: str) -> CapsuleError:
    return CapsuleError("CAP-V062", f"the run cannot be challenged: {reason}", fix=fix)


@dataclass(frozen=True)
class Expectation:
    """The experiment that the verifier expects, for example from a paper; no other may pass.

    Attributes:
        spec: The experiment, as its authors published it.
        spec_path: File of the spec; its path of the source tree is relative to it.
        claim: The claim id.
        lock: Digest of the lock, which pins every package and, unlike a spec, the source tree.
    """

    spec: Spec | None = None
    spec_path: Path | None = None
    claim: str | None = None
    lock: str | None = None

    @classmethod
    def parse(cls, spec: Path | None, lock: str | None, claim: str | None) -> Expectation:
        """Parse what the options name.

        Raises:
            CapsuleError: CAP-V043, CAP-V058, or what reading the spec or the lock raises.
        """
        return cls(
            spec=None if spec is None else load_spec(spec, for_lock=False),
            spec_path=spec,
            lock=None if lock is None else parse_lock(lock),
            claim=None if claim is None else parse_claim(claim),
        )

    def check(self, lock: Lock, claims: Claims) -> None:
        """Reject the bundle of another experiment, or of other results.

        Raises:
            CapsuleError: CAP-V041 another spec, CAP-V042 another claim id, CAP-V057 another lock.
        """
        if self.claim is not None and (found := claims.claim_id()) != self.claim:
            raise _unexpected("CAP-V042", f"its claim id is {found}, not {self.claim}")
        if self.lock is not None and (digest := lock.digest()) != self.lock:
            raise _unexpected("CAP-V057", f"its lock is {digest}, not {self.lock}")
        # A lock does not hold the places from which packages and code came, so the published spec
        # is compared without its own.
        if self.spec is not None and (wanted := without_sources(self.spec)) != lock.spec:
            left, right = (spec.model_dump(mode="json") for spec in (wanted, lock.spec))
            first = compare_documents(left, right)[0]
            what = f"{first.component} is {first.found}, not {first.claimed}"
            raise _unexpected("CAP-V041", f"in its spec, {what}")

    def check_data(self, digests: Callable[[str], Sequence[str]]) -> None:
        """Reject the bundle of a run with other data than the spec names by its SHA-256.

        The spec in a lock does not have these digests, so :meth:`check` has not compared them.

        Args:
            digests: Returns the digests by which a spec can name a data set of the bundle, the
                usual one first.

        Raises:
            CapsuleError: CAP-V041.
        """
        data = None if self.spec is None else self.spec.data
        for name, wanted in (data or {}).items():
            if wanted.sha256 is not None and wanted.sha256 not in (found := digests(name)):
                reason = f"its data set {name!r} has the SHA-256 {found[0]}, not {wanted.sha256}"
                raise _unexpected("CAP-V041", reason)

    def check_tree(self, project: LockedProject | None, cache: Cache) -> None:
        """Reject the bundle of a run with another source tree than the one of the published spec.

        A spec contains the path of the tree, and the lock what was there, so :meth:`check` has
        compared the paths only.

        Args:
            project: The source tree of the bundle; None: it has none.
            cache: Takes the tree of the published spec.

        Raises:
            CapsuleError: CAP-V041, it is another tree, or the one of the spec cannot be read.
        """
        if self.spec is None or self.spec_path is None or project is None:
            return
        try:
            wanted = capture(self.spec, self.spec_path, cache, lambda _: None)
        except CapsuleError as error:
            what = f"its source tree cannot be compared with that of the spec: {error.message}"
            raise _unexpected("CAP-V041", what, _TREE) from error
        files = {} if wanted is None else wanted.files
        for path in sorted({*files, *project.files}):
            found, expected = (each.get(path, "missing") for each in (project.files, files))
            if found != expected:
                what = f"in its source tree, {path} is {found}, not {expected}"
                raise _unexpected("CAP-V041", what, _TREE)


@dataclass(frozen=True)
class VerifyRequest:
    """A request to ``capsule verify``.

    Attributes:
        bundle: The bundle, which is never changed.
        trust: Whose signatures count.
        mode: How far the verification goes.
        engine: Where the run is executed again.
        allow_untrusted: Accept that no key was given to check the signer with.
        image: Rebuild the image from the lock, or execute the signer's own: the one in the bundle,
            or the one that a registry has under ``registry``.
        base: Build the base layer from the locked packages, or take the signer's own.
        code: Execute this Capsule's training code only, or the signer's own as well.
        limits: Limits that are lower than those of the bundle, by field of ``limits`` in a spec.
        required: Lowest grade accepted as reproduced.
        data: Where data sets lie that the bundle does not carry, by name.
        sources: Where missing packages may come from.
        expected: What the verifier knows of the experiment from elsewhere.
        variation: What is changed in the surroundings of the re-execution, which are then read
            back, too; None: nothing, and they are not.
        signs: Whether the verifier signs a receipt, whose time is that of this machine's clock.
    """

    bundle: Path
    trust: TrustPolicy
    mode: Mode
    engine: EngineChoice = "auto"
    allow_untrusted: bool = False
    image: ImageChoice = "rebuilt"
    registry: Reference | None = None
    base: Literal["packages", "supplied"] = "packages"
    code: Literal["own", "supplied"] = "own"
    limits: Mapping[str, int] = field(default_factory=dict)
    data: Mapping[str, Path] = field(default_factory=dict)
    required: RequiredGrade = "bitwise"
    sources: SourcesSpec = field(default_factory=SourcesSpec)
    expected: Expectation = field(default_factory=Expectation)
    variation: Variation | None = None
    signs: bool = False

    def __post_init__(self) -> None:
        """Reject trusted keys beside the choice to do without any.

        Raises:
            CapsuleError: CAP-V006.
        """
        if self.allow_untrusted and not self.trust.trusts_nobody:
            raise CapsuleError(
                "CAP-V006",
                "--allow-untrusted contradicts --key, --allowed-signers and --keyless",
                fix="Remove --allow-untrusted, or remove the options that name trusted keys.",
            )

    def unchecked(self, bundle: OpenedBundle) -> Iterator[str]:
        """Yield the members that this request does not check, and another one would."""
        if run_bundle.IMAGE_ARCHIVE in bundle.files and self.image != "embedded":
            yield run_bundle.IMAGE_ARCHIVE
        if self.mode.name != "segments":
            yield from (path for path in bundle.files if path.startswith(run_bundle.STATES))

    def require_trust(self, bundle: OpenedBundle) -> None:
        """Reject a bundle without a trusted signature, unless the user accepts that.

        Raises:
            CapsuleError: CAP-V002.
        """
        if bundle.authentic or self.allow_untrusted:
            return
        raise UntrustedError(
            "CAP-V002",
            f"the bundle is intact and names {bundle.fingerprint} as its signer, but no key "
            "was given to check this",
            fix="Get the signer's public key from a source you trust, then pass --key, or add "
            "the key to the file allowed_signers in your configuration folder; or pass "
            "--allow-untrusted to check everything but who signed it.",
        )


def parse_image(choice: ImageChoice, pull: str | None) -> tuple[ImageChoice, Reference | None]:
    """Return which image to execute, and its place in a registry if it is to be pulled.

    Raises:
        CapsuleError: CAP-V068, an image is to be pulled and taken from the bundle; or what
            :meth:`Reference.parse` raises.
    """
    if pull is None:
        return choice, None
    if choice == "embedded":
        raise CapsuleError(
            "CAP-V068",
            f"--pull {pull} contradicts --image embedded",
            fix="Use only one of the two options.",
        )
    # --image rebuilt is the option's default, so --pull overrules it.
    return "registry", Reference.parse(pull)


def parse_claim(text: str) -> str:
    """Return a claim id as it was given.

    Raises:
        CapsuleError: CAP-V043, it is not one.
    """
    if not _DIGEST.fullmatch(text):
        raise CapsuleError(
            "CAP-V043",
            f"--expect-claim {text!r} is not a claim id",
            fix="Give all 64 hexadecimal digits: fewer could be forged.",
        )
    return text


def parse_lock(text: str) -> str:
    """Return the digest of a lock that was given as a file or as its digest.

    Raises:
        CapsuleError: CAP-V058 it is neither; CAP-L001, CAP-L002 the file is not a lock.
    """
    if _DIGEST.fullmatch(text):
        return text
    if not Path(text).is_file():
        raise CapsuleError(
            "CAP-V058",
            f"--expect-lock {text!r} is neither a file nor the digest of a lock",
            fix="Name a lock file, or give all 64 hexadecimal digits that 'capsule lock' prints.",
        )
    return read_lock(Path(text)).digest()


def parse_limits(texts: Sequence[str]) -> dict[str, int]:
    """Parse ``FIELD=NUMBER`` with the fields of the spec's section ``limits``.

    Raises:
        CapsuleError: CAP-V056, anything else.
    """
    limits = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in LimitsSpec.model_fields or not re.fullmatch("[1-9][0-9]{0,8}", number):
            raise CapsuleError(
                "CAP-V056",
                f"--limit {text!r} is not FIELD=NUMBER",
                fix=f"FIELD is one of {', '.join(LimitsSpec.model_fields)}; NUMBER is a "
                "whole number above zero.",
            )
        limits[name] = int(number)
    return limits


_TREE = (
    "Ask for the bundle of the experiment that you mean. Its source tree must be the one at the "
    "spec's code.path. If you do not have the tree, use --expect-lock instead of --expect-spec."
)


def _unexpected(
    code: str, what: str, fix: str = "Ask for the bundle of the experiment that you mean."
) -> UntrustedError:
    return UntrustedError(
        code, f"the bundle is intact, but not the one you expect: {what}", fix=fix
    )
