"""Whose signatures count: keys, trust files, revocation, thresholds, signatures beside a bundle."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from capsule.bundle import sshsig
from capsule.bundle.bundle import open_bundle, pack
from capsule.bundle.cosign import cosign
from capsule.bundle.keys import PrivateKey, generate, load_private
from capsule.bundle.sshsig import NAMESPACE
from capsule.bundle.trust import Detached, TrustPolicy, load_policy, load_trusted
from capsule.experiment.errors import CapsuleError, ExitCode
from tests.bundle.conftest import private_key


@pytest.fixture(scope="session")
def carol() -> PrivateKey:
    return PrivateKey(ec.derive_private_key(3, ec.SECP256R1()))


def key_file(folder, key, name):
    path = folder / f"{name}.pub"
    path.write_text(key.public.openssh())
    return path


def text_file(folder, text, name="file"):
    path = folder / name
    path.write_text(text)
    return path


def allowing(folder, *lines):
    """Return a trust file of (principals and options, key)."""
    return text_file(folder, "".join(f"{a} {key.public.openssh()}" for a, key in lines), "allowed")


def untrusted(path, policy, code):
    with pytest.raises(CapsuleError) as caught:
        open_bundle(path, policy)
    assert (caught.value.code, caught.value.exit_code) == (code, ExitCode.TAMPERED)
    return caught.value


def misused(code="CAP-B151", **options):
    with pytest.raises(CapsuleError) as caught:
        load_policy(**options)
    assert (caught.value.code, caught.value.exit_code) == (code, ExitCode.USAGE)
    return caught.value


def signers(path, policy):
    """Return who signed: kind, identity and rejection_reason of each."""
    with open_bundle(path, policy) as opened:
        assert opened.authentic
        return [
            (signer.kind, signer.identity, signer.rejection_reason) for signer in opened.signers
        ]


@pytest.fixture(scope="session")
def doubly(tmp_path_factory, contents, claim_id, alice, carol):
    """A bundle with an envelope by alice and an SSH signature by carol."""
    path = tmp_path_factory.mktemp("doubly") / "run.capsule.tar"
    return pack(contents, claim_id, alice, path, lambda manifest: sshsig.sign(manifest, carol))


@pytest.fixture
def cosigned(bundle, tmp_path):
    """Give the path of a signature by a key over the small bundle."""

    def by(key, name="s"):
        with open_bundle(bundle, ()) as opened:
            manifest = opened.manifest.document()
        path = tmp_path / f"{name}.sshsig"
        path.write_bytes(sshsig.sign(manifest, key))
        return path

    return by


# Keys that a reader names


def test_keys_are_read_in_order_and_once(tmp_path, alice, mallory):
    paths = [key_file(tmp_path, key, name) for key, name in ((mallory, "m"), (alice, "a"))]
    again = key_file(tmp_path, alice, "again")
    assert load_trusted([*paths, again]) == (mallory.public, alice.public)
    assert load_trusted([]) == ()


def test_one_bad_key_file_spoils_the_set(tmp_path, alice):
    good = key_file(tmp_path, alice, "a")
    assert load_trusted([good]) == (alice.public,)
    misused("CAP-B131", keys=[good, tmp_path / "missing.pub"])


def test_an_unknown_signer_is_intact_but_untrusted(bundle, alice, mallory):
    error = untrusted(bundle, [mallory.public], "CAP-B125")
    assert "intact but untrusted" in error.message
    assert [signer.key for signer in error.signers] == [alice.public.fingerprint]
    assert alice.public.fingerprint in error.message
    assert "--key" in error.fix


def test_untrusted_is_said_only_of_what_is_intact(bundle, tmp_path, mallory):
    data = bytearray(bundle.read_bytes())
    data[data.index(b"# How")] ^= 1
    spoilt = tmp_path / "spoilt.capsule.tar"
    spoilt.write_bytes(data)
    with pytest.raises(CapsuleError, match="CAP-B108"):
        open_bundle(spoilt, [mallory.public])


def test_integrity_and_authenticity_are_apart(bundle, alice):
    with open_bundle(bundle, []) as opened:
        assert not opened.authentic
        assert opened.fingerprint == alice.public.fingerprint
        assert opened.signers[0].rejection_reason == "is not a trusted key"
    assert signers(bundle, [alice.public]) == [("dsse", None, None)]


@pytest.mark.parametrize("algorithm", ["ed25519", "ecdsa-p256"])
def test_a_generated_key_signs_what_its_public_file_verifies(
    algorithm, tmp_path, contents, claim_id
):
    generate(tmp_path / "key", algorithm=algorithm)
    path = pack(contents, claim_id, load_private(tmp_path / "key"), tmp_path / "run.capsule.tar")
    assert signers(path, load_trusted([tmp_path / "key.pub"])) == [("dsse", None, None)]


# Trust files (case 7)


def test_a_trust_file_says_who_signed(bundle, tmp_path, alice, carol):
    file = allowing(tmp_path, ("carol@lab", carol), ("alice@*,!*@evil", alice))
    policy = load_policy(allowed_signers=[file])
    assert signers(bundle, policy) == [("dsse", "alice@*,!*@evil", None)]
    policy = load_policy(allowed_signers=[file], identities=["alice@lab"])
    assert signers(bundle, policy) == [("dsse", "alice@lab", None)]


NOW = datetime.now(UTC)
YESTERDAY, TOMORROW = ((NOW + timedelta(days=days)).strftime("%Y%m%d%H%M%SZ") for days in (-1, 1))
LINES = {
    "expired": (f'alice@lab valid-before="{YESTERDAY}"', "expired at"),
    "not yet valid": (f'alice@lab valid-after="{TOMORROW}"', "is not valid before"),
    "other namespace": ('alice@lab namespaces="git"', "is not allowed to sign for"),
    "other principal": ("bob@lab", "is listed for 'bob@lab', not for 'alice@lab'"),
    "negated principal": ("*@lab,!alice@lab", "not for 'alice@lab'"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_does_not_allow_it_is_named(name, bundle, tmp_path, alice):
    line, reason = LINES[name]
    options = {"identities": ["alice@lab"]}
    good = f'alice@lab namespaces="{NAMESPACE}",valid-after="{YESTERDAY}",valid-before="{TOMORROW}"'
    policy = load_policy(allowed_signers=[allowing(tmp_path, (good, alice))], **options)
    assert signers(bundle, policy) == [("dsse", "alice@lab", None)]
    policy = load_policy(allowed_signers=[allowing(tmp_path, (line, alice))], **options)
    error = untrusted(bundle, policy, "CAP-B154")
    assert f"{alice.public.fingerprint} (" in error.message
    assert reason in error.message
    # One line that allows it is enough.
    both = allowing(tmp_path, (line, alice), (good, alice))
    assert signers(bundle, load_policy(allowed_signers=[both], **options))


def test_a_key_expires_whatever_the_bundle_says_of_its_time(bundle, tmp_path, alice):
    file = allowing(tmp_path, (f'alice@lab valid-before="{TOMORROW}"', alice))
    policy = load_policy(allowed_signers=[file])
    assert signers(bundle, policy)
    untrusted(bundle, replace(policy, now=NOW + timedelta(days=2)), "CAP-B154")


def test_a_malformed_trust_file_is_a_usage_error_with_its_line(tmp_path, alice):
    file = allowing(tmp_path, ("alice@lab", alice), ("*@lab cert-authority", alice))
    assert "line 2: cert-authority is not supported" in misused(allowed_signers=[file]).message
    for data in (b"\xff", b"", b"# nobody\nbob@lab ssh-rsa AAAA\n"):
        file.write_bytes(data)
        misused(allowed_signers=[file])
    misused("CAP-B150", allowed_signers=[tmp_path / "missing"])
    misused("CAP-B150", allowed_signers=[tmp_path])
    file.write_bytes(b"#" * ((1 << 20) + 1))
    misused("CAP-B150", allowed_signers=[file])


# Revocation


@pytest.mark.parametrize(
    "entry", [lambda key: key.public.fingerprint, lambda key: key.public.openssh()]
)
def test_a_revoked_key_counts_no_more(entry, bundle, tmp_path, alice, mallory):
    keys = [key_file(tmp_path, alice, "a")]
    other = text_file(tmp_path, f"# gone\n\n{entry(mallory)}", "other")
    assert signers(bundle, load_policy(keys=keys, revoked=[other]))
    mine = text_file(tmp_path, f"{entry(mallory).strip()}\n{entry(alice)}", "mine")
    error = untrusted(bundle, load_policy(keys=keys, revoked=[mine]), "CAP-B154")
    assert f"{alice.public.fingerprint} is revoked" in error.message


def test_a_key_that_is_only_revoked_is_named_so(bundle, alice, mallory):
    policy = TrustPolicy(keys=(mallory.public,), revoked=frozenset({alice.public.fingerprint}))
    untrusted(bundle, policy, "CAP-B154")


def test_a_revoked_signer_beside_an_unknown_one_is_named(doubly, carol, mallory):
    policy = TrustPolicy(keys=(mallory.public,), revoked=frozenset({carol.public.fingerprint}))
    assert "is revoked" in untrusted(doubly, policy, "CAP-B154").message


@pytest.mark.parametrize("data", [b"nonsense\n", b"SSHKRL\n\0" + bytes(40), b"\xff", b"SHA256:x\n"])
def test_a_malformed_revocation_list_is_refused(data, tmp_path, alice):
    path = tmp_path / "revoked"
    path.write_bytes(data)
    error = misused(keys=[key_file(tmp_path, alice, "a")], revoked=[path])
    assert "KRL" in error.fix


# SSH signatures in a bundle (cases 12 and 13)


def test_either_signature_makes_a_bundle_authentic(doubly, alice, carol, mallory):
    unknown = "is not a trusted key"
    by_alice = [("dsse", None, None), ("sshsig", None, unknown)]
    assert signers(doubly, [alice.public]) == by_alice
    assert signers(doubly, [carol.public]) == [("dsse", None, unknown), ("sshsig", None, None)]
    untrusted(doubly, [mallory.public], "CAP-B125")


def test_an_envelope_that_names_another_key_does_not_change_the_signer(
    doubly, tmp_path, alice, carol, mallory
):
    honest, named = (key.public.fingerprint.encode() for key in (alice, mallory))
    (forged := tmp_path / "forged.capsule.tar").write_bytes(
        doubly.read_bytes().replace(honest, named)
    )
    with open_bundle(forged, [carol.public]) as opened:
        assert opened.fingerprint == mallory.public.fingerprint
        assert opened.signer.key == carol.public.fingerprint
    with open_bundle(forged, ()) as opened:
        assert not opened.authentic
        assert opened.signer.key == mallory.public.fingerprint


def test_the_signed_manifest_declares_the_signatures(doubly, bundle):
    for path, kinds in ((doubly, ("dsse", "sshsig")), (bundle, ("dsse",))):
        with open_bundle(path, ()) as opened:
            assert opened.manifest.signatures == kinds


@pytest.mark.slow
def test_every_byte_of_both_signatures_counts(contents, claim_id, alice, carol, tmp_path):
    path = tmp_path / "b"
    pack(contents, claim_id, carol, path, lambda manifest: sshsig.sign(manifest, alice))
    good = path.read_bytes()
    start, end = (
        good.index(name) for name in (b"signatures/manifest.json.sshsig", b"SHA256SUMS\0")
    )
    envelope = range(0, good.index(b"manifest.json\0"), 11)
    accepted = []
    for position in (*envelope, *range(start + 512, end, 3)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        try:
            open_bundle(path, [alice.public, carol.public]).close()
        except CapsuleError as error:
            assert error.exit_code == ExitCode.TAMPERED
        else:
            accepted.append(position)
    assert accepted == []


def test_an_ssh_signature_of_something_else_is_tampering(
    contents, claim_id, alice, carol, tmp_path
):
    for message, namespace, code in (
        (b"other", NAMESPACE, "CAP-B153"),
        (None, "git", "CAP-B152"),
    ):
        path = pack(
            contents,
            claim_id,
            alice,
            tmp_path / "b",
            lambda m, message=message, ns=namespace: sshsig.sign(message or m, carol, ns),
        )
        for trusted in ((), (alice.public,), (carol.public,)):
            with pytest.raises(CapsuleError, match=code) as caught:
                open_bundle(path, trusted)
            assert caught.value.exit_code == ExitCode.TAMPERED


# Signatures beside a bundle, and thresholds (case 11)


def test_a_signature_beside_the_bundle_counts(bundle, cosigned, tmp_path, alice, carol):
    keys = [key_file(tmp_path, carol, "c")]
    untrusted(bundle, load_policy(keys=keys), "CAP-B125")
    found = signers(bundle, load_policy(keys=keys, signatures=[cosigned(carol)]))
    assert found == [
        ("dsse", None, "is not a trusted key"),
        ("detached", None, None),
    ]


def test_a_threshold_counts_keys_not_signatures(doubly, tmp_path, alice, carol, mallory):
    with open_bundle(doubly, ()) as opened:
        manifest = opened.manifest.document()

    def policy(threshold, *extra):
        detached = tuple(
            Detached(str(n), sshsig.sign(manifest, key)) for n, key in enumerate(extra)
        )
        keys = (alice.public, carol.public, mallory.public)
        return TrustPolicy(keys=keys, threshold=threshold, detached=detached)

    assert len(signers(doubly, policy(2))) == 2
    error = untrusted(doubly, policy(3), "CAP-B155")
    assert "2 of the required 3 trusted keys" in error.message
    # Neither a second signature by alice nor one by a stranger is a third key.
    untrusted(doubly, policy(3, alice), "CAP-B155")
    untrusted(doubly, policy(3, private_key(9)), "CAP-B155")
    assert len(signers(doubly, policy(3, mallory))) == 3


def test_one_key_under_two_names_counts_once(bundle, cosigned, tmp_path, alice, carol):
    names = (("alice@lab", alice), ("alice-at-home", alice), ("carol@lab", carol))
    file = allowing(tmp_path, *names)
    files = [cosigned(alice, "again")]
    options = {"allowed_signers": [file], "threshold": 2}
    untrusted(bundle, load_policy(**options, signatures=files), "CAP-B155")
    found = signers(bundle, load_policy(**options, signatures=[*files, cosigned(carol)]))
    assert [identity for _, identity, _ in found] == ["alice@lab", "alice@lab", "carol@lab"]


def test_a_revoked_or_expired_cosigner_does_not_count(bundle, cosigned, tmp_path, alice, carol):
    options = {"signatures": [cosigned(carol)], "threshold": 2}
    good = allowing(tmp_path, ("alice@lab", alice), ("carol@lab", carol))
    assert signers(bundle, load_policy(allowed_signers=[good], **options))
    revoked = text_file(tmp_path, carol.public.fingerprint, "revoked")
    policy = load_policy(allowed_signers=[good], revoked=[revoked], **options)
    assert "is revoked" in untrusted(bundle, policy, "CAP-B155").message
    bad = allowing(tmp_path, ("a", alice), (f'c valid-before="{YESTERDAY}"', carol))
    policy = load_policy(allowed_signers=[bad], **options)
    assert "expired" in untrusted(bundle, policy, "CAP-B155").message


def test_a_signature_over_another_bundle_is_refused(bundle, doubly, cosigned, tmp_path, alice):
    keys = [key_file(tmp_path, alice, "a")]
    other = load_policy(keys=keys, signatures=[cosigned(alice)])
    assert signers(bundle, other)
    untrusted(doubly, other, "CAP-B157")
    noise = text_file(tmp_path, "noise")
    untrusted(bundle, load_policy(keys=keys, signatures=[noise]), "CAP-B157")


def by(path):
    return partial(sshsig.sign, key=load_private(path))


def by_ssh_keygen(path):
    return partial(sshsig.sign_by_ssh_keygen, key=path)


def test_cosigning(doubly, bundle, tmp_path, alice):
    generate(tmp_path / "dan", algorithm="ecdsa-p256")
    before = bundle.read_bytes()
    made = [
        cosign(bundle, by(tmp_path / "dan"), tmp_path / "1.sshsig"),
        cosign(bundle, by_ssh_keygen(tmp_path / "dan"), tmp_path / "2.sshsig"),
    ]
    keys = [key_file(tmp_path, alice, "a"), tmp_path / "dan.pub"]
    assert {signed.fingerprint for signed in made} == {load_trusted(keys)[1].fingerprint}
    for number in (1, 2):
        files = [tmp_path / f"{number}.sshsig"]
        assert len(signers(bundle, load_policy(keys=keys, signatures=files, threshold=2))) == 2
    assert bundle.read_bytes() == before
    with pytest.raises(CapsuleError, match="CAP-B143") as caught:
        cosign(bundle, by(tmp_path / "dan"), tmp_path / "1.sshsig")
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_bundle_that_is_not_intact_is_not_cosigned(bundle, tmp_path):
    generate(tmp_path / "dan")
    spoilt = tmp_path / "spoilt"
    spoilt.write_bytes(bundle.read_bytes()[:-1])
    with pytest.raises(CapsuleError, match="CAP-B104"):
        cosign(spoilt, by(tmp_path / "dan"), tmp_path / "s")
    assert not (tmp_path / "s").exists()


# Options that do not fit together


def test_options_that_do_not_fit_are_refused(tmp_path, alice, cosigned):
    keys = [key_file(tmp_path, alice, "a")]
    misused(keys=keys, identities=["alice"])
    misused(keys=keys, issuer="https://issuer")
    misused(threshold=2)
    misused(revoked=[text_file(tmp_path, alice.public.fingerprint)])
    misused(signatures=[cosigned(alice)])
    misused(keyless_signatures=[text_file(tmp_path, "{}")])
    misused(keyless_signatures=[text_file(tmp_path, "{}")], identities=["a", "b"], issuer="i")
    assert load_policy(keys=keys, threshold=2).threshold == 2
    assert load_policy().trusts_nobody
