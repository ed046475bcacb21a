"""``capsule export`` as a command."""

import pytest
from typer.testing import CliRunner

from capsule.cli.main import app
from tests.export.conftest import TRAINING


def export(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.mark.parametrize("form", ["csv", "tensorboard", "mlflow"])
def test_it_writes_and_says_where(form, tmp_path):
    done = export(TRAINING, "--to", form, "-o", tmp_path / "out")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.strip() == f"wrote 1 run to {tmp_path / 'out'}"
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["csv", "tensorboard", "mlflow"])
def test_a_place_that_cannot_be_written_is_an_error(form, tmp_path):
    (tmp_path / "file").write_text("")
    done = export(TRAINING, "--to", form, "-o", tmp_path / "file" / "out")
    assert done.exit_code == 2
    assert done.stderr.startswith("CAP-P203")


def test_the_exported_bundle_is_not_replaced(tmp_path):
    bundle = tmp_path / "run.capsule.tar"
    bundle.write_bytes(TRAINING.read_bytes())
    done = export(bundle, "--to", "csv", "-o", bundle)
    assert (done.exit_code, done.stderr[:8]) == (2, "CAP-X004")
    assert bundle.read_bytes() == TRAINING.read_bytes()


def test_a_bundle_by_another_key_is_not_exported(tmp_path):
    key = TRAINING.parent / "verifier.pub"
    done = export(TRAINING, "--to", "csv", "-o", tmp_path / "out", "--key", key)
    assert (done.exit_code, (tmp_path / "out").exists()) == (3, False)


def test_a_deposit_takes_what_metrics_do_not(tmp_path):
    options = ("--creator", "Doe, Jane", "--licence", "MIT", "--related", "cites=10.1/x")
    done = export(TRAINING, "--to", "zenodo", "-o", tmp_path / "deposit", *options)
    assert (done.exit_code, done.stderr) == (0, f"wrote the deposit to {tmp_path / 'deposit'}\n")
    done = export(TRAINING, "--to", "csv", "-o", tmp_path / "metrics.csv", *options)
    assert (done.exit_code, done.stderr[:8]) == (2, "CAP-P207")


def test_runs_without_metrics_are_counted(tmp_path):
    program = TRAINING.parent / "program.capsule.tar"
    done = export(program, "--to", "csv", "-o", tmp_path / "metrics.csv")
    assert done.exit_code == 0
    written = f"wrote 1 run, 1 of them without metrics, to {tmp_path / 'metrics.csv'}\n"
    assert done.stderr == written
