"""A small signed bundle and the keys around it."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from capsule.bundle.bundle import Content, pack
from capsule.bundle.keys import PrivateKey

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
