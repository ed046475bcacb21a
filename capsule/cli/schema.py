"""``capsule schema``: print the JSON Schema of a spec."""

from __future__ import annotations

from capsule.cli.common import guarded, print_json


@guarded
def command() -> None:
    """Print the JSON Schema of a spec: every field and its default.

    Examples:
        # Give the schema to an editor that completes and checks YAML.
        capsule schema > capsule.schema.json
    """
    from capsule.host.spec_file import schema_document

    print_json(schema_document())
