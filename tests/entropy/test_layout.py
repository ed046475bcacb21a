"""Where things lie in memory: the same in a recorded run, its replay and a derived run.

Address randomisation is off under the launcher, so whatever a program allocates is where it was in
the last run, unless something of Capsule's own lies in between. The interpreter runs isolated and
without site packages: both are folders that other tests write to, and what Python allocates to list
them would differ between one run and the next.
"""

import sys

import pytest

from capsule.entropy.launch import REPLAYED
from capsule.entropy.profile import merge
from capsule.native import native_part

DRAW = "import os\nos.urandom(8), os.urandom(100)\n"
MAPS = DRAW + "for line in open('/proc/self/maps'): print(line.split()[0], line.split()[-1])\n"
# The order of objects by their addresses, and of a set of them. A program that had read its maps
# would have other pieces of memory free, since a replay has the profile's line among them.
ORDER = (
    DRAW + "Node = type('Node', (), {})\n"
    "nodes = {Node() for _ in range(5000)}\n"
    "for number, node in enumerate(nodes): node.number = number\n"
    "order = tuple(node.number for node in sorted(nodes, key=id))\n"
    "print(hash(order), id(nodes), os.environ.__sizeof__())\n"
)


@pytest.fixture
def launch(interposed):
    """Return a function that runs Python under the launcher, in a folder of a given name."""

    def run(name, mode, code, profile=None):
        folder = interposed.folder / name
        folder.mkdir()
        if profile is not None:
            (folder / REPLAYED).write_bytes(profile)
        library = native_part("libcapsule-entropy.so")
        words = [native_part("capsule-launch"), "--entropy", mode, "--key", "00" * 32]
        words += ["--directory", folder, "--preload", library, "--sort-listings", "--cores", "4"]
        words += ["--clock", "virtual", "--", sys.executable, "-ISc", code]
        return interposed(*words, mode=None)

    return run


def lines_of_program(finished, folder):
    """What is mapped, without what Capsule maps far away."""
    return [line for line in finished.lines if f"/{folder}/" not in line]


@pytest.mark.parametrize(("code", "lines"), [(MAPS, 20), (ORDER, 1)], ids=["maps", "order"])
def test_addresses_are_the_same_however_randomness_is_given(launch, code, lines):
    recorded = launch("recording", "record", code)
    profile = merge(recorded.directory.parent / "recording")
    replayed = launch("replaying", "replay", code, profile)
    derived = launch("derive-it", "virtual", code)
    layout = lines_of_program(recorded, "recording")
    assert len(layout) >= lines
    assert layout == lines_of_program(replayed, "replaying")
    assert layout == lines_of_program(derived, "derive-it")
