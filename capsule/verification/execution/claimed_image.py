"""The image of a re-execution: rebuilt from the lock, or the signer's own, and the claimed one."""

from __future__ import annotations

from capsule import execution
from capsule.bundle import run_bundle
from capsule.engine.interface import Engine
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.image.assembly.assemble import Image
from capsule.image.assembly.base import is_genuine
from capsule.image.cache import Cache
from capsule.image.code import training_code_digest
from capsule.verification.findings import ImageFinding
from capsule.verification.integrity.contents import Contents
from capsule.verification.integrity.image_documents import layer_identities
from capsule.verification.integrity.layers import Name, embedded_image, supplied_layers
from capsule.verification.request import VerifyRequest
from capsule.verification.verdict import ImageSource

NO_DEBIAN = ("CAP-I303", "CAP-I304")


def prepare_image(
    request: VerifyRequest,
    contents: Contents,
    engine: Engine,
    cache: Cache,
    reporter: execution.Reporter,
) -> Image | None:
    """Make the engine ready: with the image rebuilt from the lock, or with the signer's own.

    Raises:
        CapsuleError: CAP-V013, the base layer cannot be built from the locked packages; what
            :func:`capsule.execution.prepare` raises.
    """
    bundle, lock = contents.bundle, contents.lock
    identities = layer_identities(bundle, lock, contents.claims)
    if request.image == "embedded":
        with embedded_image(bundle, lock, identities) as image:
            engine.prepare(lock, image, cache, progress=reporter.note)
            return image
    with supplied_layers(bundle, identities, _taken(request, lock)) as (supplied, project):
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
            if error.code not in NO_DEBIAN:
                raise
            raise CapsuleError(
                "CAP-V013",
                f"the base layer cannot be built from the locked packages: {error.message}",
                fix="Name a mirror that has the packages in apt's configuration; or pass --base "
                "supplied to execute the base layer that the signer put into the bundle.",
            ) from error


def _taken(request: VerifyRequest, lock: Lock) -> list[Name]:
    """Choose what to take from the bundle, instead of building it here.

    That is what the user accepts, and a base layer whose digest Capsule itself ships.
    """
    base = request.base == "supplied" or is_genuine(lock.image)
    code = lock.image.code.sha256 != training_code_digest()
    names: dict[Name, bool] = {"base": base, "code": code}
    return [name for name, taken in names.items() if taken]


def identify_image(request: VerifyRequest, contents: Contents, image: Image | None) -> ImageFinding:
    """Say where the prepared image is from, and whether rebuilding it gave the claimed one."""
    if image is None:
        return ImageFinding(source=None, rebuilt=False)
    genuine = request.base == "packages" or is_genuine(contents.lock.image)
    source: ImageSource = "rebuilt" if genuine else "supplied-base"
    if request.image == "embedded":
        source = "embedded"
    claimed = run_bundle.image_claim(image) == contents.claims.image
    return ImageFinding(source=source, rebuilt=claimed and source == "rebuilt")


def require_claimed_image(request: VerifyRequest, contents: Contents, image: Image | None) -> None:
    """Refuse an image that is not the claimed one, layer by layer.

    Raises:
        CapsuleError: CAP-V005.
    """
    found, claimed = run_bundle.image_claim(image), contents.claims.image
    if found is None or found == claimed:
        return
    raise CapsuleError(
        "CAP-V005",
        f"the {request.image} image is {found.config}, the claimed one is "
        f"{claimed.config if claimed else 'none'}",
        fix="The lock does not produce the claimed image; compare image/config.json of the bundle.",
    )
