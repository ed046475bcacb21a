"""The bundles of members: which file is whose, and which are refused. The study is the corpus's."""

import itertools
import math
import random
import shutil

import pytest

from capsule.host.errors import CapsuleError
from capsule.study import member_bundles
from capsule.study.member_bundles import (
    choose_segments,
    count_segments,
    find_bundles,
)
from tests.study.corpus import CORPUS, MEMBERS, refused, results_of
from tests.study.studies import make_results


def test_each_member_has_its_own_file(results, folder):
    found = find_bundles(results, folder)
    assert list(found) == MEMBERS
    assert found == {name: folder / name / "x.capsule.tar" for name in MEMBERS}


def test_some_members_may_be_missing(results, folder):
    shutil.rmtree(folder / "deterministic.1")
    assert list(find_bundles(results, folder)) == MEMBERS[1:]


def test_a_member_that_was_run_again_has_another_file_with_the_same_claims(results, folder):
    """Both runs of 'deterministic' claim the same, so the one may stand for the other."""
    (folder / "deterministic.1" / "x.capsule.tar").unlink()
    shutil.copyfile(
        folder / "deterministic.2" / "x.capsule.tar", folder / "deterministic.1" / "y.capsule.tar"
    )
    found = find_bundles(results, folder)
    assert list(found) == MEMBERS[1:]  # the same file twice is one member's
    other = results_of("study")
    identity = other.members[0].identity
    object.__setattr__(identity, "bundle", "0" * 64)
    found = find_bundles(other, CORPUS / "study.members")
    assert found["deterministic.1"].name == "deterministic.1.capsule.tar"


def test_a_folder_without_bundles_is_refused(results, tmp_path):
    assert str(tmp_path) in refused("CAP-Y030", find_bundles, results, tmp_path)
    assert "absent" in refused("CAP-Y030", find_bundles, results, tmp_path / "absent")


def test_the_bundle_of_another_study_is_refused(results, folder):
    other = CORPUS / "study-program.members" / "seeds.1.capsule.tar"
    shutil.copyfile(other, folder / "exploration.2" / "x.capsule.tar")
    said = refused("CAP-Y031", find_bundles, results, folder)
    assert "exploration.2/x.capsule.tar" in said
    assert "no member has its lock" in said


def test_a_bundle_that_claims_something_else_is_refused(folder):
    results = results_of("study")
    for member in results.members[2:3]:
        object.__setattr__(member.identity, "claim_id", "0" * 64)
        object.__setattr__(member.identity, "bundle", "0" * 64)
    said = refused("CAP-Y031", find_bundles, results, folder)
    assert f"but member exploration.1 claims {'0' * 64}" in said


def test_an_edited_bundle_is_refused(results, folder):
    path = folder / "exploration.1" / "x.capsule.tar"
    data = bytearray(path.read_bytes())
    data[data.index(b'"episodes"')] ^= 1
    path.write_bytes(data)
    with pytest.raises(CapsuleError) as caught:
        find_bundles(results, folder)
    assert caught.value.exit_code == 3
    # There may be hundreds of bundles in the folder.
    assert caught.value.message.startswith(f"{path}: the content of ")


def test_bundles_are_searched_for_as_deep_as_they_are_in_the_folder_of_a_study(
    results, folder, tmp_path
):
    study = tmp_path / "above" / "study"
    for name in MEMBERS:
        (folder / name).rename(_made(study / "members") / name)
    (study / "folder.capsule.tar").mkdir()
    assert list(find_bundles(results, study)) == MEMBERS
    assert "up to two levels below it" in refused("CAP-Y030", find_bundles, results, tmp_path)


def _made(path):
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_segments_of_all_members_are_counted(results, folder):
    assert count_segments(results, find_bundles(results, folder)) == dict.fromkeys(MEMBERS, 2)


@pytest.mark.parametrize("number", [0, -1, 6])
def test_another_number_than_there_are_segments_is_refused(number):
    said = refused("CAP-Y032", choose_segments, {"a": 2, "b": 3}, number)
    assert "5 segments" in said


def test_every_set_of_segments_is_as_likely_as_any_other(monkeypatch):
    """By enumeration: how many of all sets of two segments have so many of each member."""
    every = list(itertools.combinations("aabbb", 2))
    expected = {
        counts: sum((pair.count("a"), pair.count("b")) == counts for pair in every) / len(every)
        for counts in ((2, 0), (1, 1), (0, 2))
    }
    assert math.isclose(sum(expected.values()), 1)
    generator = random.Random(0)  # noqa: S311 - the same draws in every run
    monkeypatch.setattr(member_bundles.secrets, "SystemRandom", lambda: generator)
    draws = [choose_segments({"a": 2, "b": 3}, 2) for _ in range(20_000)]
    for counts, probability in expected.items():
        share = sum((each.get("a", 0), each.get("b", 0)) == counts for each in draws) / len(draws)
        assert share == pytest.approx(probability, abs=0.02)  # five standard deviations


@pytest.mark.parametrize(("forged", "sampled"), [(1, 1), (2, 3), (5, 4)])
def test_the_stated_chances_are_those_of_all_drawings(forged, sampled):
    from capsule.study.sampling import chance_to_notice

    found = [min(drawn) < forged for drawn in itertools.combinations(range(9), sampled)]
    assert chance_to_notice(9, forged, sampled) == pytest.approx(sum(found) / len(found))
    assert len(make_results().members) == 9
