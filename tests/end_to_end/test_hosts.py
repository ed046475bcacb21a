"""Any Linux host authors: bare roots of distributions, with the Python that each of them has.

They give the same lock, the same image and the same claims.
"""

import functools
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bare-root.sh"
# Python 3.13 and 3.14; 3.12, on Ubuntu; and 3.11 on a host without apt, dpkg and Debian's keys.
HOSTS = ("trixie", "forky", "noble", "none")

pytestmark = [pytest.mark.soak, pytest.mark.network]


@functools.cache
def author(host):
    """Return what scripts/author.sh says on a host must be the same everywhere."""
    done = subprocess.run(
        ["bash", SCRIPT, "author", host], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("reproduced-bitwise") == 2, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("host", HOSTS)
def test_every_host_gives_what_debian_12_gives(host):
    facts = author("bookworm")
    assert facts.startswith("lock=")
    assert author(host) == facts
