"""``capsule schema``: the JSON Schema of a spec."""

from __future__ import annotations

from capsule.cli.common import guarded, print_json


@guarded
def command() -> None:
    """Print the JSON Schema of a spec, every field with its default and meaning."""
    from capsule.host.spec_file import schema_document

    print_json(schema_document())
