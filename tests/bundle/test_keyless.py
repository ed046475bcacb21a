"""Keyless signatures, on the vectors of sigstore-conformance, without network (case 14)."""

import json
import socket
import sys
from pathlib import Path

import pytest

from capsule.bundle import keyless
from capsule.bundle.bundle import open_bundle
from capsule.bundle.trust import load_policy
from capsule.experiment.errors import CapsuleError, ExitCode

VECTORS = Path(__file__).parent / "vectors" / "sigstore"
MESSAGE = (VECTORS / "a.txt").read_bytes()
GOOD = (VECTORS / "happy-path-v0.3.json").read_bytes()
BEACON = "https://github.com/sigstore-conformance/extremely-dangerous-public-oidc-beacon"
IDENTITY = f"{BEACON}/.github/workflows/extremely-dangerous-oidc-beacon.yml@refs/heads/main"
ISSUER = "https://token.actions.githubusercontent.com"


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Keep the network away, and the caches of whoever runs this."""

    def refuse(*_arguments, **_options):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def refused(data=GOOD, message=MESSAGE, identity=IDENTITY, issuer=ISSUER) -> str:
    with pytest.raises(CapsuleError) as caught:
        keyless.verify(data, message, identity, issuer)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B159", ExitCode.TAMPERED)
    assert caught.value.message.isprintable()
    return caught.value.message


@pytest.mark.slow
def test_the_right_one_is_accepted():
    keyless.verify(GOOD, MESSAGE, IDENTITY, ISSUER)


def test_wrong_identity_issuer_and_payload():
    assert "SANs" in refused(identity=IDENTITY.replace("main", "fork"))
    assert "Issuer" in refused(issuer="https://accounts.google.com")
    refused(message=MESSAGE + b"\n")


@pytest.mark.parametrize(
    "name", sorted(p.stem for p in VECTORS.glob("*.json") if p.stem != "happy-path-v0.3")
)
def test_flawed_bundles_of_the_conformance_suite(name):
    # The DSSE bundle is sound, but its statement is no signature over a file.
    assert name.endswith("_fail") or name == "happy-path-intoto-in-dsse-v3"
    options = {}
    if name == "integrated-time-in-future_fail":
        options = {
            "identity": "untrusted-sa@sigstore-conformance.iam.gserviceaccount.com",
            "issuer": "https://accounts.google.com",
        }
    refused((VECTORS / f"{name}.json").read_bytes(), **options)


def edited(edit) -> bytes:
    document = json.loads(GOOD)
    edit(document["verificationMaterial"]["tlogEntries"])
    return json.dumps(document).encode()


def test_the_proof_of_inclusion_must_be_there():
    keyless.verify(edited(lambda _: None), MESSAGE, IDENTITY, ISSUER)
    assert "inclusionProof" in refused(edited(lambda entries: entries[0].pop("inclusionProof")))
    refused(edited(lambda entries: entries.clear()))
    refused(edited(lambda entries: entries[0].update(integratedTime="1")))


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"\xff", b"[" * 100_000, GOOD[:-9]])
def test_noise_is_refused(data):
    refused(data)


def test_without_the_package_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "sigstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sigstore", None)
    with pytest.raises(CapsuleError) as caught:
        keyless.verify(GOOD, MESSAGE, IDENTITY, ISSUER)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B158", ExitCode.USAGE)
    assert "capsule-rl[sigstore]" in caught.value.fix


def test_a_keyless_signature_is_a_signer_of_its_own(bundle, alice, tmp_path, monkeypatch):
    # The conformance suite signs another file; so only here, that file stands for the manifest.
    with open_bundle(bundle, ()) as opened:
        manifest = opened.manifest.document()
    (tmp_path / "s.json").write_bytes(GOOD)
    (tmp_path / "a.pub").write_text(alice.public.openssh())
    options = {
        "keyless_signatures": [tmp_path / "s.json"],
        "identities": [IDENTITY],
        "issuer": ISSUER,
    }
    with pytest.raises(CapsuleError, match="CAP-B159"):
        open_bundle(bundle, load_policy(**options))
    verify = keyless.verify

    def stand_in(data, message, identity, issuer):
        assert message == manifest
        verify(data, MESSAGE, identity, issuer)

    monkeypatch.setattr(keyless, "verify", stand_in)
    with open_bundle(bundle, load_policy(**options)) as opened:
        assert [signer.rejection_reason is None for signer in opened.signers] == [False, True]
        assert opened.signers[1].identity == f"{IDENTITY} of {ISSUER}"
    options |= {"keys": [tmp_path / "a.pub"], "threshold": 2}
    with open_bundle(bundle, load_policy(**options)) as opened:
        assert opened.authentic
