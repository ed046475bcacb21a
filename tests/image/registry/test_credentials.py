"""Credential helpers, as the configuration file of Docker names them."""

import json

import pytest

from capsule.host.errors import CapsuleError
from capsule.image.registry import credentials
from capsule.image.registry.credentials import Login, find_login


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """Return a function that installs a credential helper for all registries."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text(json.dumps({"credsStore": "tests"}))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def install(script):
        path = tmp_path / "docker-credential-tests"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return install


def test_a_helper_gives_the_login_of_the_registry(helper):
    helper('read registry; echo "{\\"Username\\": \\"$registry\\", \\"Secret\\": \\"$1\\"}"')
    assert find_login("example.org") == Login("example.org", "get")


def test_a_helper_may_have_no_login_of_the_registry(helper):
    helper("echo credentials not found in native keychain; exit 1")
    assert find_login("example.org") is None


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "No such file or directory: 'docker-credential-tests'"),
        ("echo the keychain is locked; exit 1", "the keychain is locked"),
        ("echo the keychain is locked >&2; exit 1", "the keychain is locked"),
        ("exec sleep 600", "timed out"),
        ("echo '{}'", "Username"),
        ("echo x", "Expecting value"),
    ],
)
def test_a_helper_that_fails_is_named(helper, monkeypatch, script, reason):
    monkeypatch.setattr(credentials, "_TIMEOUT_S", 0.5 if script == "exec sleep 600" else 600.0)
    if script is not None:
        helper(script)
    with pytest.raises(CapsuleError, match=reason) as raised:
        find_login("example.org")
    assert raised.value.code == "CAP-I403"
    assert "docker-credential-tests returns no login for example.org" in raised.value.message


def test_without_a_home_directory_the_variable_is_named(no_home, monkeypatch):
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    with pytest.raises(CapsuleError, match="the home directory of uid") as raised:
        find_login("example.org")
    assert raised.value.code == "CAP-X006"
    assert raised.value.fix.startswith("Set HOME or DOCKER_CONFIG")
