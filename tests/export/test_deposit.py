"""What the user says about a deposit."""

import pytest

from capsule.export.deposit import MAX_CITATION_BYTES, Creator, Details
from capsule.host.errors import CapsuleError

CITATION = """\
cff-version: 1.2.0
title: A program
license: Apache-2.0
authors:
  - family-names: Beethoven
    name-particle: van
    given-names: Ludwig
    affiliation: Vienna
    orcid: https://orcid.org/0000-0002-1825-0097
  - name: The Orchestra
"""


def details(**options):
    known = {"title": None, "creators": (), "licence": None, "related": (), "citation": None}
    return Details.of(**{**known, **options})


def test_a_citation_file_has_creators_and_a_licence(tmp_path):
    (tmp_path / "CITATION.cff").write_text(CITATION)
    found = details(citation=tmp_path / "CITATION.cff")
    assert found.creators == (
        Creator("van Beethoven, Ludwig", "Vienna", "0000-0002-1825-0097"),
        Creator("The Orchestra"),
    )
    assert found.licence == "Apache-2.0"


def test_options_come_before_the_citation_file(tmp_path):
    (tmp_path / "CITATION.cff").write_text(CITATION)
    found = details(citation=tmp_path / "CITATION.cff", creators=["Doe, Jane"], licence="cc-by-4.0")
    assert (found.creators, found.licence) == ((Creator("Doe, Jane"),), "CC-BY-4.0")


def test_related_works_have_a_relation():
    found = details(related=["isSupplementTo=10.1/x=y", "cites=https://example.org"])
    assert found.related == (("isSupplementTo", "10.1/x=y"), ("cites", "https://example.org"))


@pytest.mark.parametrize(
    "options",
    [
        {"licence": "do what you like"},
        {"licence": "MIT OR Apache-2.0"},
        {"related": ["10.1/x"]},
        {"related": ["likes=10.1/x"]},
        {"related": ["cites="]},
    ],
)
def test_malformed_options_are_refused(options):
    with pytest.raises(CapsuleError) as raised:
        details(**options)
    assert raised.value.code == "CAP-P207"


@pytest.mark.parametrize("text", ["authors: 3", "- a", "authors: [", "", None])
def test_a_malformed_citation_file_is_refused(text, tmp_path):
    path = tmp_path / "CITATION.cff"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CapsuleError, match=r"CITATION\.cff") as raised:
        details(citation=path)
    assert raised.value.code == "CAP-P207"


def test_a_citation_file_that_cannot_be_read_is_named_with_the_reason_alone(tmp_path):
    with pytest.raises(CapsuleError) as raised:
        details(citation=tmp_path)
    assert raised.value.message == f"--citation {tmp_path}: Is a directory"
    path = tmp_path / "CITATION.cff"
    path.write_text(CITATION + "# " + "x" * MAX_CITATION_BYTES)  # and not what its first part says
    with pytest.raises(CapsuleError, match="it is larger than 1 MiB"):
        details(citation=path)


def test_a_wrong_field_of_a_citation_file_is_named(tmp_path):
    path = tmp_path / "CITATION.cff"
    path.write_text("authors:\n  - family-names: Doe\n    orcid: 3\n")
    with pytest.raises(CapsuleError, match=r"authors\.0\.orcid: .*, not 3"):
        details(citation=path)


def test_one_of_the_licences_of_a_citation_file_is_to_be_chosen(tmp_path):
    path = tmp_path / "CITATION.cff"
    path.write_text(CITATION.replace("Apache-2.0", "[Apache-2.0, MIT]"))
    with pytest.raises(CapsuleError, match=r"license 'Apache-2\.0 OR MIT'") as raised:
        details(citation=path)
    assert "--licence" in raised.value.fix
    assert details(citation=path, licence="mit").licence == "MIT"
    path.write_text(CITATION.replace("Apache-2.0", "[MIT]"))
    assert details(citation=path).licence == "MIT"


def test_a_creator_without_a_name_is_refused(tmp_path):
    path = tmp_path / "CITATION.cff"
    path.write_text("authors:\n  - family-names: Doe\n  - alias: jd\n")
    with pytest.raises(CapsuleError, match=r"CITATION\.cff: creator 2 has no name"):
        details(citation=path)
    with pytest.raises(CapsuleError, match="--creator: creator 1 has no name"):
        details(creators=[" "])


def test_metrics_take_no_deposit():
    details().require_none("csv")
    with pytest.raises(CapsuleError, match="--to csv") as raised:
        details(title="A title").require_none("csv")
    assert raised.value.code == "CAP-P207"
