"""``capsule verify --vary`` on real runs: what a result depends on, as read back from inside."""

import json

import pytest

from capsule.experiment.spec import ImageSpec
from tests.end_to_end.conftest import capsule, run
from tests.end_to_end.test_own_script import SPEC, make
from tests.verification.runs import CARTPOLE, merged

pytestmark = [pytest.mark.network, pytest.mark.xdist_group("programs")]

SEEING = """\
import os, time
print("learned with", os.cpu_count(), "processors")
print("finished in", time.tzname[0])
"""
DRAWING = """\
import os, time
print("learned", os.urandom(4).hex(), time.tzname[0])
"""


def made(workplace, name, script, *options):
    """Run a program in an image without packages."""
    spec = make(workplace, name, script)
    (workplace / spec).write_text(SPEC + "image: {packages: []}\n")
    return run(workplace, *options, spec=spec)


def vary(own, names, *options, cwd):
    done = own.verify(own.bundle, "--vary", names, *options, cwd=cwd)
    assert done.output, done.errors
    document = done.document
    assert document["schema"] == "capsule/vary-report/v1"
    rows = {each["name"]: each for each in document["variations"]}
    return done.status, document, {name: row["outcome"] for name, row in rows.items()}, rows


@pytest.mark.engine
def test_a_program_that_looks_around_depends_on_what_it_sees(workplace, tmp_path):
    own = made(workplace, "seeing", SEEING)
    status, document, outcomes, rows = vary(own, "all", cwd=tmp_path)
    assert status == 1, document
    assert outcomes == {
        "threads": "equal",
        "processes": "not-applicable",
        "locale": "equal",
        "timezone": "differs",
        "hostname": "equal",
        "cpu-count": "differs",
    }
    assert document["control"]["verdict"] == "reproduced-bitwise"
    assert (rows["timezone"]["was"], rows["timezone"]["became"]) == (
        "UTC (UTC+0000)",
        "+14 (UTC+1400)",
    )
    assert (rows["hostname"]["was"], rows["hostname"]["became"]) == ("capsule", "varied-host")
    assert "at line 1" in rows["cpu-count"]["reason"]
    # One thing at a time: everything else is as it was.
    usual = document["control"]["surroundings"]
    for name, changed in {"threads": {"threads"}, "timezone": {"timezone"}}.items():
        seen = rows[name]["report"]["surroundings"]
        assert {field for field in usual if usual[field] != seen[field]} == changed
    assert "does not depend on: threads, locale, hostname." in document["conclusion"]


@pytest.mark.engine
@pytest.mark.soak
def test_a_trainer_is_shielded_and_its_threads_change_no_bit(workplace, tmp_path):
    packages = {"image": {"packages": ImageSpec().packages}}
    spec = merged(CARTPOLE, {"environment": {"id": "CartPole-v1", "modules": []}, **packages})
    (workplace / "cartpole.json").write_text(json.dumps(spec))
    trained = run(workplace, spec="cartpole.json")
    status, document, outcomes, rows = vary(
        trained, "threads,timezone,hostname,cpu-count", "--mode", "prefix:240", cwd=tmp_path
    )
    assert status == 0, document
    assert outcomes["timezone"] == "shielded"
    assert (outcomes["threads"], rows["threads"]["became"]) == ("equal", "2")
    assert outcomes["hostname"] == "equal"
    assert document["conclusion"].startswith("The first 240 steps do not depend on: threads, ")


def test_without_a_container_randomness_is_told_from_the_time_zone(workplace, tmp_path):
    own = made(workplace, "drawing", DRAWING, "--engine", "process")
    status, document, outcomes, rows = vary(own, "all", "--engine", "process", cwd=tmp_path)
    assert status == 0, document  # nothing is shown to have an influence
    assert outcomes["hostname"] == outcomes["timezone"] == "not-applicable"
    assert "its place in the tree of processes" in rows["timezone"]["reason"]
    assert outcomes["threads"] == "equal"
    refused = own.verify(own.bundle, "--engine", "process", "--vary", "hostname", cwd=tmp_path)
    assert (refused.status, "CAP-V067" in refused.errors) == (2, True)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--vary", "moon"), "CAP-V066"),
        (("--vary", "all", "--challenge", "2"), "CAP-V065"),
        (("--vary", "all", "--mode", "integrity"), "CAP-V065"),
        (("--vary", "all", "--sign", "mallory"), "CAP-V065"),
    ],
)
def test_options_that_contradict_it_are_refused(workplace, tmp_path, options, code):
    done = capsule("verify", tmp_path / "none", "--allow-untrusted", *options, cwd=workplace)
    assert (done.status, code in done.errors) == (2, True), done.errors
