"""YAML documents whose fields are set from elsewhere; reading them: test_spec_file.py."""

import re

import pytest

from capsule.experiment.fields import Model
from capsule.host.errors import CapsuleError
from capsule.host.validation import validate
from capsule.host.yaml_document import MAX_BYTES, YamlDocument


class Inner(Model):
    size: int = 0
    names: tuple[str, ...] = ()


class Outer(Model):
    first: Inner = Inner()
    second: Inner = Inner()


def document(text="first:\n  size: 1\n", kind="study"):
    return YamlDocument(text.encode(), "x.yaml", kind)


def refused(found, code="CAP-S003"):
    with pytest.raises(CapsuleError) as caught:
        validate(found, Outer)
    assert caught.value.code == code
    return caught.value.message


def test_a_copy_is_independent():
    first = document()
    second = first.copy()
    second.set("first.size", "x", "the test")
    assert validate(first, Outer).first.size == 1
    assert "the test: first.size" in refused(second)


def test_sections_that_do_not_exist_are_made():
    found = document()
    found.set("second.size", 2, "the test")
    assert validate(found, Outer) == Outer(first=Inner(size=1), second=Inner(size=2))


def test_a_section_replaces_what_it_had_and_where_that_was():
    found = document("first:\n  size: 1\n  names: [a]\n")
    found.set("first", {"size": "x"}, "the test")
    assert refused(found).startswith("the test: first.size: ")
    found.set("first.size", 3, "the test")
    assert validate(found, Outer).first == Inner(size=3)


def test_a_section_that_was_set_is_not_changed_by_its_fields():
    found, section = document(), {"size": 1}
    found.set("second", section, "the test")
    found.set("second.size", 2, "the test")
    assert section == {"size": 1}
    assert validate(found, Outer).second.size == 2


def test_a_value_deep_in_a_list_has_the_place_of_what_was_set():
    found = document()
    found.set("second", {"names": ["a", 7]}, "the test")
    assert refused(found).startswith("the test: second.names.1: ")


def test_a_key_that_is_missing_has_the_place_of_its_section():
    class Whole(Model):
        first: Inner
        third: Inner

    with pytest.raises(CapsuleError, match=r"x\.yaml:1:1: third is missing"):
        validate(document(), Whole)


@pytest.mark.parametrize("field", ["", ".", "first.", ".size", "first..size"])
def test_a_malformed_field_is_refused(field):
    with pytest.raises(CapsuleError) as caught:
        document().set(field, 1, "the test")
    assert caught.value.code == "CAP-S004"
    assert caught.value.message == f"the test: {field!r} is not section.field"


@pytest.mark.parametrize("field", ["first.size.x", "first.size.x.y"])
def test_a_field_that_leads_into_a_value_is_refused(field):
    with pytest.raises(CapsuleError) as caught:
        document().set(field, 1, "the test")
    assert caught.value.code == "CAP-S004"
    assert caught.value.message == f"the test: {field!r} leads into a value that is not a section"


@pytest.mark.parametrize(("kind", "fix"), [("spec", "capsule init"), ("study", "its groups")])
@pytest.mark.parametrize("text", ["", "# nothing\n", "- 1\n", "x\n", "1\n", "null\n"])
def test_a_document_is_a_mapping_of_its_kind(kind, fix, text):
    with pytest.raises(CapsuleError) as caught:
        document(text, kind)
    assert caught.value.code == "CAP-S002"
    assert re.search(r": the (file is empty|top level)", caught.value.message)
    assert fix in caught.value.fix


def test_a_file_that_cannot_be_read_is_called_by_its_kind(tmp_path):
    (tmp_path / "long.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    for path, message in (
        (tmp_path / "absent.yaml", "cannot read study .*absent.yaml: No such file"),
        (tmp_path, "cannot read study .*: Is a directory"),
        (tmp_path / "long.yaml", "study .*long.yaml is larger than 1 MiB"),
    ):
        with pytest.raises(CapsuleError, match=message) as caught:
            YamlDocument.load(path, "study")
        assert caught.value.code == "CAP-S001"


@pytest.mark.parametrize("size", [3, MAX_BYTES])
def test_a_bundle_in_the_place_of_a_spec_is_no_text_file(tmp_path, size):
    path = tmp_path / "run.capsule.tar"
    path.write_bytes(b"manifest.json" + bytes(size))
    with pytest.raises(CapsuleError) as caught:
        YamlDocument.load(path, "spec")
    assert (caught.value.code, caught.value.message) == ("CAP-S002", f"{path} is not a text file")
    assert "'capsule show'" in caught.value.fix


def test_text_in_another_encoding_is_to_be_saved_as_utf_8(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("name: x", encoding="utf-16")
    with pytest.raises(CapsuleError, match="is not UTF-8") as caught:
        YamlDocument.load(path, "spec")
    assert caught.value.fix == "Save the file as UTF-8."


@pytest.mark.parametrize(
    ("text", "said", "fix"),
    [
        ("x: 9007199254740992", "1:4: '9007199254740992' is larger than 2^53 - 1", "53 bits"),
        ("x: -9007199254740992", " is smaller than -(2^53 - 1)", "53 bits"),
        ("x: " + "9" * 5000, " is larger than 2^53 - 1", "53 bits"),
        ("x: 017", "1:4: '017' is not a number", "without leading zeros"),
        ("x: .inf", "1:4: '.inf' is not a finite number", "without leading zeros"),
        ("x: 1\n---\nx: 2\n", ":2:1: expected a single document in the stream, but found", ""),
    ],
)
def test_what_yaml_reads_differently_is_said_in_a_whole_sentence(text, said, fix):
    with pytest.raises(CapsuleError) as caught:
        YamlDocument(text.encode(), "spec.yaml", "spec")
    assert caught.value.code == "CAP-S002"
    assert said in caught.value.message
    assert fix in caught.value.fix
