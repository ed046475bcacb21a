"""``capsule schema``: a JSON Schema that accepts what Capsule accepts."""

import json

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from tests.cli.conftest import SMALL, SPECS, capsule


@pytest.fixture(scope="module")
def schema():
    return json.loads(capsule("schema").stdout)


def test_schema_is_json_schema(schema):
    assert schema["$schema"].endswith("2020-12/schema")
    assert "trainer" in schema["properties"]
    Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.name)
def test_it_accepts_the_shipped_specs(schema, path):
    document = YAML(typ="safe").load(path)
    assert not list(Draft202012Validator(schema).iter_errors(document))


def test_it_rejects_a_misspelt_field(schema):
    document = YAML(typ="safe").load(SMALL.read_text().replace("environment:", "enviroment:"))
    errors = [error.message for error in Draft202012Validator(schema).iter_errors(document)]
    assert any("'enviroment' was unexpected" in message for message in errors)


def test_it_takes_no_arguments():
    assert capsule("schema", "capsule.yaml").exit_code == 2
