"""capsule study member: what a job of a scheduler calls."""

import pytest

from capsule.bundle.keys import generate
from capsule.host.errors import ExitCode
from capsule.study.directory import OUTCOME, Outcome, StudyDirectory
from tests.cli.study.conftest import plan, run, study
from tests.study.studies import make_lock

DONE = Outcome(bundle="x.capsule.tar", claim_id="a" * 64)


def test_a_member_that_is_done_is_left_as_it_is(tmp_path):
    folder = StudyDirectory.create(tmp_path / "study", make_lock(), resume=False)
    name = folder.missing()[0]
    with folder.held(name) as (member, _):
        (member / DONE.bundle).touch()
        (member / OUTCOME).write_bytes(DONE.document())
    generate(tmp_path / "alice")
    done = study("member", folder.path, name, "--key", tmp_path / "alice")
    assert done.exit_code == 0, done.output
    assert f"claim id  {DONE.claim_id}" in done.output
    assert folder.outcome(name) == DONE


@pytest.mark.slow
def test_member_runs_one_member(place):
    run("--only", "deterministic")
    done = study("member", "studies/tiny", "exploration.2", "--key", "alice")
    assert done.stdout.splitlines()[0] == f"claim id  {'a' * 64}"
    plan(place, exploration_1="refused")
    done = study("member", "studies/tiny", "exploration.1", "--key", "alice")
    assert (done.exit_code, "CAP-E007" in done.stderr) == (ExitCode.TRAINING_FAILED, True)
    plan(place, exploration_1="killed")
    done = study("member", "studies/tiny", "exploration.1", "--key", "alice")
    assert done.exit_code == ExitCode.INTERRUPTED
    done = study("member", "studies/tiny", "exploration.3", "--key", "alice")
    assert (done.exit_code, "CAP-Y008" in done.stderr) == (ExitCode.USAGE, True)
