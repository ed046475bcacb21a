"""Which file system a path is on."""

import subprocess
from pathlib import Path

import pytest

from capsule.experiment.mounts import file_system_of

TABLE = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:5 / /scratch rw - tmpfs tmpfs rw,size=8k
23 21 0:6 / /mnt/my\040disk rw,relatime - xfs /dev/sdb1 rw
24 22 0:7 / /scratch/deep rw - overlay overlay rw
25 21 0:8 / /scratch rw - btrfs /dev/sdc1 rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/scratchy", "ext4"),
        ("/scratch", "btrfs"),  # the later mount hides the earlier one
        ("/scratch/deep/er", "overlay"),
        ("/mnt/my disk/file", "xfs"),
    ],
)
def test_the_deepest_mount_that_holds_a_path_counts(tmp_path, path, kind):
    table = tmp_path / "mountinfo"
    table.write_text(TABLE.lstrip())
    assert file_system_of(Path(path), table) == kind
    assert file_system_of(Path(path), tmp_path / "none") is None


def test_the_file_system_is_the_one_that_the_kernel_tells(tmp_path):
    command = ["df", "--output=fstype", str(tmp_path)]
    told = subprocess.check_output(command, text=True).split()[-1]
    assert file_system_of(tmp_path.resolve()) == told
