"""A trainer on Debian 13 and on Ubuntu 24.04: its answers are known, and it learns the same.

The images contain torch for CUDA, which package indexes have for these Pythons: each is a download
of 1.3 GB, and 12 GB on disk.
"""

import pytest

from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import load_public
from capsule.bundle.run_bundle import CLAIMS
from capsule.experiment.canonical import parse_canonical_json
from capsule.image.distribution import DEBIAN_13, UBUNTU_24_04
from tests.end_to_end.conftest import MICRO, run

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.soak, pytest.mark.slow]

SPEC = f"{MICRO}image: {{base: BASE}}\naccelerator: {{kind: cpu, cuda_build: true}}\n"


@pytest.fixture(scope="module", params=[DEBIAN_13, UBUNTU_24_04], ids=lambda each: each.name)
def distribution(request):
    return request.param


@pytest.fixture(scope="module")
def made(workplace, distribution):
    spec = f"trainer-{distribution.name}.yaml"
    (workplace / spec).write_text(SPEC.replace("BASE", distribution.name))
    return run(workplace, spec=spec)


def claims_of(made):
    with open_bundle(made.bundle, [load_public(made.public)]) as bundle:
        return parse_canonical_json(bundle.files[CLAIMS].read_bytes())


def test_only_the_libraries_differ_from_those_of_debian_12(made, micro, distribution):
    newer, usual = claims_of(made), claims_of(micro)
    assert newer["flags"]["numerics.self_test"] == "299 answers as expected"
    assert newer["libraries"]["python"].startswith(f"{distribution.python}.")
    assert newer["libraries"]["torch"] == "2.13.0+cu130"
    different = {name for name, claim in usual.items() if newer[name] != claim}
    assert different == {"image", "libraries", "lock"}


def test_it_is_reproduced(made, workplace):
    done = made.verify(made.bundle, cwd=workplace)
    assert done.status == 0, done.errors
    assert done.document["verdict"] == "reproduced-bitwise"
