"""The vectors of project Wycheproof, as they are, through the verifier of bundles."""

import json
from pathlib import Path

import pytest

from capsule.bundle.algorithms import ECDSA_P256
from capsule.bundle.keys import PublicKey

VECTORS = Path(__file__).parent / "vectors"


@pytest.mark.parametrize(
    ("name", "count"), [("ed25519_test.json", 151), ("ecdsa_secp256r1_sha256_test.json", 484)]
)
def test_every_vector(name, count):
    document = json.loads((VECTORS / name).read_bytes())
    assert document["numberOfTests"] == count
    wrong, tried = [], 0
    for group in document["testGroups"]:
        fact = group["publicKey"]
        key = (
            PublicKey(bytes.fromhex(fact["pk"]))
            if fact["type"] == "EDDSAPublicKey"
            else PublicKey(bytes.fromhex(fact["uncompressed"]), algorithm=ECDSA_P256)
        )
        for test in group["tests"]:
            tried += 1
            found = key.verify(bytes.fromhex(test["sig"]), bytes.fromhex(test["msg"]))
            if found != (test["result"] == "valid"):
                wrong.append((test["tcId"], test["comment"], test["result"]))
    assert wrong == []
    assert tried == count
