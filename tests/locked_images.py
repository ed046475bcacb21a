"""Images in locks, for tests that do not build them."""

from typing import Any

from capsule.experiment.lock import LockedCode, LockedImage

ZERO = "0" * 64


def locked_image(code: str = ZERO, version: str = "0.1.0", **changes: Any) -> LockedImage:
    """Return an image without packages, with the training code of a digest."""
    facts: dict[str, Any] = {
        "assembler": 1,
        "recipe": "cpu",
        "recipe_sha256": ZERO,
        "debian": (),
        "base": ZERO,
        "wheels": (),
        "code": LockedCode(version=version, sha256=code),
    }
    return LockedImage(**facts | changes)
