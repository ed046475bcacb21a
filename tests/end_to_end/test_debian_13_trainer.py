"""A trainer in an image of Debian 13: its answers are known, and it learns what others learn.

The image contains torch for CUDA, which package indexes have for this Python: a download of 1.3 GB,
and 12 GB on disk.
"""

import pytest

from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import load_public
from capsule.bundle.run_bundle import CLAIMS
from capsule.experiment.canonical import parse_canonical_json
from tests.end_to_end.conftest import MICRO, run

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.soak, pytest.mark.slow]

SPEC = f"{MICRO}image: {{base: debian-13}}\naccelerator: {{kind: cpu, cuda_build: true}}\n"


@pytest.fixture(scope="module")
def made(workplace):
    (workplace / "newer-trainer.yaml").write_text(SPEC)
    return run(workplace, spec="newer-trainer.yaml")


def claims_of(made):
    with open_bundle(made.bundle, [load_public(made.public)]) as bundle:
        return parse_canonical_json(bundle.files[CLAIMS].read_bytes())


def test_only_the_libraries_differ_from_those_of_debian_12(made, micro):
    newer, usual = claims_of(made), claims_of(micro)
    assert newer["flags"]["numerics.self_test"] == "299 answers as expected"
    assert newer["libraries"]["python"].startswith("3.13.")
    assert newer["libraries"]["torch"] == "2.13.0+cu130"
    different = {name for name, claim in usual.items() if newer[name] != claim}
    assert different == {"image", "libraries", "lock"}


def test_it_is_reproduced(made, workplace):
    done = made.verify(made.bundle, cwd=workplace)
    assert done.status == 0, done.errors
    assert done.document["verdict"] == "reproduced-bitwise"
