"""A run under bubblewrap makes the claims of a container, which verifies it.

``test_own_environment.py`` has the reverse.
"""

import pytest

from tests.end_to_end.conftest import run

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.slow]


def test_bubblewrap_and_a_container_make_the_same_claims(workplace, micro, tmp_path):
    made = run(workplace, "--engine", "bwrap", "--output", tmp_path)
    assert made.claim_id == micro.claim_id
    done = micro.verify(made.bundle, "--engine", "docker", cwd=workplace)
    assert done.status == 0, done.errors
    assert done.document["verdict"] == "reproduced-bitwise"
