"""The results of a study's folder. The study is the corpus's."""

from capsule.study.results import StudyResults
from tests.refusals import refusal
from tests.study.corpus import finished_study


def test_the_damaged_bundle_of_a_member_is_named_with_the_remedy_of_its_owner(results, tmp_path):
    study = finished_study(tmp_path / "study")
    assert len(StudyResults.of(study).members) == len(results.members)
    damaged = study.folder(results.members[-1].identity.name) / "x.capsule.tar"
    data = bytearray(damaged.read_bytes())
    data[data.index(b'"episodes"')] ^= 1
    damaged.write_bytes(data)
    error = refusal("CAP-B108", StudyResults.of, study)
    assert error.message.startswith(f"{damaged}: the content of ")
    assert "capsule study run --resume" in error.fix
