"""capsule study member: what a job of a scheduler calls."""

from typer.testing import CliRunner

from capsule.bundle.keys import generate
from capsule.cli import main
from capsule.study.directory import OUTCOME, Outcome, StudyDirectory
from tests.study.studies import make_lock

DONE = Outcome(bundle="x.capsule.tar", claim_id="a" * 64)


def test_a_member_that_is_done_is_left_as_it_is(tmp_path):
    study = StudyDirectory.create(tmp_path / "study", make_lock(), resume=False)
    name = study.missing()[0]
    with study.held(name) as (folder, _):
        (folder / DONE.bundle).touch()
        (folder / OUTCOME).write_bytes(DONE.document())
    generate(tmp_path / "alice")
    command = ["study", "member", str(study.path), name, "--key", str(tmp_path / "alice")]
    done = CliRunner().invoke(main.app, command)
    assert done.exit_code == 0, done.output
    assert f"claim id  {DONE.claim_id}" in done.output
    assert study.outcome(name) == DONE
