"""A run under bubblewrap makes the claims of a container, and either verifies the other."""

import pytest

from tests.end_to_end.conftest import run

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.slow]


def test_bubblewrap_and_a_container_make_the_same_claims(workplace, micro, tmp_path):
    made = run(workplace, "--engine", "bwrap", "--output", tmp_path)
    assert made.claim_id == micro.claim_id
    for bundle, engine in ((micro.bundle, "bwrap"), (made.bundle, "docker")):
        done = micro.verify(bundle, "--engine", engine, cwd=workplace)
        assert done.status == 0, done.errors
        assert done.document["verdict"] == "reproduced-bitwise"
