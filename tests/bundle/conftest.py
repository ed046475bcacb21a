"""A small signed bundle and the keys around it, and copyright files of Debian packages."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from capsule.bundle.bundle import Content, pack
from capsule.bundle.keys import PrivateKey
from capsule.image.archives.layers import TarEntry, file_entry, write_tar

CLAIMS = b'{"returns":["0x1.8p+1"],"schema":"capsule/test/v1"}'


def private_key(number: int) -> PrivateKey:
    return PrivateKey(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32))


@pytest.fixture(scope="session")
def alice() -> PrivateKey:
    return private_key(1)


@pytest.fixture(scope="session")
def mallory() -> PrivateKey:
    return private_key(2)


@pytest.fixture(scope="session")
def claim_id() -> str:
    return hashlib.sha256(CLAIMS).hexdigest()


@pytest.fixture(scope="session")
def contents() -> dict[str, Content]:
    noise = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(40))
    return {
        "claims.json": Content(CLAIMS, "claims", "application/json"),
        "REPRODUCING.md": Content(b"# How\n", "guide", "text/markdown"),
        "run/trace.jsonl": Content(noise, "run", "application/jsonl"),
        "run/output.log": Content(b"", "log", "text/plain"),
    }


@pytest.fixture(scope="session")
def bundle(
    tmp_path_factory: pytest.TempPathFactory,
    contents: dict[str, Content],
    claim_id: str,
    alice: PrivateKey,
) -> Iterator[Path]:
    yield pack(contents, claim_id, alice, tmp_path_factory.mktemp("bundle") / "run.capsule.tar")


FORMAT = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
COPYRIGHT = (
    FORMAT
    + """\
Upstream-Name: example
License: Apache-2.0
 of the header, which is a simplification

Files: *
Copyright: 2020 A. Author
License: GPL-2+ or Artistic
 This is free software.
 .
 License: not a field, as it is indented

# A comment stands alone.
Files:
 debian/*
 old/*
Copyright: 2020 A. Author
license:  expat

Files: doc/*
Copyright: 2020 A. Author
License: GPL-2+ or Artistic

License: GPL-2+
 A text that paragraphs refer to.
"""
)


@pytest.fixture
def base_layer(tmp_path):
    """A layer of packages; some share a documentation, as Debian's do, by links."""

    def link(path, target):
        return TarEntry(path, "test", "symlink", 0o777, target=target)

    entries = [
        file_entry("usr/share/doc/gcc-12-base/copyright", "test", COPYRIGHT.encode()),
        link("usr/share/doc/libstdc++6", "gcc-12-base"),
        link("usr/share/doc/libgcc-s1/copyright", "/usr/share/doc/libstdc++6/copyright"),
        file_entry("usr/share/doc/bash/copyright", "test", b"in words, \xff"),
        link("usr/share/doc/loop", "loop"),
        link("usr/share/doc/away", "../../../../etc"),
        file_entry("etc/copyright", "test", COPYRIGHT.encode()),
    ]
    path = tmp_path / "layer.tar"
    with path.open("wb") as stream:
        write_tar(entries, stream.write)
    return path


@pytest.fixture
def genuine(tmp_path):
    """Bob's receipt for Alice's bundle."""
    from tests.bundle.receipts import BOB, receipt

    return receipt(tmp_path, BOB)
