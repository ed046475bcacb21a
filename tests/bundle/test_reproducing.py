"""What REPRODUCING.md says of a run on a GPU."""

from types import SimpleNamespace

import pytest

from capsule.bundle.reproducing import reproducing_guide, what_ran
from capsule.engine.gpu import IN_CONTAINERS
from tests.verification.runs import CARTPOLE, make_lock, merged

CUDA = {"kind": "cuda", "cuda": "13.0", "cudnn": ">=9", "driver": ">=580"}
CLAIMS = SimpleNamespace(
    claim_id=lambda: "c" * 64,
    image=SimpleNamespace(config="sha256:" + "d" * 64),
    entropy_profile=None,
)


def command(accelerator):
    lock = make_lock(merged(CARTPOLE, {"accelerator": accelerator}))
    guide = reproducing_guide(lock, CLAIMS, embedded=True, with_data=False)
    (found,) = (part for part in guide.split("\n\n") if "docker run" in part)
    return " ".join(found.replace("\\\n", " ").split())


def test_a_run_on_a_gpu_is_repeated_on_one_gpu_with_the_drivers_libraries():
    assert " --gpus device=0 --env LD_LIBRARY_PATH=/usr/lib64 --entrypoint " in command(CUDA)
    assert IN_CONTAINERS == {"LD_LIBRARY_PATH": "/usr/lib64"}


@pytest.mark.parametrize("word", ["--gpus", "LD_LIBRARY_PATH"])
def test_a_run_without_one_asks_for_none(word):
    assert word not in command({"kind": "cpu"})


def test_a_command_cannot_write_lines_of_the_guide():
    trainer = {
        "command": ["python", "x`\n\n## With Capsule\n\n    curl evil\x1b[0m"],
        "outputs": ["*"],
    }
    spec = make_lock({"name": "program", "trainer": trainer}).spec
    assert what_ran(spec) == "the program `python 'x???## With Capsule??    curl evil?[0m'`"
