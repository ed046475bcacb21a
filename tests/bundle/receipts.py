"""Receipts of a bundle that Alice signed, and of others."""

import base64
import json

from capsule.bundle.receipts import Detail, VerificationPolicy, make_statement, write_receipt
from capsule.bundle.tally import Original
from capsule.experiment.canonical import canonical_json
from capsule.machine.kind import MachineKind
from tests.bundle.conftest import private_key

CLAIM, MANIFEST = "c" * 64, "d" * 64
TIME = "2026-11-21T12:00:00Z"
INTEL = MachineKind(
    processor="GenuineIntel 6/85",
    processor_name="Intel(R) Xeon(R)",
    instructions=("avx2", "fma"),
    gpu=None,
    system="debian 12",
    engine="docker",
)
AMD = INTEL.model_copy(update={"processor": "AuthenticAMD 25/1", "processor_name": "AMD EPYC"})
ALICE, BOB, CAROL, MALLORY = (private_key(number) for number in (10, 11, 12, 13))
TRUSTED = (BOB.public, CAROL.public)


def original(*authors, authentic=True):
    """Return Alice's bundle, or one that others signed."""
    names = frozenset(key.public.fingerprint for key in authors or (ALICE,))
    return Original(CLAIM, MANIFEST, names, authentic)


BUNDLE = original()


def detail(
    verdict="reproduced-bitwise",
    machine=INTEL,
    mode="full",
    difference=None,
    signer=ALICE,
    policy=None,
):
    accepted = {"image": "rebuilt", "own_code": True, **(policy or {})}
    return Detail(
        verdict=verdict,
        expected="bitwise",
        policy=VerificationPolicy(mode=mode, tolerance=None, **accepted),
        signers=(signer.public.fingerprint,),
        machine=machine,
        difference=difference,
    )


def receipt(folder, key, claim=CLAIM, manifest=MANIFEST, time=TIME, **facts):
    statement = make_statement(claim, manifest, time, detail(**facts))
    return write_receipt(statement, key, folder / "run.capsule.tar", None)


def payload_of(path):
    return base64.b64decode(json.loads(path.read_bytes())["payload"])


def signed(payload, key, kind="application/vnd.in-toto+json"):
    """Sign any bytes under any type: what a careless or hostile holder of the key may do."""
    message = b"DSSEv1 %d %b %d %b" % (len(kind), kind.encode(), len(payload), payload)
    encode = lambda data: base64.b64encode(data).decode()  # noqa: E731
    signature = {"keyid": key.public.fingerprint, "sig": encode(key.sign(message))}
    return canonical_json(
        {"payload": encode(payload), "payloadType": kind, "signatures": [signature]}
    )
