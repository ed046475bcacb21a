"""The results of a study's folder. The study is the corpus's."""

import shutil

from capsule.study.directory import OUTCOME, Outcome, StudyDirectory
from capsule.study.results import StudyResults
from tests.refusals import refusal
from tests.study.corpus import CORPUS


def test_the_damaged_bundle_of_a_member_is_named_with_the_remedy_of_its_owner(results, tmp_path):
    study = StudyDirectory.create(tmp_path / "study", results.lock, resume=False)
    for member in results.members:
        identity = member.identity
        folder = study.folder(identity.name)
        folder.mkdir(parents=True)
        source = CORPUS / "study.members" / f"{identity.name}.capsule.tar"
        shutil.copyfile(source, folder / "x.capsule.tar")
        outcome = Outcome(bundle="x.capsule.tar", claim_id=identity.claim_id)
        (folder / OUTCOME).write_bytes(outcome.document())
    assert len(StudyResults.of(study).members) == len(results.members)
    damaged = folder / "x.capsule.tar"
    data = bytearray(damaged.read_bytes())
    data[data.index(b'"episodes"')] ^= 1
    damaged.write_bytes(data)
    error = refusal("CAP-B108", StudyResults.of, study)
    assert error.message.startswith(f"{damaged}: the content of ")
    assert "capsule study run --resume" in error.fix
