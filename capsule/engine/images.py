"""The images of Capsule that an engine has, and how much space their removal would free.

An image is Capsule's if it has Capsule's labels, Capsule wrote each of its layers, and it has no
name but the one that Capsule gave it. Images that were made from one of Capsule's, and those that a
user has tagged, are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capsule.engine.connection import CONFLICT, ContainerEngineName, engine_errors, engine_name

if TYPE_CHECKING:
    from docker import DockerClient

LABELS = ("capsule.assembler", "capsule.recipe", "capsule.version")
NAMES = "localhost/capsule/"
_AUTHOR = "capsule "  # of each layer, in the history of an image


@dataclass(frozen=True)
class EngineImage:
    """An image of Capsule in an engine.

    Attributes:
        id: As the engine names it.
        names: Its tags.
        layers: Size of each layer in bytes, from the bottom up, by the layers up to it: engines
            keep a layer once for all images that have the same layers below it.
        used: Whether a container has the image, whether it runs or not.
    """

    id: str
    names: tuple[str, ...]
    layers: Mapping[str, int]
    used: bool


class EngineImages:
    """The images in an engine, as they are when this object is made."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client
        self.engine: ContainerEngineName = engine_name(client.version())
        with engine_errors(self.engine):
            self._inspected = list(inspected(client))
            used = {_digest(each["ImageID"]) for each in client.api.containers(all=True)}
            self.found = tuple(self._capsules(used))

    def removable(self) -> list[EngineImage]:
        """Return the images that no container has."""
        return [image for image in self.found if not image.used]

    def freed(self, images: Iterable[EngineImage]) -> int:
        """Return how many bytes the removal of some images frees: layers that no other has."""
        removed = {image.id: image for image in images}
        others = [each for each in self._inspected if each["Id"] not in removed]
        kept = {chain for each in others for chain in _chains(each)}
        layers = {chain: size for each in removed.values() for chain, size in each.layers.items()}
        return sum(size for chain, size in layers.items() if chain not in kept)

    def remove(self, image: EngineImage) -> bool:
        """Remove an image; tell whether it is gone. The engine keeps it if a container has it.

        Raises:
            CapsuleError: CAP-E006, the engine fails.
        """
        from docker.errors import APIError, NotFound

        with engine_errors(self.engine):
            # Docker removes no image by its id as long as several names lead to it.
            for name in image.names or (image.id,):
                try:
                    self._client.images.remove(name)
                except NotFound:  # another process was faster
                    continue
                except APIError as error:
                    if error.status_code != CONFLICT:
                        raise
                    return False
        return True

    def _capsules(self, used: set[str]) -> Iterator[EngineImage]:
        from docker.errors import NotFound

        for facts in self._inspected:
            names = tuple(facts.get("RepoTags") or ())
            labels = (facts.get("Config") or {}).get("Labels") or {}
            if not all(label in labels for label in LABELS):
                continue
            if not all(name.startswith(NAMES) for name in names):
                continue
            try:
                history = self._client.api.history(facts["Id"])
            except NotFound:  # it was removed since it was inspected
                continue
            # An image that was built on one of Capsule's inherits its labels, but has more layers.
            if not all(str(layer["CreatedBy"]).startswith(_AUTHOR) for layer in history):
                continue
            yield EngineImage(
                id=facts["Id"],
                names=names,
                layers=dict(zip(_chains(facts), _sizes(history), strict=True)),
                used=_digest(facts["Id"]) in used,
            )


def inspected(client: DockerClient) -> Iterator[dict[str, Any]]:
    """Yield what an engine says of each of its images."""
    from docker.errors import NotFound

    for summary in client.api.images():
        with suppress(NotFound):  # another process has removed it since it was listed
            yield client.api.inspect_image(summary["Id"])


def _digest(name: str) -> str:
    """Return an image's id without its algorithm, which Podman leaves out in places."""
    return name.removeprefix("sha256:")


def _sizes(history: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the sizes of layers, from the bottom up; a history begins at the top."""
    return [int(layer["Size"]) for layer in reversed(history)]


def _chains(facts: Mapping[str, Any]) -> list[str]:
    """Return a name for each layer, that of all layers up to it."""
    layers = facts["RootFS"].get("Layers") or []
    return [" ".join(layers[: count + 1]) for count in range(len(layers))]
