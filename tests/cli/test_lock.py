"""``capsule lock``: the lock file that it writes, and the settings that it does not write."""

import json

import pytest

from tests.cli.conftest import capsule


@pytest.mark.slow
def test_a_setting_of_one_command_changes_no_lock_file_and_lock_says_so(place):
    done = capsule("lock", "cart.yaml", "--set", "seeds.root=7")
    assert done.stderr == "  cart.lock.json was not written: --set applies to this command alone\n"
    assert not (place / "cart.lock.json").exists()
    done = capsule("lock", "cart.yaml")
    assert done.stderr == "  wrote cart.lock.json\n"
    written = (place / "cart.lock.json").read_bytes()
    done = capsule("lock", "cart.yaml", "--set", "seeds.root=7", "--json")
    assert "was not written" in done.stderr
    assert json.loads(done.stdout)["schema"] == "capsule/locked/v1"
    assert capsule("lock", "cart.yaml", "--set", "seeds.root=7", "--quiet").stderr == ""
    assert (place / "cart.lock.json").read_bytes() == written
