"""``capsule study report``: the file that is written."""

import pytest

from capsule.host.errors import ExitCode
from capsule.study.study_bundle import pack_study
from tests.cli.study.conftest import study
from tests.hostile import genuine
from tests.study.studies import make_results


@pytest.fixture
def packed(tmp_path):
    path, _ = pack_study(make_results(), genuine.SIGNER, tmp_path / "rates.tar")
    return path


def test_a_table_is_written_with_its_folder(packed, tmp_path):
    path = tmp_path / "new" / "table.csv"
    assert study("report", packed, "--format", "csv", "-o", path).exit_code == 0
    assert path.read_text() == study("report", packed, "--format", "csv").stdout


@pytest.mark.parametrize("place", ["folder", "rates.tar/table.csv", "/proc/table.csv"])
def test_a_place_that_cannot_be_written_is_named(packed, tmp_path, place):
    (tmp_path / "folder").mkdir()
    done = study("report", packed, "--format", "csv", "-o", tmp_path / place)
    assert done.exit_code == ExitCode.USAGE
    assert f"CAP-P104: cannot write '{tmp_path / place}': " in done.stderr
