"""The image of the shipped CUDA spec, built here: its libraries load where there is no GPU."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from capsule.host.cuda import wheel_architectures
from capsule.image.distribution import PREFIX, distribution_of
from capsule.image.lockfile import read_lock
from tests.end_to_end.conftest import ROOT, capsule

pytestmark = [pytest.mark.network, pytest.mark.engine, pytest.mark.soak]

SPEC = "dqn-breakout-cuda.yaml"
LOOK = """\
import ctypes, json, torch
for name in ("libcublas.so.13", "libcudnn.so.9", "libnccl.so.2"):
    ctypes.CDLL(name)
print(json.dumps({
    "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version(),
    "available": torch.cuda.is_available(),
    "architectures": torch._C._cuda_getArchFlags().split(),
}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the image; return its lock and the name that it has in Docker."""
    place = tmp_path_factory.mktemp("cuda")
    shutil.copy(ROOT / "specs" / SPEC, place)
    done = capsule("build", SPEC, "--json", "--quiet", "--engine", "docker", cwd=place)
    assert done.status == 0, done.errors
    return read_lock(next(Path(place).glob("*.lock.json"))), done.document["image"]["reference"]


def test_the_libraries_of_a_cuda_image_load_without_a_gpu(built):
    lock, reference = built
    distribution = distribution_of(lock.spec.image)
    shim = f"LD_PRELOAD={PREFIX}/{distribution.native}/libcapsule-math.so"  # as the launcher has it
    command = ["docker", "run", "--rm", "--network", "none", "--env", shim]
    command += ["--entrypoint", distribution.interpreter, reference, "-c", LOOK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["cuda"].startswith(lock.spec.accelerator.cuda)
    assert found["cudnn"] >= 91_000
    assert not found["available"]
    wheels = [(wheel.name, wheel.version) for wheel in lock.image.wheels]
    assert tuple(found["architectures"]) == wheel_architectures(wheels)
