"""What a program leaves, from its working folder to the verdict, without a container."""

import pytest

from tests.end_to_end.conftest import capsule, run

pytestmark = pytest.mark.network

SPEC = """\
schema: capsule/spec/v1
name: outputs
code: {path: tree}
trainer: {command: [python, main.py]}
entropy: {clock: system}
limits: {memory_mb: 2048, minutes: 5}
"""
PROCESS = ("--engine", "process")


def make(workplace, name, script):
    """Write a spec and its source tree; return the spec's name."""
    folder = workplace / name
    (folder / "tree").mkdir(parents=True)
    (folder / "tree/main.py").write_text(script)
    (folder / "tree/best").write_text("0\n")
    (folder / "spec.yaml").write_text(SPEC)
    return f"{name}/spec.yaml"


REPLACING = """\
import os, time
open("new", "w").write(str(time.monotonic_ns()))
os.utime("new", (1577836800, 1577836800))
os.replace("new", "best")
open(b"caf\\xe9", "w")
open("starts", "a").write("1")
"""


def test_a_replaced_file_is_claimed_and_a_bad_name_left_out_later(workplace, tmp_path):
    spec = make(workplace, "replacing", REPLACING)
    failed = capsule(
        "run", spec, "--key", "alice", "--output", tmp_path, *PROCESS, "--quiet", cwd=workplace
    )
    assert failed.status == 6
    assert "CAP-T303" in failed.errors
    (directory,) = tmp_path.iterdir()
    resume = ("run", "--resume", directory, "--key", "alice", *PROCESS, "--json", "--quiet")
    refused = capsule(*resume, "--set", "seeds.root=2", cwd=workplace)
    assert (refused.status, refused.document["code"]) == (2, "CAP-S006")
    done = capsule(*resume, "--set", "trainer.outputs=['*', '!caf*']", cwd=workplace)
    assert done.status == 0, done.errors
    assert "trainer.outputs=!caf*" in done.document["relaxations"]
    assert (directory / "work/workspace/starts").read_text() == "1"
    verified = capsule(
        "verify", done.document["bundle"], "--key", workplace / "alice.pub", *PROCESS, "--json",
        cwd=workplace,
    )  # fmt: skip
    assert (verified.status, verified.document["verdict"]) == (1, "not-reproduced")
    assert verified.document["first_difference"]["path"] == "best"


DATED = """\
import json, time, zipfile
with zipfile.ZipFile("model.zip", "w") as archive:
    archive.writestr("data", json.dumps({"start_time": time.time_ns(), "steps": 9}))
    archive.writestr("policy", b"weights")
"""


def test_outputs_that_differ_in_dates_only_have_a_grade_of_their_own(workplace, tmp_path):
    own = run(workplace, *PROCESS, spec=make(workplace, "dated", DATED))
    done = own.verify(own.bundle, *PROCESS, cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (1, "reproduced-content"), done.output
    (file,) = done.document["outputs"]["files"]
    assert (file["path"], file["content"]["equal"]) == ("model.zip", ["policy"])
    assert file["content"]["parts"][0]["where"] == "data: start_time"
    (cause,) = done.document["divergence"]["causes"]
    assert (cause["name"], cause["certainty"]) == ("clock", "shown")
    assert "entropy.clock" in cause["fix"]
    done = own.verify(own.bundle, *PROCESS, "--grade", "content", cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (0, "reproduced-content")


def test_a_program_that_leaves_nothing_claims_nothing_and_nothing_is_reproduced(
    workplace, tmp_path
):
    spec = make(workplace, "silent", "x = 1\n")
    done = capsule("run", spec, "--key", "alice", *PROCESS, "--json", "--quiet", cwd=workplace)
    assert done.status == 0, done.errors
    assert "claims NOTHING" in done.errors
    assert done.document["claimed"].startswith("NOTHING")
    bundle = workplace / done.document["bundle"]
    verify = ("verify", bundle, "--key", workplace / "alice.pub", "--json", "--quiet")
    verified = capsule(*verify, *PROCESS, cwd=tmp_path)
    assert (verified.status, verified.document["verdict"]) == (4, "inconclusive")
    assert verified.document["error"]["code"] == "CAP-V048"
    intact = capsule(*verify, "--mode", "integrity", cwd=tmp_path)
    assert "claims nothing" in intact.document["summary"]
