"""``capsule study report``: the file that is written."""

import pytest

from capsule.host.errors import ExitCode
from capsule.study.directory import StudyDirectory
from capsule.study.study_bundle import pack_study
from tests.cli.study.conftest import study
from tests.hostile import genuine
from tests.study.corpus import results_of
from tests.study.studies import make_results


@pytest.fixture
def packed(tmp_path):
    path, _ = pack_study(make_results(), genuine.SIGNER, tmp_path / "rates.tar")
    return path


def test_a_table_is_written_with_its_folder(packed, tmp_path):
    path = tmp_path / "new" / "table.csv"
    assert study("report", packed, "--format", "csv", "-o", path).exit_code == 0
    assert path.read_text() == study("report", packed, "--format", "csv").stdout


def test_no_file_is_replaced_that_the_command_reads(packed):
    before = packed.read_bytes()
    done = study("report", packed, "-o", packed)
    assert (done.exit_code, done.stderr.partition(":")[0]) == (ExitCode.USAGE, "CAP-X004")
    assert packed.read_bytes() == before


def test_all_members_are_named_where_one_is_not_known(packed, tmp_path):
    done = study("report", packed, "-o", tmp_path / "page.html", "--starts", "a.1")
    names = [member.identity.name for member in make_results().members]
    assert done.stderr.splitlines()[1] == f"fix: Its members are {', '.join(names)}."


@pytest.mark.parametrize("form", ["csv", "latex", "html"])
def test_members_without_results_are_counted_beside_every_form(form, tmp_path):
    lock = results_of("study").lock
    folder = StudyDirectory.create(tmp_path / "study", lock, resume=False)
    done = study("report", folder.path, "--format", form)
    assert (done.exit_code, done.stderr) == (0, "4 of 4 members have no results yet.\n")


@pytest.mark.parametrize(
    "options",
    [
        ["--starts", "a.1"],
        ["--starts", "a.1", "--format", "csv"],
        ["--starts", "a.1", "--format", "latex"],
        ["--beside", "other.tar", "--format", "csv"],
        ["--beside", "other.tar", "--format", "latex"],
    ],
)
def test_an_option_without_an_effect_is_rejected(packed, options):
    done = study("report", packed, *options)
    assert (done.exit_code, done.stderr.partition(":")[0]) == (ExitCode.USAGE, "CAP-X005")


@pytest.mark.parametrize("place", ["folder", "rates.tar/table.csv", "/proc/table.csv"])
def test_a_place_that_cannot_be_written_is_named(packed, tmp_path, place):
    (tmp_path / "folder").mkdir()
    done = study("report", packed, "--format", "csv", "-o", tmp_path / place)
    assert done.exit_code in (ExitCode.USAGE, ExitCode.INCONCLUSIVE)
    assert f": the output '{tmp_path / place}' cannot be written: " in done.stderr


def test_what_is_missing_is_named_as_a_study(tmp_path):
    done = study("report", str(tmp_path / "nothing"))
    assert done.exit_code == ExitCode.USAGE
    assert f"CAP-Y005: {tmp_path / 'nothing'} does not exist" in done.stderr
