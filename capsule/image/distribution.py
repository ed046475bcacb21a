"""The releases of Debian and Ubuntu that images are made of, and what follows from the choice."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from capsule.experiment.spec.image import PYTHON, ImageSpec

if TYPE_CHECKING:
    from packaging.tags import Tag

MACHINE = "x86_64"
PREFIX = "/usr"  # of the interpreter of an image
_NEWEST_OF_UV = 40  # uv has no platform with glibc 2.41 yet
# Oldest C libraries whose wheels also have a tag of before PEP 600, newest first.
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


@dataclass(frozen=True)
class Vendor:
    """Who publishes a distribution, and where its packages are.

    Attributes:
        name: The origin that its signed indexes state, e.g. ``Debian``.
        variable: The environment variable that lists other mirrors.
        mirrors: Its own mirrors.
        components: The parts of its archive that packages are taken from.
        updates: Endings of the names of suites that a mirror has besides the release itself.
        suites: How the names of its suites begin, as a regular expression.
        search: Page that finds packages of a release, by codename.
        alternative: Where packages are that its mirrors do not have.
    """

    name: str
    variable: str
    mirrors: tuple[str, ...]
    components: tuple[str, ...]
    updates: tuple[str, ...]
    suites: str
    search: str
    alternative: str

    @property
    def keyring(self) -> str:
        """The file in ``images/`` with the keys that sign its indexes."""
        return f"{self.name.lower()}-archive-keyring.asc"


DEBIAN = Vendor(
    name="Debian",
    variable="CAPSULE_DEBIAN_MIRROR",
    mirrors=("https://deb.debian.org/debian", "https://deb.debian.org/debian-security"),
    components=("main",),
    updates=("updates",),
    suites="bookworm|trixie|forky|duke|sid|unstable|testing|stable|oldstable|oldoldstable",
    search="https://packages.debian.org",
    alternative="a snapshot of Debian's archive of a day on which the lock was made, such as "
    "https://snapshot.debian.org/archive/debian/20260901T000000Z",
)
UBUNTU = Vendor(
    name="Ubuntu",
    variable="CAPSULE_UBUNTU_MIRROR",
    mirrors=("http://archive.ubuntu.com/ubuntu",),
    components=("main", "universe"),
    # Ubuntu's archive has a version in noble-updates and noble-security only until the next one,
    # but the release itself does not change. A lock of its packages can be built for years.
    updates=(),
    suites="jammy|noble|resolute|devel",
    search="https://packages.ubuntu.com",
    alternative="another mirror of Ubuntu's archive, such as "
    "http://old-releases.ubuntu.com/ubuntu for releases that are no longer supported",
)


@dataclass(frozen=True)
class Distribution:
    """A release of Debian or Ubuntu.

    Attributes:
        name: As specs say it, e.g. ``debian-12``.
        vendor: Who publishes it.
        codename: As mirrors say it, e.g. ``bookworm``.
        python: Version of its Python, e.g. ``3.11``.
        glibc: Version of its C library.
        libraries: Its packages of the libraries that the modules of its Python load.
    """

    name: str
    vendor: Vendor
    codename: str
    python: str
    glibc: tuple[int, int]
    libraries: frozenset[str]

    @property
    def title(self) -> str:
        """Its name in a sentence, e.g. ``Debian 12``."""
        return self.name.replace("-", " ").capitalize()

    @property
    def packages(self) -> str:
        """Where packages are below the interpreter's prefix, by Debian's local scheme."""
        return f"local/lib/python{self.python}/dist-packages"

    @property
    def site(self) -> str:
        """Where packages are in an image."""
        return f"usr/{self.packages}"

    @property
    def native(self) -> str:
        """Where Capsule's native parts are below the interpreter's prefix."""
        return f"{self.packages}/capsule/native/lib"

    @property
    def interpreter(self) -> str:
        """Path of the interpreter in an image."""
        return f"/usr/bin/python{self.python}"

    @property
    def abi(self) -> str:
        """Tag of the interpreter's binary interface (PEP 425), e.g. ``cp311``."""
        return f"cp{self.python.replace('.', '')}"

    @property
    def python_packages(self) -> frozenset[str]:
        """Names of its packages that hold the interpreter and what its modules load."""
        python = f"python{self.python}"
        own = {f"{python}-minimal", f"lib{python}-minimal", f"lib{python}-stdlib"}
        return self.libraries | own

    @property
    def platform(self) -> str:
        """The platform as uv calls it."""
        major, minor = self.glibc
        return f"{MACHINE}-manylinux_{major}_{min(minor, _NEWEST_OF_UV)}"

    @property
    def platform_tags(self) -> tuple[str, ...]:
        """Platform tags of the wheels that it takes (PEP 600), best first."""
        major, newest = self.glibc
        tags = []
        # The oldest C library that has a tag is glibc 2.5, that of manylinux1 (PEP 600).
        for minor in range(newest, 4, -1):
            tags.append(f"manylinux_{major}_{minor}_{MACHINE}")
            if minor in _LEGACY:
                tags.append(f"{_LEGACY[minor]}_{MACHINE}")
        return (*tags, f"linux_{MACHINE}")

    @property
    def markers(self) -> dict[str, str]:
        """The values of environment markers (PEP 508), as uv takes them when it resolves."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": MACHINE,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


@functools.cache
def supported_tags(distribution: Distribution) -> tuple[Tag, ...]:
    """Return the tags of wheels that the distribution's interpreter takes, best first."""
    from packaging.tags import compatible_tags, cpython_tags

    major, minor = map(int, distribution.python.split("."))
    abi, platforms = distribution.abi, distribution.platform_tags
    return (
        *cpython_tags((major, minor), [abi], platforms),
        *compatible_tags((major, minor), abi, platforms),
    )


_COMMON = frozenset(
    {
        *("libbz2-1.0", "libcrypt1", "libexpat1", "libffi8", "libgcc-s1", "liblzma5"),
        *("libncursesw6", "libsqlite3-0", "libstdc++6", "libtinfo6", "libuuid1", "zlib1g"),
    }
)
_OLDER = _COMMON | {"libreadline8", "libssl3"}
_NEWER = _COMMON | {"libreadline8t64", "libssl3t64"}  # after the change to 64 bits of time_t
DEBIAN_12 = Distribution("debian-12", DEBIAN, "bookworm", PYTHON["debian-12"], (2, 36), _OLDER)
DEBIAN_13 = Distribution("debian-13", DEBIAN, "trixie", PYTHON["debian-13"], (2, 41), _NEWER)
UBUNTU_24_04 = Distribution(
    "ubuntu-24.04", UBUNTU, "noble", PYTHON["ubuntu-24.04"], (2, 39), _NEWER
)
DISTRIBUTIONS = {each.name: each for each in (DEBIAN_12, DEBIAN_13, UBUNTU_24_04)}


def distribution_of(image: ImageSpec) -> Distribution:
    """Return the distribution that a spec names."""
    return DISTRIBUTIONS[image.base]
