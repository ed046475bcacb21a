"""The image of a bundle, as it is pushed to a registry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.run_bundle import RecordedRun, image_claim
from capsule.bundle.trust import TrustPolicy
from capsule.execution import build_image
from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Reporter
from capsule.image.assembly.assemble import Image
from capsule.image.cache import Cache
from capsule.verification.integrity.consistency import check_consistency
from capsule.verification.integrity.layers import embedded_image, supplied_layers


@contextmanager
def image_of_bundle(
    path: Path, trust: TrustPolicy, cache: Cache, reporter: Reporter
) -> Iterator[Image]:
    """Yield the claimed image of a bundle: the embedded one, or else one that is built here.

    Nothing is executed. What is not embedded is made of the locked packages, and of the layers
    that the bundle carries.

    Raises:
        CapsuleError: CAP-I406, the run had no image; CAP-V005, the lock gives another image than
            the claimed one; CAP-B…, CAP-V…, the bundle is not intact or not consistent; CAP-I…, a
            package is not available.
    """
    with open_bundle(path, trust) as bundle, ExitStack() as stack:
        run = RecordedRun.read(bundle)
        check_consistency(run)
        if run.claims.image is None:
            raise CapsuleError(
                "CAP-I406",
                f"{path.name} has no image, because its run was a plain process",
                fix="Name a spec, or the bundle of a run in a container.",
            )
        if run_bundle.IMAGE_ARCHIVE in bundle.files:
            image = stack.enter_context(embedded_image(run))
        else:
            supplied, project = stack.enter_context(supplied_layers(run))
            image = build_image(
                run.lock,
                cache,
                sources=SourcesSpec(),
                supplied=supplied,
                project=project,
                reporter=reporter,
            )
        if image_claim(image) != run.claims.image:
            raise CapsuleError(
                "CAP-V005",
                f"the image is {image.config_digest}, the claimed one is {run.claims.image.config}",
                fix="The lock does not produce the claimed image; compare image/config.json of "
                "the bundle.",
            )
        yield image
