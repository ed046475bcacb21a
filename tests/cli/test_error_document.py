"""The document of an error: what a failed command prints with --json."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

import capsule.host.errors
from capsule.cli.error_document import ErrorDocument
from capsule.host.errors import CapsuleError

TABLE = Path(capsule.host.errors.__file__).with_name("errors.txt").read_text(encoding="utf-8")
CODES = [line.split(" | ")[0] for line in TABLE.splitlines() if line.startswith("CAP-")]
PUBLISHED = Path(__file__).parents[2] / "schemas" / "error-v1.json"
TEXTS = st.text(max_size=9)


@given(st.sampled_from(CODES), TEXTS, TEXTS)
def test_the_document_of_every_code_has_the_parts_of_the_error_and_is_as_published(
    code, message, fix
):
    error = CapsuleError(code, message, fix=fix)
    printed = json.loads(json.dumps(ErrorDocument.of(error).model_dump(by_alias=True)))
    assert printed == {
        "schema": "capsule/error/v1",
        "code": code,
        "message": message,
        "fix": fix,
        "exit_code": int(error.exit_code),
    }
    Draft202012Validator(json.loads(PUBLISHED.read_text())).validate(printed)
    assert ErrorDocument.model_validate(printed) == ErrorDocument.of(error)


@given(st.sampled_from(CODES), TEXTS)
def test_the_canonical_form_is_read_again(code, message):
    document = ErrorDocument.of(CapsuleError(code, message, fix="Change it."))
    assert ErrorDocument.parse(document.document()) == document


@pytest.mark.parametrize(
    "change",
    [
        {"code": "CAP-s003"},
        {"code": "CAP-S03"},
        {"code": "CAP-S0033"},
        {"code": "CAP-S003\n"},
        {"schema": "capsule/error/v2"},
        {"exit_code": "2"},
        {"message": None},
        {"more": "than that"},
    ],
    ids=str,
)
def test_another_document_is_rejected(change):
    document = ErrorDocument.of(CapsuleError("CAP-S003", "a is wrong", fix="Change it."))
    with pytest.raises(ValidationError) as caught:
        ErrorDocument.model_validate(document.model_dump(by_alias=True) | change)
    assert [error["loc"] for error in caught.value.errors()] == [tuple(change)]


@pytest.mark.parametrize("missing", ["code", "message", "fix", "exit_code"])
def test_every_part_is_required(missing):
    document = ErrorDocument.of(CapsuleError("CAP-S003", "a is wrong", fix="Change it."))
    parts = document.model_dump(by_alias=True)
    del parts[missing]
    with pytest.raises(ValidationError, match=missing):
        ErrorDocument.model_validate(parts)
