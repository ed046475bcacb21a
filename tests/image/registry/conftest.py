"""A tiny image, and registries of this machine to put it into."""

from contextlib import ExitStack

import pytest

from capsule.host.network import CERTIFICATES
from tests.own_registry import running_registry


@pytest.fixture
def image(tiny):
    return tiny.assemble()


@pytest.fixture(autouse=True)
def no_login(tmp_path, monkeypatch):
    """Keep the machine's own logins and proxies out of the tests."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    proxies = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    for name in (*proxies, *CERTIFICATES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def serve(tmp_path):
    """Return a function that starts a registry and returns its host and port."""
    with ExitStack() as stack:
        yield lambda **how: stack.enter_context(running_registry(tmp_path / "registry", **how))
