"""Envelopes and documents that are not what they must be (cases 1 to 6, 9, 10 and 15 to 20)."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from capsule.bundle import run_bundle
from capsule.bundle.claims import TrainingClaims
from capsule.bundle.envelope import PAYLOAD_TYPE, pre_authentication_encoding
from capsule.bundle.manifest import CHECKSUMS, ENVELOPE, MANIFEST
from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json, sha256_hex
from tests.hostile.case import Case, Presented
from tests.hostile.genuine import (
    EVALUATION,
    FINAL,
    INDEX,
    LOG,
    RESULT,
    SIGNER,
    STRANGER,
    Change,
    Files,
    documents,
    edit_json,
    manifest_of,
    packed,
    relock,
    training,
    write_members,
)
from tests.hostile.presenting import changed, presented

ORDER = 2**252 + 27742317777372353535851937790883648493  # of Ed25519's base point (RFC 8032, 5.1)


def sealed(change: Callable[[Files], object], number: int, name: str, code: str) -> Case:
    """Return a case whose envelope, manifest and checksums are changed after they were made."""

    def present(folder: Path, hostile: bool) -> Presented:
        run = training()
        members = documents(manifest_of(run))
        if hostile:
            change(members)
        members |= run.files
        return presented(folder, lambda path: write_members(path, members))

    return Case(number, name, code, present)


def described(edit: Callable[[dict], object], number: int, name: str, code: str) -> Case:
    """Return a case with another manifest, which is validly signed."""

    def present(folder: Path, hostile: bool) -> Presented:
        run = training()
        manifest = manifest_of(run)
        if hostile:
            edit(manifest)
        members = documents(manifest) | dict(run.files)
        return presented(folder, lambda path: write_members(path, members))

    return Case(number, name, code, present)


# Envelopes


def envelope(edit: Callable[[dict], object]) -> Change:
    def change(members: Files) -> None:
        edit_json(members, ENVELOPE, edit)

    return change


def payload_of(members: Files) -> bytes:
    return base64.b64decode(json.loads(members[ENVELOPE])["dsseEnvelope"]["payload"])


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def stated(edit: Callable[[dict], object], *, sign: bool = True) -> Change:
    """Change the statement, and sign it again or leave the signature as it was."""

    def change(members: Files) -> None:
        statement = json.loads(payload_of(members))
        edit(statement)
        payload = canonical_json(statement)

        def replace(document: dict) -> None:
            document["dsseEnvelope"]["payload"] = text(payload)
            if sign:
                signature = SIGNER.sign(pre_authentication_encoding(payload))
                document["dsseEnvelope"]["signatures"][0]["sig"] = text(signature)

        edit_json(members, ENVELOPE, replace)

    return change


def signature(edit: Callable[[bytes], bytes]) -> Change:
    """Change the bytes of the signature."""

    def change(document: dict) -> None:
        (entry,) = document["dsseEnvelope"]["signatures"]
        entry["sig"] = text(edit(base64.b64decode(entry["sig"])))

    return envelope(change)


def named(fingerprint: str) -> Change:
    """Have the envelope name another key as the one that signed."""

    def change(document: dict) -> None:
        document["verificationMaterial"]["publicKey"]["hint"] = fingerprint
        document["dsseEnvelope"]["signatures"][0]["keyid"] = fingerprint

    return envelope(change)


def signed_by_a_stranger(members: Files) -> None:
    message = pre_authentication_encoding(payload_of(members))
    signature(lambda _: STRANGER.sign(message))(members)


def signed_as_plain_text(members: Files) -> None:
    payload = payload_of(members)
    message = b"DSSEv1 10 text/plain %d %b" % (len(payload), payload)
    signature(lambda _: SIGNER.sign(message))(members)


def plus_the_order(raw: bytes) -> bytes:
    """Return the other signature that fits wherever S is not reduced (RFC 8032, 8.4)."""
    return raw[:32] + (int.from_bytes(raw[32:], "little") + ORDER).to_bytes(32, "little")


def spare_bits(document: dict) -> None:
    """Set the bits of the last base64 digit that say nothing."""
    (entry,) = document["dsseEnvelope"]["signatures"]
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    head, last = entry["sig"][:-3], entry["sig"][-3]
    entry["sig"] = head + digits[digits.index(last) | 1] + "=="


def without_envelope(members: Files) -> None:
    del members[ENVELOPE]


ENVELOPES = [
    (1, "no-envelope", "CAP-B107", without_envelope),
    (
        1,
        "no-signature",
        "CAP-B121",
        envelope(lambda document: document["dsseEnvelope"].update(signatures=[])),
    ),
    (
        1,
        "two-signatures",
        "CAP-B121",
        envelope(
            lambda document: document["dsseEnvelope"].update(
                signatures=document["dsseEnvelope"]["signatures"] * 2
            )
        ),
    ),
    (
        2,
        "payload-type-of-plain-text",
        "CAP-B121",
        envelope(lambda document: document["dsseEnvelope"].update(payloadType="text/plain")),
    ),
    (2, "signature-over-plain-text", "CAP-B122", signed_as_plain_text),
    (
        3,
        "predicate-of-another-kind",
        "CAP-B124",
        stated(lambda statement: statement.update(predicateType="https://slsa.dev/provenance/v1")),
    ),
    (3, "statement-of-another-type", "CAP-B124", stated(lambda s: s.update(_type=PAYLOAD_TYPE))),
    (
        4,
        "payload-changed-after-signing",
        "CAP-B122",
        stated(lambda s: s["predicate"].update(claimId="0" * 64), sign=False),
    ),
    (
        5,
        "key-that-the-bundle-brings",
        "CAP-B121",
        envelope(
            lambda document: document["verificationMaterial"].update(
                publicKeyBytes=STRANGER.public.openssh()
            )
        ),
    ),
    (6, "signed-by-a-stranger-in-the-name-of-a-trusted-key", "CAP-B122", signed_by_a_stranger),
    (
        6,
        "signed-by-a-trusted-key-in-the-name-of-a-stranger",
        "CAP-B123",
        named(STRANGER.public.fingerprint),
    ),
    (9, "signature-plus-the-order-of-the-group", "CAP-B122", signature(plus_the_order)),
    (9, "signature-with-a-tail", "CAP-B122", signature(lambda raw: raw + b"\0")),
    (9, "signature-cut-short", "CAP-B122", signature(lambda raw: raw[:-1])),
    (9, "base64-with-spare-bits", "CAP-B121", envelope(spare_bits)),
    (
        10,
        "keyid-of-another-algorithm",
        "CAP-B121",
        envelope(
            lambda document: document["dsseEnvelope"]["signatures"][0].update(
                keyid="SHA1:" + "A" * 43
            )
        ),
    ),
]


# Documents


def document(data: bytes) -> Change:
    return lambda files: files.update({RESULT: data})


def twice(files: Files) -> None:
    files[RESULT] = files[RESULT].replace(b'{"complete":true', b'{"complete":false,"complete":true')


def spelt(old: bytes, new: bytes) -> Change:
    def change(files: Files) -> None:
        if old not in files[RESULT]:
            raise ValueError(f"{RESULT} does not hold {old!r}")
        files[RESULT] = files[RESULT].replace(old, new)

    return change


STRICTNESS = {
    "duplicate-key": twice,
    "nan": spelt(b'"seconds":1,', b'"seconds":NaN,'),
    "byte-order-mark": spelt(b'{"complete"', b'\xef\xbb\xbf{"complete"'),
    "white-space": spelt(b":true,", b": true,"),
    "integer-beyond-2-to-53": spelt(b'"episodes":1,', b'"episodes":9007199254740993,'),
    "number-of-a-million-digits": spelt(b'"episodes":1,', b'"episodes":1%b,' % (b"0" * 10**6)),
    "float-beyond-all-floats": spelt(b'"seconds":1,', b'"seconds":1e999,'),
    "lone-surrogate": spelt(b'"capsule/result/v1"', rb'"capsule/result/v1\ud800"'),
    "nested-a-hundred-thousand-times": document(b"[" * 100_000 + b"]" * 100_000),
    "three-million-values": document(b"[" + b"[]," * 3_000_000 + b"[]]"),
    "not-utf-8": document(b'{"complete":"\xff"}'),
}


def renamed(files: Files, name: str, **fields: object) -> None:
    edit_json(files, name, lambda content: content.update(fields))


# A run that is not this one, from its own bundle


def other_returns(evaluation: dict) -> None:
    evaluation["points"][-1]["returns"] = [(500.0).hex()]


def recheckpointed(files: Files, edit: Callable[[list], object]) -> None:
    """Change the checkpoints and claim them as they are now; the tensors are the last one's."""
    tensors = files.pop(FINAL)
    edit_json(files, INDEX, lambda index: edit(index["checkpoints"]))
    listed = contract.CheckpointIndex.parse(files[INDEX]).checkpoints
    claimed = [{"step": each.step, "digest": each.digest()} for each in listed]
    edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(checkpoints=claimed))
    files |= {run_bundle.checkpoint_member(each.step): tensors for each in listed[-1:]}


def other_parameters(files: Files) -> None:
    for name in (RESULT, run_bundle.CLAIMS):
        renamed(files, name, parameters="0" * 64)


def other_starts_pinned(lock: dict) -> None:
    made = {"candidates": 1000, "shortlist": 250, "min_actions": 55, "max_actions": 95}
    of = {"run": "a" * 64, "task": "CartPole-v1", "full_action_set": False}
    pinned = {"schema": "capsule/starts/v1", **of, **made, "starts": [[1]]}
    lock["spec"]["evaluation"].update(starts=1, start_set=pinned)


def other_seed(lock: dict) -> None:
    lock["spec"]["seeds"]["root"] = 7


def of_another_run(files: Files) -> None:
    relock(files, other_seed)


def splice(*names: str) -> Callable[[Files], object]:
    """Put documents of one valid bundle in front of the files of another."""

    def change(members: Files) -> None:
        manifest = manifest_of(training())
        manifest["files"] = [file for file in manifest["files"] if file["path"] != LOG]
        other = documents(manifest)
        members |= {name: other[name] for name in names}

    return change


CONTRADICTIONS: dict[str, tuple[int, str, Change]] = {
    "evaluation-of-another-run": (
        18,
        "CAP-V010",
        lambda files: edit_json(files, EVALUATION, other_returns),
    ),
    "starts-other-than-those-pinned": (
        18,
        "CAP-V010",
        lambda files: relock(files, other_starts_pinned),
    ),
    "lock-of-another-run": (
        18,
        "CAP-V010",
        lambda files: edit_json(files, run_bundle.LOCK, other_seed),
    ),
    "trace-of-another-run": (
        18,
        "CAP-V010",
        lambda files: files.update(
            {run_bundle.RUN + contract.TRACE: b'{"step":4,"streams":"0"}\n'}
        ),
    ),
    "checkpoints-of-another-run": (
        18,
        "CAP-V010",
        lambda files: edit_json(
            files, INDEX, lambda index: index["checkpoints"][0]["tensors"].update(bias="0" * 64)
        ),
    ),
    "run-without-a-checkpoint": (
        18,
        "CAP-V010",
        lambda files: recheckpointed(files, list.clear),
    ),
    "checkpoint-twice": (
        18,
        "CAP-V010",
        lambda files: recheckpointed(files, lambda listed: listed.extend(listed)),
    ),
    "checkpoint-at-another-step": (
        18,
        "CAP-V010",
        lambda files: recheckpointed(files, lambda listed: listed[0].update(step=4)),
    ),
    "result-of-another-run": (
        18,
        "CAP-V010",
        lambda files: renamed(files, RESULT, episodes=2),
    ),
    "result-of-an-unfinished-run": (
        18,
        "CAP-V010",
        lambda files: renamed(files, RESULT, complete=False),
    ),
    "parameters-of-another-run": (18, "CAP-V010", other_parameters),
    "flags-of-another-run": (
        18,
        "CAP-V010",
        lambda files: renamed(files, run_bundle.RUN + contract.RUNTIME, flags={"threads": "8"}),
    ),
    "relaxation-that-is-not-claimed": (
        18,
        "CAP-V010",
        lambda files: relock(
            files, lambda lock: lock["spec"]["determinism"].update(hash_seed=None)
        ),
    ),
    "schema-of-claims-downgraded": (
        17,
        "CAP-B144",
        lambda files: renamed(files, run_bundle.CLAIMS, schema="capsule/claims/v0"),
    ),
    "schema-of-claims-unknown": (
        17,
        "CAP-B144",
        lambda files: renamed(files, run_bundle.CLAIMS, schema="capsule/claims/v2"),
    ),
    "unknown-field-in-the-lock": (
        17,
        "CAP-B145",
        lambda files: renamed(files, run_bundle.LOCK, trusted=True),
    ),
    "unknown-field-in-the-observations": (
        17,
        "CAP-B145",
        lambda files: renamed(files, run_bundle.OBSERVATIONS, verdict="reproduced-bitwise"),
    ),
}


def component(**fields: object) -> Change:
    """Give the image's bill of materials a component that its image does not hold."""
    stated_component = {"type": "library", "name": "extra", "bom-ref": "extra", **fields}

    def change(files: Files) -> None:
        def add(sbom: dict) -> None:
            sbom["components"] = [*sbom.get("components", []), stated_component]

        edit_json(files, run_bundle.IMAGE_SBOM, add)

    return change


def dangling(sbom: dict) -> None:
    sbom["dependencies"] = [{"ref": "nothing"}]


SBOMS = {
    "package-that-is-not-in-the-image": ("CAP-V010", component()),
    "package-address-of-nothing": ("CAP-B062", component(purl="pkg:")),
    "dependency-on-nothing": (
        "CAP-B062",
        lambda files: edit_json(files, run_bundle.IMAGE_SBOM, dangling),
    ),
    "one-name-for-two-packages": (
        "CAP-B062",
        lambda files: (component()(files), component(name="other")(files)),
    ),
    "field-that-runs-a-parser": (
        "CAP-B062",
        component(licenses=[{"expression": "(" * 1000, "text": {}}]),
    ),
    "machine-that-is-no-bill-of-materials": (
        "CAP-B062",
        lambda files: files.update({run_bundle.MACHINE_SBOM: b"{}"}),
    ),
}

YAML = {
    "alias-bomb": "a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "duplicate-key": "name: small\nname: other\n",
    "python-object": "name: !!python/object/apply:os.system [id]\n",
}


def asked_for(name: str, extra: str) -> Case:
    """Return a case of a reader's own spec, which is not strict YAML."""

    def present(folder: Path, hostile: bool) -> Presented:
        spec = json.loads(training().files[run_bundle.LOCK])["spec"]
        path = folder / "spec.yaml"
        path.write_text(extra if hostile else json.dumps(spec))
        return presented(folder, lambda target: packed(training(), target), "--expect-spec", path)

    return Case(16, f"yaml-with-{name}", "CAP-S002", present)


def expected(name: str, code: str, by: Literal["claim", "spec", "lock", "lock-file"]) -> Case:
    """Return a case of a valid bundle that is given out for another experiment."""

    def present(folder: Path, hostile: bool) -> Presented:
        run = training()
        claims, lock = run.files[run_bundle.CLAIMS], run.files[run_bundle.LOCK]
        path = folder / f"expected-{by}"
        path.write_bytes(
            lock if by == "lock-file" else json.dumps(json.loads(lock)["spec"]).encode()
        )
        option: tuple[object, ...] = {
            "claim": ("--expect-claim", TrainingClaims.model_validate_json(claims).claim_id()),
            "spec": ("--expect-spec", path),
            "lock": ("--expect-lock", sha256_hex(lock)),
            "lock-file": ("--expect-lock", path),
        }[by]
        change = of_another_run if hostile else None
        return presented(folder, lambda target: packed(run, target, change), *option)

    return Case(19, name, code, present)


def wrong_sum(members: Files) -> None:
    digest = sha256_hex(members[MANIFEST]).encode()
    members[CHECKSUMS] = members[CHECKSUMS].replace(digest, b"0" * 64)


CASES = [
    *(sealed(change, number, name, code) for number, name, code, change in ENVELOPES),
    *(changed(15, name, "CAP-B144", change) for name, change in STRICTNESS.items()),
    *(asked_for(name, extra) for name, extra in YAML.items()),
    *(
        changed(number, name, code, change)
        for name, (number, code, change) in CONTRADICTIONS.items()
    ),
    described(
        lambda manifest: manifest.update(schema="capsule/bundle/v0"),
        17,
        "schema-of-the-manifest-downgraded",
        "CAP-B111",
    ),
    described(
        lambda manifest: manifest.update(note=1), 17, "unknown-field-in-the-manifest", "CAP-B111"
    ),
    sealed(splice(ENVELOPE), 18, "envelope-of-another-bundle", "CAP-B112"),
    sealed(splice(ENVELOPE, MANIFEST), 18, "documents-of-another-bundle", "CAP-B107"),
    sealed(wrong_sum, 18, "checksums-of-another-manifest", "CAP-B108"),
    expected("bundle-of-another-spec", "CAP-V041", "spec"),
    expected("bundle-of-other-claims", "CAP-V042", "claim"),
    expected("bundle-of-another-lock", "CAP-V057", "lock"),
    expected("bundle-of-another-lock-than-a-file", "CAP-V057", "lock-file"),
    *(changed(20, name, code, change) for name, (code, change) in SBOMS.items()),
]
