"""``capsule run`` on real runs: killed, interrupted and resumed, without a container, by hand."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import load_public
from capsule.engine.containers import run_label
from capsule.experiment import contract
from capsule.experiment.canonical import parse_canonical_json, sha256_hex
from tests.conftest import caught
from tests.end_to_end.conftest import capsule, run

pytestmark = [pytest.mark.engine, pytest.mark.network]

SECONDS = 1_000


def docker(*arguments):
    return subprocess.run(["docker", *map(str, arguments)], capture_output=True, text=True)


def containers(directory):
    label = f"capsule.run={run_label(directory / 'work')}"
    return docker("ps", "--quiet", "--filter", f"label={label}").stdout.split()


def start(workplace, output, *arguments, spec="micro.yaml"):
    """Start a run in the background; return the process and its run directory."""
    process = begin(workplace, spec, "--output", output, *arguments)
    return process, wait_for(
        lambda: next(iter(output.glob(f"{spec.removesuffix('.yaml')}-*")), None), process
    )


def begin(workplace, *arguments):
    """Start ``capsule run`` in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "capsule", "run", "--key", "alice", "--quiet", *arguments],
        cwd=workplace,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, process, seconds=SECONDS):
    """Poll until the condition gives something; the process must not end before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise TimeoutError


def traced(directory, records):
    """Whether the run has traced that many records."""
    trace = directory / "work" / contract.TRACE
    return trace.exists() and trace.read_bytes().count(b"\n") >= records


def attempts(directory):
    """Return how many times the training side has begun."""
    events = (directory / "work" / contract.EVENTS).read_text()
    return events.count('"kind":"start"') + events.count('"kind":"resume"')


def resume(workplace, directory, *options):
    words = ("run", "--resume", directory, "--key", "alice", "--json", *options)
    done = capsule(*words, cwd=workplace)
    assert done.status == 0, done.errors
    return done.document["claim_id"]


# 100 trace records, a resume state at step 200 and one at the end: moments around the first state,
# and (the seed is fixed, the machine's speed is not) anywhere else. The next test has one before.
MOMENTS = [50, random.Random(20191103).randrange(1, 100)]  # noqa: S311


@pytest.mark.soak
@pytest.mark.parametrize("records", MOMENTS)
def test_a_container_killed_at_any_moment_is_resumed_to_the_same_bits(
    micro, workplace, tmp_path, records
):
    process, directory = start(workplace, tmp_path)
    wait_for(lambda: traced(directory, records), process)
    for container in containers(directory):
        docker("kill", "--signal", "KILL", container)
    _, errors = process.communicate(timeout=SECONDS)
    if process.returncode != 0:  # not if training was faster than the kill
        assert process.returncode == 6, errors
        assert "CAP-E010" in errors
    assert resume(workplace, directory) == micro.claim_id


def test_a_run_that_was_stopped_in_every_way_is_resumed_to_the_same_bits(
    micro, workplace, tmp_path
):
    """Its container is killed, it is interrupted, and Capsule itself is killed."""

    def stopped_twice(output):
        """Return the folder of a run that was stopped in the first two ways before its end."""
        process, directory = start(workplace, output)
        wait_for(lambda: traced(directory, 10), process)
        for container in containers(directory):
            docker("kill", "--signal", "KILL", container)
        _, errors = process.communicate(timeout=SECONDS)
        if process.returncode == 0:
            return None
        assert process.returncode == 6, errors
        assert "CAP-E010" in errors

        process = begin(workplace, "--resume", directory)
        wait_for(lambda: attempts(directory) == 2 and traced(directory, 10), process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
        if process.returncode == 0:
            return None
        assert process.returncode == 130, errors
        assert "CAP-E012" in errors
        assert containers(directory) == []
        return directory

    directory = caught(stopped_twice, tmp_path)
    process = begin(workplace, "--resume", directory)
    wait_for(lambda: attempts(directory) == 3, process)
    process.kill()
    process.communicate(timeout=SECONDS)  # its container goes on, until the resume removes it
    assert resume(workplace, directory) == micro.claim_id
    assert containers(directory) == []


def test_a_run_is_resumed_with_another_engine_while_its_container_is_still_running(
    micro, workplace, tmp_path
):
    process, directory = start(workplace, tmp_path)
    wait_for(lambda: traced(directory, 10), process)
    process.kill()
    process.communicate(timeout=SECONDS)
    assert resume(workplace, directory, "--engine", "bwrap") == micro.claim_id
    assert containers(directory) == []


def test_the_plain_process_engine_gives_the_same_bits_and_says_what_it_is(
    micro, workplace, tmp_path
):
    outside = run(workplace, "--engine", "process", "--output", tmp_path)
    documents = []
    for bundle in (micro.bundle, outside.bundle):
        with open_bundle(bundle, [load_public(micro.public)]) as opened:
            documents.append(parse_canonical_json(opened.files[run_bundle.CLAIMS].read_bytes()))
    inside, outside_claims = documents
    assert outside_claims.pop("relaxations") == ["engine=process"]
    assert outside_claims.pop("image") is None
    assert inside.pop("relaxations") == []
    assert inside.pop("image") is not None
    assert outside_claims == inside  # the interpreter's patch level, too
    refused = micro.verify(outside.bundle, "--mode", "prefix:240", cwd=tmp_path)
    assert (refused.status, refused.document["error"]["code"]) == (4, "CAP-V009")
    options = ("--mode", "prefix:240", "--engine", "process")
    without_image = micro.verify(micro.bundle, *options, cwd=tmp_path)
    assert (without_image.status, without_image.document["verdict"]) == (4, "inconclusive")
    assert "the first 240 steps are the same" in without_image.document["summary"]
    done = micro.verify(outside.bundle, *options, cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (0, "reproduced-prefix")


def test_a_stranger_repeats_the_run_with_docker_alone(micro, again, tmp_path):
    """What REPRODUCING.md says, typed by hand."""
    assert again.claim_id == micro.claim_id
    unpacked = tmp_path / "bundle"
    unpacked.mkdir()
    subprocess.run(["tar", "-xf", again.bundle, "-C", unpacked], check=True)
    guide = (unpacked / run_bundle.GUIDE).read_text()
    blocks = [
        "\n".join(line[4:] for line in block.splitlines())
        for block in guide.split("\n\n")
        if block.startswith("    ")
    ]
    verify, repeat, compare = blocks[1], blocks[2], blocks[3]
    check = verify.splitlines()[-1]
    assert check == "sha256sum --strict -c SHA256SUMS"
    reference = next(word for word in repeat.split() if word.startswith("localhost/capsule/"))
    docker("image", "rm", "--force", reference)
    for script in (check, repeat, compare):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=unpacked,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    found = docker("image", "inspect", "--format", "{{.Id}}", reference).stdout.strip()
    claims = json.loads((unpacked / run_bundle.CLAIMS).read_text())
    manifest = sha256_hex((unpacked / run_bundle.IMAGE_MANIFEST).read_bytes())
    assert found in {claims["image"]["config"], f"sha256:{manifest}"}
    shutil.rmtree(unpacked)


def test_bad_input_leaves_nothing_behind(workplace, tmp_path):
    wrong = ("--set", "environment.game=pnog")
    done = capsule(
        "run", "micro.yaml", "--key", "alice", "--output", tmp_path, *wrong, cwd=workplace
    )
    assert done.status == 2
    assert "CAP-L110" in done.errors
    assert "Did you mean pong" in done.errors
    assert list(tmp_path.iterdir()) == []
