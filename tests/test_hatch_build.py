"""The hook that adds the native parts to a wheel."""

import platform
import sys
from pathlib import Path

import pytest

import hatch_build


@pytest.fixture
def built(monkeypatch):
    """Return the data of a wheel that is built on a platform; nothing is compiled."""
    monkeypatch.setattr(hatch_build, "build_all", lambda _: None)
    monkeypatch.delenv("CAPSULE_WHEEL", raising=False)

    def build(system, machine):
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(platform, "machine", lambda: machine)
        data = {"pure_python": True, "artifacts": []}
        root = str(Path(hatch_build.__file__).parent)
        hook = hatch_build.NativeParts(root, {}, None, None, root, "wheel")
        hook.initialize("standard", data)
        return data

    return build


def test_a_wheel_has_native_parts_on_linux_with_x86_64(built, monkeypatch):
    assert built("linux", "x86_64")["tag"] == hatch_build.WHEEL_TAG
    monkeypatch.setenv("CAPSULE_WHEEL", "pure")
    assert "tag" not in built("linux", "x86_64")


@pytest.mark.parametrize(
    "place", [("darwin", "arm64"), ("darwin", "x86_64"), ("linux", "aarch64"), ("win32", "AMD64")]
)
def test_a_wheel_that_is_built_elsewhere_can_be_installed_there(built, place):
    assert built(*place) == {"pure_python": True, "artifacts": []}
