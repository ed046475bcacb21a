"""HTTPS: a registry with a certificate of its own, which this machine trusts or does not."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from capsule.host.errors import CapsuleError
from capsule.host.network import CERTIFICATES
from capsule.image.registry.images import push_image
from capsule.image.registry.reference import Reference


@pytest.fixture
def certificate(tmp_path):
    """Make a certificate of 127.0.0.1 that signs itself; return its file and that of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (tmp_path / "own.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "own.key").write_bytes(secret)
    return tmp_path / "own.crt", tmp_path / "own.key"


@pytest.fixture
def reference(serve, certificate, monkeypatch):
    # A registry elsewhere is asked by HTTPS, and so is this one then.
    monkeypatch.setattr(Reference, "is_loopback", property(lambda _: False))
    return Reference.parse(f"{serve(certificate=certificate)}/tiny:1")


def test_an_unknown_certificate_is_refused(reference, image):
    with pytest.raises(CapsuleError, match="certificate verify failed") as caught:
        push_image(image, reference, lambda _: None)
    assert caught.value.code == "CAP-I402"


@pytest.mark.parametrize("variable", CERTIFICATES)
def test_a_certificate_that_the_environment_names_is_trusted(
    variable, reference, image, certificate, monkeypatch
):
    monkeypatch.setenv(variable, str(certificate[0]))
    assert push_image(image, reference, lambda _: None).digest == image.manifest_digest
