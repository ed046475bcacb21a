"""Both wheels, built by pip and installed in environments that have nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "corpus"

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.network]


def run(*command, cwd, status=0, **variables):
    # Neither this checkout nor the environment of the tests may be found.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment | {"CAPSULE_CONFIG": str(cwd / "configuration")} | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The files that git knows, as they are now."""
    folder = tmp_path_factory.mktemp("checkout")
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    copied = ["tar", "-c", "--null", "-T", "-"]
    archive = subprocess.run(copied, cwd=ROOT, input=names, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


@pytest.mark.parametrize(
    ("kind", "tag"),
    [("", "manylinux_2_28_x86_64"), ("pure", "py3-none-any")],
    ids=["linux", "pure"],
)
def test_a_wheel_shows_verifies_and_locks_in_an_environment_of_its_own(
    kind, tag, checkout, tmp_path
):
    pip = ("-m", "pip")
    run(sys.executable, "-m", "venv", tmp_path / "built", cwd=tmp_path)
    python = tmp_path / "built" / "bin" / "python"
    build = (*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path / "dist", checkout)
    run(python, *build, cwd=tmp_path, CAPSULE_WHEEL=kind)
    (wheel,) = (tmp_path / "dist").iterdir()
    assert tag in wheel.name
    run(python, *pip, "install", wheel, cwd=tmp_path)
    capsule = tmp_path / "built" / "bin" / "capsule"
    bundle, key = CORPUS / "dqn.capsule.tar", CORPUS / "author.pub"
    assert "dqn" in run(capsule, "show", bundle, cwd=tmp_path)
    checked = run(capsule, "verify", bundle, "--key", key, "--mode", "integrity", cwd=tmp_path)
    assert "intact" in checked
    run(capsule, "init", cwd=tmp_path)
    if kind == "pure":  # a lock names the native parts, which this wheel lacks
        assert "CAP-N001" in run(capsule, "lock", "capsule.yaml", cwd=tmp_path, status=70)
        return
    assert "lock" in run(capsule, "lock", "capsule.yaml", cwd=tmp_path)
    assert (tmp_path / "capsule.lock.json").stat().st_size > 10_000
