"""The engine, the code and the image with which a verifier executes a run, or why it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from capsule import __version__, execution
from capsule.bundle.run_bundle import RecordedRun, image_claim
from capsule.engine.interface import Engine
from capsule.engine.select import EngineChoice, host_flaws, open_engine
from capsule.experiment.lock import Lock
from capsule.experiment.spec import LimitsSpec
from capsule.host.errors import CapsuleError
from capsule.host.platform import require_execution
from capsule.host.reporter import Reporter
from capsule.image.assembly.assemble import Image
from capsule.image.assembly.base import is_genuine
from capsule.image.cache import Cache
from capsule.image.code import training_code_digest
from capsule.image.distribution import distribution_of
from capsule.image.releases import release_of
from capsule.verification.execution.reexecution import Reexecutor
from capsule.verification.findings import ImageFinding
from capsule.verification.integrity.data import supplied_data
from capsule.verification.integrity.layers import (
    Name,
    embedded_image,
    registry_image,
    supplied_layers,
)
from capsule.verification.request import ImageChoice, VerifyRequest
from capsule.verification.verdict import ImageSource

NO_DEBIAN = "CAP-I303"


def check_unconfined(choice: EngineChoice, *, image: bool) -> None:
    """Reject a bundle without an image unless the user chose to execute it without a container.

    This holds for a trainer's bundle as well, since its wheels are code.

    Args:
        choice: The engine that the user named in this command.
        image: Whether the bundle's run had an image.

    Raises:
        CapsuleError: CAP-V009, the run had none, so it can only be repeated without a container.
    """
    if image or choice == "process":
        return
    raise CapsuleError(
        "CAP-V009",
        "the bundle was made without a container, and can only be executed without one",
        fix="If you trust the code in the bundle with all permissions of your account, pass "
        "--engine process.",
    )


def check_embedded(choice: EngineChoice, image: ImageChoice) -> None:
    """Reject the choice of the signer's image where no image is used.

    Raises:
        CapsuleError: CAP-V050, the plain-process engine runs no image.
    """
    if image != "rebuilt" and choice == "process":
        raise CapsuleError(
            "CAP-V050",
            f"--image {image}: the plain-process engine runs no image",
            fix="Use a container engine, which also confines what the image does.",
        )


def confined_engine(
    request: VerifyRequest, run: RecordedRun, note: Callable[[str], None]
) -> Engine:
    """Open the engine that may execute the run of a bundle.

    Raises:
        CapsuleError: What :func:`require_execution`, :func:`check_unconfined`,
            :func:`check_embedded` and :func:`open_engine` raise.
    """
    require_execution()
    check_unconfined(request.engine, image=run.claims.image is not None)
    check_embedded(request.engine, request.image)
    return open_engine(request.engine, strange=True, progress=note)


def check_code(lock: Lock, accepted: Literal["own", "supplied"]) -> bool:
    """Reject training code that is not Capsule's own, unless the user accepts it.

    Capsule's own is that of this version and that of each version that was released before it,
    by its digest (:mod:`capsule.image.releases`).

    Returns:
        Whether it is Capsule's own.

    Raises:
        CapsuleError: CAP-V014.
    """
    code = lock.image.code.sha256
    own = code == training_code_digest() or release_of(code) is not None
    if not own and accepted == "own":
        raise CapsuleError(
            "CAP-V014",
            f"the training code in the bundle, which states that it is of Capsule "
            f"{lock.image.code.version}, is neither that of this Capsule {__version__} nor that of "
            "a release that it knows",
            fix="Verify with the version of Capsule that made the bundle, or with a later release. "
            "If the run had an image, you can also read the code in the bundle "
            "(image/layer-code.tar.zst) and pass --code supplied.",
        )
    return own


def check_gpu_host(lock: Lock, engine: Engine) -> None:
    """Reject the signer's own image if a container with a GPU could break out through a known flaw.

    Other images are executed, and :func:`capsule.execution.prepare` prints a warning.

    Raises:
        CapsuleError: CAP-V055.
    """
    if flaws := host_flaws(lock, engine):
        raise CapsuleError(
            "CAP-V055",
            f"the image is the signer's own, and this machine's {'; '.join(flaws)}",
            fix="Update it. 'capsule verify' without --image and --base builds the image from the "
            "lock instead.",
        )


def prepare_executor(
    request: VerifyRequest,
    run: RecordedRun,
    engine: Engine,
    cache: Cache,
    reporter: Reporter,
) -> tuple[Reexecutor, ImageFinding]:
    """Make the engine ready to execute the lock of a run, and say with which image.

    Raises:
        CapsuleError: CAP-V055 of :func:`check_gpu_host`; what :func:`prepare_image` and
            :func:`capsule.verification.integrity.data.supplied_data` raise.
    """
    limits = lowered(run.lock.spec.limits, request.limits)
    source: ImageSource = request.image
    if source == "rebuilt" and request.base == "supplied" and not is_genuine(run.lock):
        source = "supplied-base"
    if source != "rebuilt":
        check_gpu_host(run.lock, engine)
    data = supplied_data(run, cache, request.data, reporter.note)
    prepared = prepare_image(request, run, engine, cache, reporter)
    return Reexecutor(engine, limits, data, reporter), identify_image(source, run, prepared)


def lowered(limits: LimitsSpec, wanted: Mapping[str, int]) -> LimitsSpec:
    """Return the bundle's limits, none above what the verifier wants."""
    return limits.model_copy(
        update={name: min(value, getattr(limits, name)) for name, value in wanted.items()}
    )


def prepare_image(
    request: VerifyRequest,
    run: RecordedRun,
    engine: Engine,
    cache: Cache,
    reporter: Reporter,
) -> Image | None:
    """Make the engine ready: with the image rebuilt from the lock, or with the signer's own.

    Raises:
        CapsuleError: CAP-V013, the base layer cannot be built from the locked packages; what
            :func:`capsule.execution.prepare` raises.
    """
    lock = run.lock
    # execution.prepare() makes this check itself, and the signer's images do not go through it.
    engine.check(lock)
    if request.image != "rebuilt":
        signers = (
            embedded_image(run)
            if request.registry is None
            else registry_image(run, request.registry, reporter.note)
        )
        with signers as image:
            engine.prepare(lock, image, cache, progress=reporter.note)
            # By now the engine has its own copy of the layers, which are deleted with the block.
            return image
    # The layers to take from the bundle instead of building them here: those that the user accepts,
    # and a base layer whose digest Capsule itself ships.
    names: list[Name] = []
    if request.base == "supplied" or is_genuine(lock):
        names.append("base")
    # By now check_code has let it pass: it is of a known release, or the user accepts the signer's.
    if lock.image.code.sha256 != training_code_digest():
        names.append("code")
    with supplied_layers(run, names) as (supplied, project):
        try:
            return execution.prepare(
                lock,
                engine,
                cache,
                sources=request.sources,
                supplied=supplied,
                project=project,
                reporter=reporter,
            )
        except CapsuleError as error:
            if error.code != NO_DEBIAN:
                raise
            vendor = distribution_of(lock.spec.image).vendor
            raise CapsuleError(
                "CAP-V013",
                f"the base layer cannot be built from the locked packages: {error.message}",
                fix=f"Name {vendor.alternative}, in {vendor.variable}; or pass --base supplied to "
                "execute the base layer that the signer put into the bundle.",
            ) from error


def identify_image(source: ImageSource, run: RecordedRun, image: Image | None) -> ImageFinding:
    """Return the finding of a prepared image: whether rebuilding it gave the claimed one."""
    claim = image_claim(image)
    if claim is None:
        unclaimed = run.claims.image is not None
        return ImageFinding(image_source=None, image_rebuilt=False, claim=None, unclaimed=unclaimed)
    rebuilt = claim == run.claims.image and source == "rebuilt"
    return ImageFinding(image_source=source, image_rebuilt=rebuilt, claim=claim)


def require_claimed_image(request: VerifyRequest, run: RecordedRun, image: ImageFinding) -> None:
    """Reject an image that is not the claimed one, layer by layer.

    Raises:
        CapsuleError: CAP-V005.
    """
    found, claimed = image.claim, run.claims.image
    # Without an image there is nothing to compare; verify() then decides nothing about the run.
    if found is None or found == claimed:
        return
    raise CapsuleError(
        "CAP-V005",
        f"the {request.image} image is {found.config}, the claimed one is "
        f"{claimed.config if claimed else 'none'}",
        fix="The lock does not produce the claimed image; compare image/config.json of the bundle.",
    )
