"""Names of images in registries."""

import pytest

from capsule.host.errors import CapsuleError
from capsule.image.registry.reference import Reference

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ghcr.io/alice/dqn:1.0", ("ghcr.io", "alice/dqn", "1.0", None)),
        ("localhost/x", ("localhost", "x", None, None)),
        ("localhost:5000/a/b-c__d:T", ("localhost:5000", "a/b-c__d", "T", None)),
        (f"r.example:443/x@{DIGEST}", ("r.example:443", "x", None, DIGEST)),
        (f"[::1]:5000/x:t@{DIGEST}", ("[::1]:5000", "x", "t", DIGEST)),
    ],
)
def test_the_parts_of_a_name(text, parts):
    assert tuple(Reference.parse(text)) == parts
    assert str(Reference.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "alice/dqn", "ghcr.io", "ghcr.io/", "ghcr.io/Alice/x", "ghcr.io//x"),
        *("https://ghcr.io/x", "ghcr.io/x:", "ghcr.io/x:a b", "ghcr.io/../x", "ghcr.io/x@sha256:1"),
        *("user@ghcr.io/x", "ghcr.io/x?y", "ghcr.io/x\n", "-a.b/x"),
        *("[::::]/x", "[1:2]:80/x", "ghcr.io:99999/x", "ghcr.io:0/x"),
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(CapsuleError) as caught:
        Reference.parse(text)
    assert caught.value.code == "CAP-I401"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ghcr.io/alice/x", "https://ghcr.io/v2/alice/x"),
        ("docker.io/alice/x", "https://registry-1.docker.io/v2/alice/x"),
        ("localhost:5000/x", "http://localhost:5000/v2/x"),
        ("127.0.0.1:5000/x", "http://127.0.0.1:5000/v2/x"),
        ("[::1]:5000/x", "http://[::1]:5000/v2/x"),
        ("127.0.0.1.example.org/x", "https://127.0.0.1.example.org/v2/x"),
        ("localhost.example.org/x", "https://localhost.example.org/v2/x"),
    ],
)
def test_plain_http_is_for_this_machine_alone(text, address):
    assert Reference.parse(text).address == address
