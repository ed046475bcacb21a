"""A registry of this machine: Debian's docker-registry, on the loopback interface."""

import json
import subprocess
from contextlib import contextmanager

import requests

from tests.conftest import free_port, wait_until

# Of the name "alice" and the password "secret", by bcrypt.
HTPASSWD = "alice:$2b$04$GsvWOKD0y2DSo9eqURByKOeSRa1YrTldHioLQV4CC3l5eMh1KpLcK\n"


@contextmanager
def running_registry(folder, *, password=False, certificate=None):
    """Yield the host and port of a new registry, which keeps its images in ``folder``.

    Args:
        folder: Is made.
        password: Ask alice for her password.
        certificate: Files of a certificate and its key, for HTTPS.
    """
    host = f"127.0.0.1:{free_port()}"
    folder.mkdir()
    (folder / "htpasswd").write_text(HTPASSWD)
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": host},
    }
    if password:
        config["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}
    if certificate is not None:
        config["http"]["tls"] = dict(
            zip(("certificate", "key"), map(str, certificate), strict=True)
        )
    (folder / "config.yml").write_text(json.dumps(config))
    command = ["docker-registry", "serve", folder / "config.yml"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            scheme = "http" if certificate is None else "https"
            wait_until(lambda: process.poll() is not None or answers(f"{scheme}://{host}/v2/"))
            assert process.poll() is None, (folder / "log").read_text()
            yield host
        finally:
            process.terminate()


def answers(address):
    try:
        requests.get(address, timeout=600)
    except requests.exceptions.SSLError:  # it answers, with a certificate of its own
        return True
    except (requests.ConnectionError, requests.Timeout):
        return False
    return True
