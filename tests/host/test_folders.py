"""Folders of the user."""

import pytest

from capsule.host.errors import CapsuleError
from capsule.host.folders import user_folder, user_path


def test_without_a_home_directory_a_variable_names_the_folder(no_home, monkeypatch, tmp_path):
    for name in ("CAPSULE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    asked = ("CAPSULE_CACHE", "XDG_CACHE_HOME", ".cache")
    with pytest.raises(CapsuleError, match="HOME is not set") as caught:
        user_folder(*asked)
    assert caught.value.code == "CAP-X006"
    assert caught.value.fix.startswith("Set HOME or CAPSULE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder(*asked) == tmp_path / "capsule"
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path))
    assert user_folder(*asked) == tmp_path


@pytest.mark.parametrize(
    ("text", "said"), [("~no-such-user/x", "home directory"), ("a\0b", "NUL character")]
)
def test_a_path_that_no_file_has_is_rejected(text, said):
    with pytest.raises(ValueError, match=said):
        user_path(text)
