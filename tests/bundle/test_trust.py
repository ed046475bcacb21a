import pytest

from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import generate
from capsule.bundle.trust import load_trusted
from capsule.experiment.errors import CapsuleError, ExitCode


def key_file(folder, key, name):
    path = folder / f"{name}.pub"
    path.write_text(key.public.openssh())
    return path


def test_keys_are_read_in_order_and_once(tmp_path, alice, mallory):
    paths = [key_file(tmp_path, key, name) for key, name in ((mallory, "m"), (alice, "a"))]
    again = key_file(tmp_path, alice, "again")
    assert load_trusted([*paths, again]) == (mallory.public, alice.public)
    assert load_trusted([]) == ()


def test_one_bad_key_file_spoils_the_set(tmp_path, alice):
    good = key_file(tmp_path, alice, "a")
    assert load_trusted([good]) == (alice.public,)
    with pytest.raises(CapsuleError) as caught:
        load_trusted([good, tmp_path / "missing.pub"])
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B131", ExitCode.USAGE)


def test_an_unknown_signer_is_intact_but_untrusted(bundle, alice, mallory):
    with pytest.raises(CapsuleError) as caught:
        open_bundle(bundle, [mallory.public])
    error = caught.value
    assert (error.code, error.exit_code) == ("CAP-B125", ExitCode.TAMPERED)
    assert "intact but untrusted" in error.message
    assert alice.public.fingerprint in error.message
    assert "--key" in error.fix


def test_untrusted_is_said_only_of_what_is_intact(bundle, tmp_path, mallory):
    data = bytearray(bundle.read_bytes())
    data[data.index(b"# How")] ^= 1
    spoilt = tmp_path / "spoilt.capsule.tar"
    spoilt.write_bytes(data)
    with pytest.raises(CapsuleError, match="CAP-B108"):
        open_bundle(spoilt, [mallory.public])


def test_integrity_and_authenticity_are_apart(bundle, alice, tmp_path):
    with open_bundle(bundle, []) as opened:
        assert not opened.authentic
        assert opened.signer is None
        assert opened.fingerprint == alice.public.fingerprint
    with open_bundle(bundle, [alice.public]) as opened:
        assert opened.authentic
        assert opened.signer == alice.public


def test_a_generated_key_signs_what_its_public_file_verifies(tmp_path, contents, claim_id):
    from capsule.bundle.bundle import pack
    from capsule.bundle.keys import load_private

    generate(tmp_path / "key")
    path = pack(contents, claim_id, load_private(tmp_path / "key"), tmp_path / "run.capsule.tar")
    with open_bundle(path, load_trusted([tmp_path / "key.pub"])) as opened:
        assert opened.authentic
