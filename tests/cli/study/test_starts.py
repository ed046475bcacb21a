"""``capsule study starts``: one run whose ranked start sequences all members share."""

from capsule.host.errors import ExitCode
from tests.cli.study.conftest import plan, study
from tests.study.small_studies import STUDY


def test_starts_needs_a_study_that_has_them(place):
    done = study("starts", "tiny.yaml", "--key", "alice")
    assert (done.exit_code, "CAP-Y002" in done.stderr) == (ExitCode.USAGE, True)
    (place / "tiny.yaml").write_text(STUDY + "starts: {set: {seeds.root: 1000}}\n")
    done = study("lock", "tiny.yaml")
    assert (done.exit_code, "CAP-Y004" in done.stderr) == (ExitCode.USAGE, True)
    plan(place)
    (place / "runs").mkdir()
    (place / "runs" / "plan").write_text("{}")
    done = study("starts", "tiny.yaml", "--key", "alice")
    assert done.exit_code != 0
    assert not (place / "tiny.starts.json").exists()
