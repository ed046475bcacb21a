"""The agents of examples/multi-turn: two live runs differ, and each of them is reproduced."""

import json
import shutil

import pytest

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import load_public
from capsule.experiment.arrival_log import parse_arrivals
from capsule.experiment.canonical import sha256_hex
from tests.end_to_end.conftest import ROOT, forge, run
from tests.hostile.genuine import edit_json

pytestmark = [pytest.mark.network, pytest.mark.xdist_group("programs")]

SPEC = "multi-turn/capsule.yaml"
FEW = ("--set", "trainer.command=[python, agents.py, --agents, '4', --episodes, '12']")


@pytest.fixture(scope="module")
def example(workplace):
    # Set up again after tests of another group.
    shutil.copytree(ROOT / "examples/multi-turn", workplace / "multi-turn", dirs_exist_ok=True)
    return workplace


@pytest.fixture(scope="module")
def outside(example):
    return run(example, "--engine", "process", *FEW, spec=SPEC)


def members(own):
    with open_bundle(own.bundle, [load_public(own.public)]) as bundle:
        return {name: bundle.content(name) for name in bundle.files}


def order_of(own):
    return members(own)[run_bundle.ARRIVALS]


def test_two_runs_differ_and_each_is_reproduced_from_its_bundle(example, outside, tmp_path):
    # On a busy machine, two runs may have the same order by chance.
    others = (run(example, "--engine", "process", *FEW, spec=SPEC) for _ in range(8))
    other = next(own for own in others if order_of(own) != order_of(outside))
    for own in (outside, other):
        log = parse_arrivals(order_of(own))
        claims = json.loads(members(own)[run_bundle.CLAIMS])
        assert claims["arrivals"] == log.digest()
        assert set(log.waits["server~1"].sources) == {f"agent {number}" for number in range(4)}
        done = own.verify(own.bundle, "--engine", "process", cwd=tmp_path)
        assert (done.status, done.document["verdict"]) == (0, "reproduced-bitwise"), done.output


def test_a_false_order_is_not_reproduced(outside, tmp_path):
    def swap_two_agents(files):
        def change(log):
            sources = log["waits"]["server~1"]["sources"]
            sources[:2] = reversed(sources[:2])

        edit_json(files, run_bundle.ARRIVALS, change)
        digest = sha256_hex(files[run_bundle.ARRIVALS])
        edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(arrivals=digest))

    lie = forge(outside, swap_two_agents, tmp_path / "lie.tar")
    done = outside.verify(lie, "--engine", "process", cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (1, "not-reproduced"), done.output
