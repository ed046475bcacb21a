"""``capsule study lock``: what it writes and shows."""

import json
from pathlib import Path

from capsule.host.errors import ExitCode
from tests.cli.study.conftest import study
from tests.study.small_studies import BASE


def test_lock_writes_its_lock_and_no_other(place):
    done = study("lock", "tiny.yaml", "--json")
    found = json.loads(done.stdout)
    assert set(found["members"]) == {
        *("deterministic.1", "deterministic.2", "exploration.1", "exploration.2")
    }
    assert done.stderr.startswith("  wrote tiny.study.lock.json\n  group deterministic varies no")
    assert not (place / "cart.lock.json").exists()
    written = (place / "tiny.study.lock.json").read_bytes()
    again = study("lock", "tiny.yaml")
    assert again.stderr == ""
    assert again.stdout == (
        f"lock      sha256:{found['lock']}\n"
        "members   4 in 2 groups\nlocks     3 different\nimages    1\n"
    )
    assert (place / "tiny.study.lock.json").read_bytes() == written


def test_a_wrong_base_is_refused_with_its_line(place):
    (place / "cart.yaml").write_text(BASE.replace("total_steps", "total_step"))
    done = study("lock", "tiny.yaml")
    assert done.exit_code == ExitCode.USAGE, done.stderr
    assert (done.exit_code, "cart.yaml:4:41: trainer.total_step" in done.stderr) == (2, True)
    assert not Path("tiny.study.lock.json").exists()
