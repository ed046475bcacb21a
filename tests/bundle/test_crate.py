"""RO-Crate metadata, as far as a bundle decides it; tests/report/test_standards.py reads whole ones."""

from typing import get_args

from capsule.bundle.crate import _MEANING
from capsule.bundle.manifest import Role


def test_files_of_every_role_are_described():
    assert _MEANING.keys() == set(get_args(Role))
