"""The lock of a study, which commands keep up to date."""

import pytest

from capsule.host.errors import ExitCode
from tests.cli.conftest import capsule
from tests.cli.study.conftest import run, study


@pytest.mark.slow
def test_the_lock_of_the_base_is_kept(place):
    capsule("lock", "cart.yaml")
    written = (place / "cart.lock.json").read_bytes()
    study("lock", "tiny.yaml")
    assert run().exit_code == 0
    assert (place / "cart.lock.json").read_bytes() == written


def test_refresh_resolves_again(place, resolutions):
    capsule("lock", "cart.yaml")
    study("lock", "tiny.yaml")
    assert len(resolutions.made) == 1
    study("lock", "tiny.yaml", "--refresh")
    assert len(resolutions.made) == 2


def test_an_edited_lock_is_not_overwritten(place):
    study("lock", "tiny.yaml")
    path = place / "tiny.study.lock.json"
    path.write_bytes(
        edited := path.read_bytes().replace(b'"deterministic.2"', b'"deterministic.3"')
    )
    done = run()
    assert (done.exit_code, "CAP-Y003" in done.stderr) == (ExitCode.USAGE, True)
    assert path.read_bytes() == edited
