"""A machine with one package index and one folder of wheels, for the resolution of packages."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

from capsule.experiment.spec import (
    CudaAccelerator,
    GymnasiumEnvironment,
    ImageSpec,
    SourcesSpec,
    Spec,
)
from capsule.experiment.trainers import DqnTrainer
from capsule.image.cache import Cache
from capsule.image.resolution.resolve import resolve_wheels

CUDA = CudaAccelerator(kind="cuda", cuda="13.0", cudnn=">=9.10", driver=">=580.65")
NVIDIA = {
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-cudnn-cu13": "9.20.0.48",
    "nvidia-cublas": "13.1.1.3",
}


def make_spec(*packages: str, accelerator=None, find_links=(), debian=()) -> Spec:
    image = ImageSpec(
        packages=packages, debian=debian, sources=SourcesSpec(find_links=tuple(find_links))
    )
    return Spec(
        schema="capsule/spec/v1",
        name="tiny",
        image=image,
        environment=GymnasiumEnvironment(suite="gymnasium", id="CartPole-v1"),
        trainer=DqnTrainer(algorithm="dqn", network="mlp"),
        **({"accelerator": accelerator} if accelerator else {}),
    )


def make_wheel(
    folder: Path, name: str, version: str, *needs: str, tag: str = "py3-none-any"
) -> str:
    """Write a wheel and return its SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(f"{stem}.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    (folder / f"{stem}-{tag}.whl").write_bytes(buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


class Machine:
    """A machine with one package index and one folder of wheels, and nothing else."""

    def __init__(self, root: Path) -> None:
        self.index, self.folder = root / "simple", root / "wheels"
        self.cache = Cache(root / "cache")
        self.messages: list[str] = []
        for path in (self.index, self.folder):
            path.mkdir()

    def publish(self, name: str, version: str, *needs: str, **options: str) -> str:
        project = self.index / name
        sha256 = make_wheel(project, name, version, *needs, **options)
        links = (
            f'<a href="{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">'
            f"{path.name}</a>"
            for path in sorted(project.glob("*.whl"))
        )
        (project / "index.html").write_text("\n".join(links))
        return sha256

    def wheels(self, spec: Spec, *own: str) -> dict[str, str]:
        locked = resolve_wheels(spec, own, self.cache, self.messages.append)
        return {wheel.name: wheel.version for wheel in locked}
