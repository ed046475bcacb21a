"""A user's own script, from its source tree to a verdict."""

import json
import signal
import subprocess
import sys

import pytest
import zstandard

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import load_public
from capsule.bundle.sbom import image_sbom
from capsule.experiment import contract
from capsule.experiment.canonical import parse_canonical_json, sha256_hex
from capsule.experiment.lock import Lock
from capsule.experiment.spec import CodeSpec
from capsule.image.cache import Cache
from capsule.image.resolution.project import capture_project
from tests.conftest import caught, one_processor, wait_until
from tests.end_to_end.conftest import capsule, forge, run
from tests.hostile.genuine import edit_json

pytestmark = pytest.mark.network

SPEC = """\
schema: capsule/spec/v1
name: own
seeds: {root: 5}
code: {path: tree}
trainer: {command: [python, train.py, --seed, "{seed}"]}
limits: {memory_mb: 2048, minutes: 5}
"""
SCRIPT = """\
import random, sys, time
from pathlib import Path
from capsule.training import run

random.seed(int(sys.argv[2]))
print("learning from", Path("data.txt").read_text())
with run(total_steps=3) as record:
    for step in range(1, 4):
        record.log(step, value=random.random() * 2)
Path("model.bin").write_bytes(random.randbytes(100))
time.sleep(1)
print("done")
"""
SPAWNING = """\
import json, multiprocessing, pathlib

def flags(_):
    import torch
    compiled = pathlib.Path(torch.__spec__.cached).is_file()
    return torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), compiled

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pathlib.Path("flags.json").write_text(json.dumps(pool.map(flags, [0])))
    print("seen")
"""
METRICS = "outputs/metrics.jsonl"


def make(workplace, name, script):
    """Write a spec and its source tree; return the spec's name."""
    folder = workplace / name
    (folder / "tree").mkdir(parents=True)
    (folder / "tree/train.py").write_text(script)
    (folder / "tree/data.txt").write_text("data")
    (folder / "own.yaml").write_text(SPEC)
    return f"{name}/own.yaml"


@pytest.fixture(scope="session")
def outside(workplace):
    """A finished run without a container."""
    return run(workplace, "--engine", "process", spec=make(workplace, "outside", SCRIPT))


def verify(own, bundle, tmp_path, *arguments):
    return own.verify(bundle, *(arguments or ("--engine", "process")), cwd=tmp_path)


def read(own, name):
    with open_bundle(own.bundle, [load_public(own.public)]) as bundle:
        return bundle.files[name].read_bytes()


@pytest.mark.engine
def test_a_script_runs_in_its_image_and_is_reproduced(workplace, tmp_path):
    own = run(workplace, spec=make(workplace, "inside", SPAWNING))
    claims = parse_canonical_json(read(own, run_bundle.CLAIMS))
    lock = parse_canonical_json(read(own, run_bundle.LOCK))
    assert set(claims["outputs"]) == {"flags.json"}
    assert claims["standard_output"]["sha256"] == sha256_hex(b"seen\n")
    assert claims["image"]["layers"][-1] == f"sha256:{lock['project']['sha256']}"
    assert set(lock["project"]["files"]) == {"train.py", "data.txt"}
    # A worker that was spawned imports torch for itself, from bytecode, and still has the spec's
    # flags.
    assert json.loads(read(own, "workspace/flags.json")) == [[True, 1, True]]
    done = verify(own, own.bundle, tmp_path, "--engine", "auto")
    assert (done.status, done.document["verdict"]) == (0, "reproduced-bitwise"), done.output
    assert done.document["image_rebuilt"]
    refused = verify(own, own.bundle, tmp_path, "--mode", "prefix:4")
    assert refused.status == 2
    assert "CAP-V008" in refused.errors


def test_without_a_container_it_is_reproduced_only_if_asked_for(outside, tmp_path):
    done = verify(outside, outside.bundle, tmp_path, "--engine", "auto")
    assert (done.status, done.document["error"]["code"]) == (4, "CAP-V009")
    done = verify(outside, outside.bundle, tmp_path)
    assert (done.status, done.document["verdict"]) == (0, "reproduced-bitwise"), done.output
    assert done.document["relaxations"] == ["engine=process"]


def test_another_source_differs_in_the_first_line_that_it_changes(outside, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "train.py").write_text(SCRIPT.replace("random() * 2", "random() * (2 + step // 2)"))
    (tree / "data.txt").write_text("data")
    cache = Cache(tmp_path / "cache")
    project = capture_project(CodeSpec(path="tree"), tmp_path, cache)

    def other_source(files):
        archive = cache.trees.path(project.sha256).read_bytes()
        files["image/layer-project.tar.zst"] = zstandard.compress(archive)
        edit_json(
            files,
            run_bundle.LOCK,
            lambda lock: lock.update(project=project.model_dump(mode="json")),
        )
        digest = sha256_hex(files[run_bundle.LOCK])
        edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(lock=digest))
        edit_json(files, run_bundle.JOB, lambda job: job.update(tree=project.files))
        lock = Lock.model_validate_json(files[run_bundle.LOCK])
        files[run_bundle.IMAGE_SBOM] = image_sbom(lock, f"sha256:{digest}")

    lie = forge(outside, other_source, tmp_path / "lie.tar")
    done = verify(outside, lie, tmp_path)
    first = done.document["first_difference"]
    assert (done.status, done.document["verdict"]) == (1, "not-reproduced"), done.output
    assert (first["path"], first["content"]["parts"][0]["where"]) == (METRICS, "line 2: value")
    assert "metrics.jsonl, at line 2" in done.document["summary"]


def test_a_source_that_is_not_the_locked_one_is_tampering_and_named(outside, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "train.py").write_text(SCRIPT)
    (tree / "data.txt").write_text("other")
    cache = Cache(tmp_path / "cache")
    other = capture_project(CodeSpec(path="tree"), tmp_path, cache)

    def swap(files):
        archive = cache.trees.path(other.sha256).read_bytes()
        files["image/layer-project.tar.zst"] = zstandard.compress(archive)

    done = verify(outside, forge(outside, swap, tmp_path / "lie.tar"), tmp_path)
    assert (done.status, done.document["verdict"]) == (3, "tampered")
    assert "data.txt" in done.document["error"]["message"]


def test_another_output_is_tampering_or_with_its_claims_not_reproduced(outside, tmp_path):
    def other_output(files):
        files["workspace/model.bin"] = bytes(100)

    done = verify(outside, forge(outside, other_output, tmp_path / "a.tar"), tmp_path)
    assert (done.status, done.document["error"]["code"]) == (3, "CAP-V010")
    assert "model.bin" in done.document["error"]["message"]

    def and_its_claims(files):
        other_output(files)
        digest = sha256_hex(bytes(100))
        edit_json(
            files, run_bundle.CLAIMS, lambda it: it["outputs"]["model.bin"].update(sha256=digest)
        )
        outputs = run_bundle.RUN + contract.OUTPUTS
        edit_json(files, outputs, lambda it: it["files"]["model.bin"].update(sha256=digest))
        result = run_bundle.RUN + contract.RESULT
        edit_json(files, result, lambda it: it.update(outputs=sha256_hex(files[outputs])))

    done = verify(outside, forge(outside, and_its_claims, tmp_path / "b.tar"), tmp_path)
    first = done.document["first_difference"]
    assert (done.status, done.document["verdict"]) == (1, "not-reproduced")
    assert (first["path"], first["content"]["format"]) == ("model.bin", "bytes")
    assert [item["component"] for item in done.document["differences"]] == [
        "outputs.model.bin.sha256"
    ]


MACHINE = """\
import os, pathlib, tempfile, time, zipfile
for number in range(100): pathlib.Path(f"{number * 7919 % 10007}").touch()
print(time.time_ns(), os.cpu_count(), os.sched_getaffinity(0), os.listdir())
with zipfile.ZipFile("model.zip", "w") as archive: archive.writestr("member", "text")
objects = {object() for _ in range(1000)}
print([id(each) for each in objects], tempfile.mkdtemp(dir="."))
"""


@pytest.mark.parametrize("mode", ["virtual", "recorded"])
def test_a_script_that_asks_the_machine_is_reproduced_on_fewer_processors(
    workplace, tmp_path, mode
):
    """The time, processors, a listing, addresses and names of temporary folders."""
    options = ("--engine", "process", "--set", f"entropy.mode={mode}")
    own = run(workplace, *options, spec=make(workplace, f"machine-{mode}", MACHINE))
    with one_processor():
        done = verify(own, own.bundle, tmp_path)
    assert (done.status, done.document["verdict"]) == (0, "reproduced-bitwise"), done.output


def test_a_script_that_prints_how_long_the_machine_runs_is_not_reproduced(workplace, tmp_path):
    script = "import time\nprint('begin')\nprint(time.monotonic_ns())\n"
    own = run(workplace, "--engine", "process", spec=make(workplace, "clock", script))
    done = verify(own, own.bundle, tmp_path)
    first = done.document["first_difference"]
    assert (done.status, done.document["verdict"]) == (1, "not-reproduced")
    assert (first["path"], first["content"]["parts"][0]["where"]) == ("/dev/stdout", "line 2")


def test_an_interrupted_script_starts_over_to_the_same_claims(outside, workplace, tmp_path):
    def interrupted(output):
        """Interrupt a run when its script has written a file; return its folder."""
        process = subprocess.Popen(
            [sys.executable, "-m", "capsule", "run", "outside/own.lock.json", "--key", "alice",
             "--quiet", "--engine", "process", "--output", output],
            cwd=workplace,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        wait_until(
            lambda: any(output.glob("*/work/workspace/model.bin")) or process.poll() is not None
        )
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
        if process.returncode == 0:
            return None
        assert process.returncode == 130, errors
        assert "the program starts over" in errors
        (directory,) = output.iterdir()
        return directory

    directory = caught(interrupted, tmp_path)
    done = capsule(
        "run", "--resume", directory, "--key", "alice", "--engine", "process", "--json",
        cwd=workplace,
    )  # fmt: skip
    assert done.status == 0, done.errors
    assert done.document["claim_id"] == outside.claim_id
