"""The identity of an installed Capsule."""

import shutil
from pathlib import Path

import pytest

from capsule.host import code


@pytest.mark.parametrize("name", ["bundle/reproducing.py", "image/seccomp.json"])
def test_what_bundles_are_written_from_is_part_of_it(tmp_path, monkeypatch, name):
    """A bundle of another Capsule would otherwise be rejected, as one that was tampered with."""
    original, copy = code.package_digest(), tmp_path / "capsule"
    package = Path(code.__file__).parents[1]
    for path in (*package.rglob("*.py"), package / "image" / "seccomp.json"):
        (copy / path.relative_to(package)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy / path.relative_to(package))
    monkeypatch.setattr(code, "_PACKAGE", copy)
    assert code.package_digest.__wrapped__() == original
    with (copy / name).open("a") as stream:
        stream.write("\n")
    assert code.package_digest.__wrapped__() != original
