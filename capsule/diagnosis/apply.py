"""Writing mitigations into a spec file, with everything else in it as it was."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from capsule.diagnosis.findings import Finding, Setting
from capsule.experiment.files import write_atomic
from capsule.host.errors import CapsuleError, coded
from capsule.host.spec_file import spec_of
from capsule.host.yaml_document import YamlDocument

MAX_WIDTH = 4096  # of a line; longer ones would be broken


def patch_of(findings: Iterable[Finding]) -> dict[str, Setting]:
    """Return the fields, dotted, that the mitigations of some findings set.

    Notes are left out: they ask for nothing.
    """
    patch: dict[str, Setting] = {}
    for item in findings:
        if item.level != "note":
            patch |= item.patch
    return dict(sorted(patch.items()))


def apply_patch(path: Path, patch: Mapping[str, Setting]) -> None:
    """Set fields of a spec file in place: comments, order and notation stay, and its permissions.

    The file gets all of the patch or, if anything fails, stays as it was.

    Args:
        path: The spec, YAML.
        patch: Dotted field to value.

    Raises:
        CapsuleError: CAP-S001 the file cannot be read, CAP-S002 or CAP-S003 it is not a valid spec,
            CAP-S010 it does not name a start set, CAP-D004 it cannot be written, or a comment of it
            cannot be kept.
    """
    with coded("CAP-S001", f"cannot read spec {path}", fix="Name an existing file."):
        before = path.read_bytes()
    _check(before, path)
    # By now, the file is known to be UTF-8.
    after = patched(before.decode(), patch).encode()
    # Changing YAML as text is delicate. What is no valid spec must not replace the user's file.
    _check(after, path)
    fix = "Make it writable, or set the fields by hand."
    with coded("CAP-D004", f"cannot write spec {path}", fix=fix):
        place = path.resolve()  # a symbolic link stays one
        with place.open("r+b") as stream:  # a file that is read-only is not replaced
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
        write_atomic(place, after, mode)


def _check(data: bytes, path: Path) -> None:
    """Check that a file would be a valid spec if it had this content."""
    spec_of(YamlDocument(data, str(path), "spec"), path.parent)


def patched(text: str, patch: Mapping[str, Setting]) -> str:
    """Return a YAML document with some fields set.

    Raises:
        CapsuleError: CAP-D004, it has a comment that cannot be kept.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.util import load_yaml_guess_indent

    yaml = YAML()
    # By default, ruamel.yaml drops quotes, breaks long lines and indents lists in its own way.
    yaml.preserve_quotes = True
    yaml.width = MAX_WIDTH
    yaml.representer.add_representer(type(None), _null)
    try:
        _, indent, offset = load_yaml_guess_indent(text)
        document: Any = yaml.load(text)
    except NotImplementedError as error:  # ruamel cannot place such a comment
        raise CapsuleError(
            "CAP-D004",
            "the spec has a comment between a key and a value on the next line, and such a comment "
            "cannot be kept",
            fix="Write the value on the line of its key, or set the fields by hand.",
        ) from error
    yaml.indent(mapping=2, sequence=indent or 2, offset=offset or 0)
    set_fields(document, patch)
    stream = io.StringIO()
    yaml.dump(document, stream)
    # ruamel.yaml writes the one kind of line ends only, beside those within comments of the file.
    lines = stream.getvalue().replace("\r\n", "\n")
    return lines.replace("\n", "\r\n") if "\r\n" in text else lines


def _null(representer: Any, _: None) -> Any:
    """Write null as a word, where ruamel would write nothing: a spec says it that way."""
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def set_fields(document: Any, patch: Mapping[str, Setting]) -> None:
    """Set dotted fields of a document, with the sections that they need."""
    for name, value in patch.items():
        *sections, key = name.split(".")
        node = document
        for section in sections:
            # A spec may leave out a section of which it has only defaults.
            node = node.setdefault(section, {})
        node[key] = value
