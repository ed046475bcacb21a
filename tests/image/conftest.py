"""Hand-made packages: small enough to read, built without the code under test."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zstandard

from capsule.experiment.lock import Lock, LockedCode, LockedDebianPackage, LockedImage, LockedWheel
from capsule.host.spec_file import parse_spec
from capsule.image.archives.layers import file_entry, write_tar
from capsule.image.assembly.assemble import Image, assemble
from capsule.image.assembly.base import make_base
from capsule.image.assembly.making import ASSEMBLER_VERSION
from capsule.image.cache import Cache
from capsule.image.code import training_code_digest
from capsule.image.distribution import DEBIAN_12
from capsule.image.recipe import load_recipe
from tests.image.package_index import NVIDIA, Machine, make_wheel

SITE = DEBIAN_12.site

SPEC = b"""\
schema: capsule/spec/v1
name: tiny
environment: {suite: atari, game: breakout}
trainer: {algorithm: dqn}
"""
CODE = {"capsule/__init__.py": b'"""Tiny."""\n', "capsule/training/__init__.py": b""}


PIP_VARIABLES = ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "CERT", "TRUSTED_HOST")


@pytest.fixture(autouse=True)
def _without_trainers(monkeypatch):
    """Hand-made indexes and locks have no torch."""
    monkeypatch.setattr("capsule.image.pinning.check_packages", lambda *_: None)


def forget_pip_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what this machine's environment tells pip."""
    for name in PIP_VARIABLES:
        monkeypatch.delenv(f"PIP_{name}", raising=False)


def only_these_sources(monkeypatch: pytest.MonkeyPatch, index: Path, folder: Path) -> None:
    """Make an index and a folder of wheels the only sources that pip is configured for."""
    forget_pip_variables(monkeypatch)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index.as_uri())
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    # Whatever is not in these sources cannot be reached, and says so at once.
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@dataclass(frozen=True)
class Member:
    """One member of a data archive."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    target: str = ""


def build_tar(members: Sequence[Member]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.type, info.mode, info.linkname = member.kind, member.mode, member.target
            info.mtime, info.uid, info.uname = 1_700_000_000, 4711, "someone"
            info.size = len(member.data)
            archive.addfile(info, io.BytesIO(member.data))
    return buffer.getvalue()


def build_ar(members: Mapping[str, bytes]) -> bytes:
    parts = [b"!<arch>\n"]
    for name, data in members.items():
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n"
        parts += [header.encode(), data, b"\n" * (len(data) % 2)]
    return b"".join(parts)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}


def build_deb(
    members: Sequence[Member],
    name: str = "tiny",
    version: str = "1.0-1",
    architecture: str = "all",
    suffix: str = ".xz",
    relations: str = "",
) -> bytes:
    control = f"Package: {name}\nVersion: {version}\nArchitecture: {architecture}\n"
    control += relations + "Description: a package\n Version: of many\n"
    compress = COMPRESS[suffix]
    return build_ar(
        {
            "debian-binary": b"2.0\n",
            f"control.tar{suffix}": compress(build_tar([Member("./control", control.encode())])),
            f"data.tar{suffix}": compress(build_tar(members)),
        }
    )


def build_wheel(
    files: Mapping[str, bytes],
    name: str = "small",
    version: str = "1.0",
    modes: Mapping[str, int] | None = None,
    requires: Sequence[str] = (),
    record: Callable[[str], str] = lambda text: text,
) -> bytes:
    """Build a wheel; ``record`` may falsify its RECORD."""
    info = f"{name}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
    lines += [f"Requires-Dist: {requirement}\n" for requirement in requires]
    metadata = "".join(lines).encode()
    everything = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in everything.items()]
    recorded = record("\n".join([*lines, f"{info}/RECORD,,", ""]))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, data in {**everything, f"{info}/RECORD": recorded.encode()}.items():
            member = zipfile.ZipInfo(path, (2024, 5, 6, 7, 8, 10))
            member.external_attr = (modes or {}).get(path, 0o100644) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, data)
    return buffer.getvalue()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


LONG_NAME = "deep/" + "a-rather-long-folder-name/" * 5 + "ünïcode.txt"
TINY_DEB = (
    Member("./", kind=tarfile.DIRTYPE, mode=0o755),
    Member("./bin/", kind=tarfile.DIRTYPE, mode=0o700),
    Member("./bin/tool", b"#!/bin/sh\n", mode=0o755),
    Member("./bin/alias", kind=tarfile.LNKTYPE, target="./bin/tool"),
    Member("./lib64/loader", kind=tarfile.SYMTYPE, target="/lib/loader.so"),
    Member("./tmp/", kind=tarfile.DIRTYPE, mode=0o1777),
    Member("./var/local/", kind=tarfile.DIRTYPE, mode=0o2775),
    Member(f"./usr/share/{LONG_NAME}", b"long\n", mode=0o600),
)
TINY_WHEEL = {
    "small/__init__.py": b"VALUE = 1\n",
    "small/data.bin": bytes(range(256)) * 40,
    "small/native.so": b"\x7fELF",
    "small/__pycache__/__init__.cpython-311.pyc": b"compiled",
    "small/hints.pyi": b"VALUE: int\n",
    "small-1.0.data/scripts/run": b"#!python\nprint(1)\n",
    "small-1.0.data/data/share/small/readme": b"read me\n",
}


@dataclass
class Tiny:
    """A lock over hand-made packages, and what it needs to be assembled."""

    folder: Path
    debs: list[bytes] = field(default_factory=lambda: [build_deb(TINY_DEB)])
    wheels: dict[str, bytes] = field(default_factory=lambda: {"small": build_wheel(TINY_WHEEL)})
    spec: bytes = SPEC
    base: str | None = None  # the digest in the lock, if not the one that the packages give

    @property
    def cache(self) -> Cache:
        return Cache(self.folder / "cache")

    @property
    def code_layer(self) -> Path:
        path = self.folder / "code.tar"
        with path.open("wb") as stream:
            write_tar([file_entry(f"{SITE}/{n}", "", d) for n, d in CODE.items()], stream.write)
        return path

    def lock(self) -> Lock:
        """Put the packages into the cache and return the lock that names them."""
        recipe = load_recipe("cpu", "debian-12")
        packages = tuple(
            LockedDebianPackage(
                name="tiny" if not i else f"tiny{i}",
                version="1.0-1",
                architecture="all",
                pool=f"pool/main/t/tiny{i or ''}_1.0-1_all.deb",
                size=len(data),
                sha256=self._add(data),
                requested=True,
            )
            for i, data in enumerate(self.debs)
        )
        image = LockedImage(
            assembler=ASSEMBLER_VERSION,
            recipe="cpu",
            recipe_sha256=recipe.digest(),
            debian=packages,
            base=self.base or self._base(packages),
            wheels=tuple(
                LockedWheel(
                    name=name,
                    version="1.0",
                    filename=f"{name}-1.0-py3-none-any.whl",
                    sha256=self._add(data),
                )
                for name, data in self.wheels.items()
            ),
            code=LockedCode(version="0.0.0", sha256=training_code_digest(CODE)),
        )
        return Lock(schema="capsule/lock/v1", spec=parse_spec(self.spec, "tiny"), image=image)

    def assemble(self) -> Image:
        return self.assemble_lock(self.lock())

    def assemble_lock(self, lock: Lock) -> Image:
        """Assemble from the cache as it stands."""
        return assemble(
            lock, self.cache, supplied={"code": self.code_layer}, progress=lambda _: None
        )

    def _base(self, packages: tuple[LockedDebianPackage, ...]) -> str:
        """Return the digest of the base layer, which is made in another cache."""
        elsewhere = Cache(self.folder / "elsewhere")
        for package in packages:
            elsewhere.add(self.cache.path(package.sha256), package.sha256)
        layer = make_base(packages, load_recipe("cpu", "debian-12"), elsewhere, lambda _: None)
        return layer.diff_id.removeprefix("sha256:")

    def _add(self, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        source = self.folder / "package"
        source.write_bytes(data)
        self.cache.add(source, sha256)
        return sha256


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose index and folder are the only sources of packages."""
    machine = Machine(tmp_path)
    only_these_sources(monkeypatch, machine.index, machine.folder)
    return machine


@pytest.fixture
def torch_machine(machine):
    """The index has torch's CUDA build, the folder its CPU build, as on many machines."""
    machine.publish("torch", "2.13.0", *(f"{name}=={nv}" for name, nv in NVIDIA.items()))
    for name, version in NVIDIA.items():
        machine.publish(name, version, tag="py3-none-manylinux_2_27_x86_64")
    make_wheel(machine.folder, "torch", "2.13.0+cpu")
    return machine
