"""The page on studies: members, seeds and tables, made again by a reader that was written by it."""

import json
import re
import tarfile
from pathlib import Path

import pytest

from tests.format import study_reader

ROOT = Path(__file__).parents[2]
SLOW = ("nagarajan2019-small", "espeholt2018-small")  # with settings, and with sampled settings
STUDIES = [
    *(ROOT / "tests" / "corpus").glob("*.capsule-study.tar"),
    *(
        pytest.param(path, marks=pytest.mark.slow)
        for name in SLOW
        for path in (ROOT / "results" / name).glob("*.capsule-study.tar")
    ),
]


def field_of(spec, name):
    for part in name.split("."):
        spec = spec[part]
    return spec


@pytest.mark.parametrize("path", STUDIES)
def test_the_reader_makes_members_and_tables_again(path):
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}
    claims, lock = (json.loads(files[name]) for name in ("claims.json", "study/lock.json"))
    planned = study_reader.planned(lock["study"])
    assert len(planned) == len(lock["members"])
    for member in lock["members"]:
        assert study_reader.member_lock(lock, member) == member["lock"]
        for field, value in planned[member["name"]][3].items():
            assert field_of(lock["specs"][member["spec"]], field) == value
    for name, table in study_reader.tables(claims, lock, files).items():
        assert table == claims["tables"][name], name


def test_the_reader_imports_nothing_of_capsule():
    assert "capsule" not in re.findall(
        r"^(?:from|import) (\w+)", Path(study_reader.__file__).read_text(), re.MULTILINE
    )
