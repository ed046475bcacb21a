"""RO-Crate metadata, as far as bundles decide it; whole ones are read in tests/report."""

from typing import get_args

from capsule.bundle.crate import _MEANING
from capsule.bundle.manifest import Role


def test_files_of_every_role_are_described():
    assert _MEANING.keys() == set(get_args(Role))
