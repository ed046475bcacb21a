"""Reading YAML files strictly, with file, line and column in every complaint."""

from __future__ import annotations

import codecs
import copy
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from capsule.host.encoding import is_utf8
from capsule.host.errors import CapsuleError, coded

MAX_BYTES = 1 << 20
MAX_BRACKETS = 4096  # the scanner's time grows with the square of those that are open
MAX_DEPTH = 64  # of sections and lists in one another, which readers follow recursively
MAX_INTEGER_BITS = 53
_LONGEST_INTEGER = 1000  # characters
_SHOWN_CHARACTERS = 60
FieldPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"  # of YAML's own types (YAML 1.2.2, section 10)
_EXAMPLES = {
    "spec": "Write one with 'capsule init'.",
    "study": "Write the study's name, its base and its groups.",
    "template": "Write the manifest of a Kubernetes Job.",
}
_BOOLEANS = {"true": True, "false": False}
_NULLS = {"", "~", "null"}
_PLACE = re.compile(r"\d+:\d+: ")
_SYNTAX_FIXES = {  # by what the parser says
    r"'\t'": "Indent with spaces instead of tabs.",
    "expected ',' or ']'": "Correct the YAML. In a list in brackets, a value with brackets needs "
    "quotes: ['gymnasium[mujoco]'].",
}
_TOO_DEEP = f"sections and lists are nested more than {MAX_DEPTH} deep"
_LESS_DEEP = "Nest fewer of them."
_CONTAINERS = {_TAG + "map", _TAG + "seq"}


class YamlDocument:
    """The values of a YAML (or JSON) file, and where each of them stands.

    Attributes:
        name: What error messages call the document.
        kind: What the document is, for messages: "spec", "study" or "template".
        tree: Its values, to be validated; callers may change them first.
        marks: Where each value comes from, by its path: ``NAME:LINE:COLUMN``, or the words of
            :meth:`set`.
    """

    def __init__(self, data: bytes, name: str, kind: str) -> None:
        """Parse ``data``.

        Raises:
            CapsuleError: CAP-S002, it is not YAML, or uses what a spec does not need.
        """
        self.name, self.kind = name, kind
        self.tree, places = _Reader(name, _EXAMPLES[kind]).read(data)
        self.marks = {path: f"{name}:{place}" for path, place in places.items()}

    @classmethod
    def load(cls, path: Path, kind: str) -> YamlDocument:
        """Read a file.

        Args:
            path: The file.
            kind: What the file is, for messages.

        Raises:
            CapsuleError: CAP-S001 the file cannot be read, CAP-S002 as above.
        """
        fix = "Name an existing file." + " Or write one: capsule init" * (kind == "spec")
        with coded("CAP-S001", f"cannot read {kind} {path}", fix=fix), path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        # Text in UTF-16 has such bytes, too, but is text, and gets advice of its own.
        if b"\0" in data and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise CapsuleError(
                "CAP-S002",
                f"{path} is not a text file",
                fix=f"Name the YAML file of a {kind}. 'capsule show' describes a bundle.",
            )
        if len(data) > MAX_BYTES:
            raise CapsuleError(
                "CAP-S001",
                f"{kind} {path} is larger than 1 MiB",
                fix=f"A {kind} is a few kilobytes of YAML.",
            )
        return cls(data, str(path), kind)

    def value(self, path: FieldPath, absent: Any = None) -> Any:
        """Return the value at a path, or ``absent`` if there is none."""
        tree = self.tree
        for key in path:
            if isinstance(tree, dict):
                tree = tree.get(key, absent)
            elif isinstance(tree, list) and isinstance(key, int) and key < len(tree):
                tree = tree[key]
            else:
                return absent
        return tree

    def place_of(self, path: FieldPath) -> str:
        """Return where a field is, or the section that it would be in, for messages."""
        # The empty path of the whole document always has a mark.
        above = (path[:length] for length in range(len(path), -1, -1))
        return next(self.marks[each] for each in above if each in self.marks)

    def copy(self) -> YamlDocument:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def override(self, settings: Sequence[str]) -> None:
        """Set dotted fields as ``--set`` gives them, as ``section.field=value``.

        Raises:
            CapsuleError: CAP-S004, one is malformed; CAP-S002, a value is not YAML.
        """
        for setting in settings:
            if not is_utf8(setting):
                raise CapsuleError(
                    "CAP-S004",
                    f"override {setting!a} is not UTF-8",
                    fix="Write the value in UTF-8.",
                )
            name, separator, text = setting.partition("=")
            if not separator or not all(name.split(".")):
                raise CapsuleError(
                    "CAP-S004",
                    f"override {setting!r} is not section.field=value",
                    fix="Write, for example, --set seeds.root=1.",
                )
            # By the rules of the file, so that a value means the same on the command line and in
            # it.
            given = YamlDocument(f"value: {text}".encode(), f"--set {name}", "spec")
            if len(given.tree) > 1:  # a line break in the text began further keys
                raise CapsuleError(
                    "CAP-S004",
                    f"override {setting!r} is more than one value",
                    fix="Use one --set for each field.",
                )
            self.set(name, given.tree["value"], "--set")

    def set(self, field: str, value: Any, where: str) -> None:
        """Set a field of a section, and note where that was asked for.

        Args:
            field: Dotted path of the field; sections that do not exist are made.
            value: The new value.
            where: What messages say instead of line and column.

        Raises:
            CapsuleError: CAP-S004, the path is malformed or leads into a value.
        """
        *sections, last = keys = field.split(".")
        if not all(keys):
            raise CapsuleError(
                "CAP-S004",
                f"{where}: {field!r} is not section.field",
                fix="Write, for example, seeds.root.",
            )
        tree = self.tree
        for key in sections:
            tree = tree.setdefault(key, {}) if isinstance(tree, dict) else None
        if not isinstance(tree, dict):
            raise CapsuleError(
                "CAP-S004",
                f"{where}: {field!r} leads into a value that is not a section",
                fix="Name an existing field.",
            )
        tree[last] = copy.deepcopy(value)  # a later call may set a field of it
        place = tuple(keys)
        # What was below the field is gone, and so are its places.
        self.marks = {path: at for path, at in self.marks.items() if path[: len(place)] != place}
        self.marks[place] = where


class _Reader:
    """Turns YAML nodes into plain values, remembering where each one stood."""

    def __init__(self, name: str, example: str) -> None:
        self.name, self.example = name, example
        self.marks: dict[FieldPath, str] = {}

    def read(self, data: bytes) -> tuple[Any, dict[FieldPath, str]]:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError
        from ruamel.yaml.reader import ReaderError

        if data.count(b"[") + data.count(b"{") > MAX_BRACKETS:
            self._reject(f"more than {MAX_BRACKETS} brackets", "Write lists on lines of their own.")
        try:
            # Composed and not loaded: nodes know their places, and no constructor is called.
            node = YAML(typ="safe", pure=True).compose(io.StringIO(data.decode("utf-8")))
        except UnicodeDecodeError as error:
            # What precedes the byte can be decoded.
            place = _place_after(data[: error.start].decode())
            self._reject(
                f"{place}: the byte 0x{data[error.start]:02x} is not UTF-8",
                "Save the file as UTF-8.",
            )
        except ReaderError as error:
            place = _place_after(data.decode()[: error.position])
            self._reject(
                f"{place}: the character U+{error.character:04X} is not allowed",
                "Remove it, or write it as an escape sequence in double quotation marks.",
            )
        except MarkedYAMLError as error:
            mark = error.problem_mark
            where = f"{mark.line + 1}:{mark.column + 1}: " if mark else ""
            problem = str(error.problem or error.context)
            if problem.startswith("but "):  # the second half of a sentence
                problem = f"{error.context}, {problem}"
            fixes = (fix for sign, fix in _SYNTAX_FIXES.items() if sign in problem)
            self._reject(f"{where}{problem}", next(fixes, "Correct the YAML."))
        except RecursionError:
            self._reject(_TOO_DEEP, _LESS_DEEP)
        except (YAMLError, ValueError) as error:
            self._reject(str(error), "Correct the YAML.")
        if node is None:
            self._reject("the file is empty", self.example)
        value = self._value(node, ())
        if not isinstance(value, dict):
            self._reject("the top level is not a mapping", self.example)
        return value, self.marks

    def _value(self, node: Any, path: FieldPath) -> Any:
        from ruamel.yaml.nodes import MappingNode, SequenceNode

        self.marks.setdefault(path, _position(node))
        if len(path) > MAX_DEPTH:
            self._reject(f"{_position(node)}: {_TOO_DEEP}", _LESS_DEEP)
        # A few aliases of aliases expand to gigabytes ("billion laughs").
        if node.anchor is not None:
            self._reject(
                f"{_position(node)}: anchors and aliases are not allowed",
                "Write the value itself instead.",
            )
        if isinstance(node, MappingNode | SequenceNode) and str(node.tag) not in _CONTAINERS:
            self._reject(f"{_position(node)}: {node.tag} is not allowed", "Use plain values.")
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self._value(item, (*path, i)) for i, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: Any, path: FieldPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node.value, str) or key_node.anchor is not None:
                self._reject(f"{_position(key_node)}: keys must be plain text", "Write a name.")
            key = self._text(key_node)
            if key in result:
                first = self.marks[(*path, key)]
                self._reject(
                    f"{_position(key_node)}: key '{dotted((*path, key))}' was already given at "
                    f"{first}",
                    "Remove one of the two.",
                )
            self.marks[(*path, key)] = _position(key_node)
            result[key] = self._value(value_node, (*path, key))
        return result

    def _scalar(self, node: Any) -> Any:
        tag = str(node.tag).removeprefix(_TAG)
        text: str = node.value
        # By a tag, or a directive of YAML 1.1, other words are Booleans, too, such as 'yes'.
        if tag == "null" and text.lower() in _NULLS:
            return None
        if tag == "bool" and text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        if tag in ("int", "float"):
            return self._number(node, tag)
        # An unquoted date stays text, since no model has a field of dates.
        if tag not in {"str", "timestamp"}:
            shown = repr(text[:_SHOWN_CHARACTERS])
            fix = "Write true or false." if tag == "bool" else "Use plain values."
            self._reject(f"{_position(node)}: {shown} ({tag}) is not allowed", fix)
        return self._text(node)

    def _number(self, node: Any, tag: str) -> int | float:
        digits = str(node.value).replace("_", "")
        said = f"{_position(node)}: {node.value[:_SHOWN_CHARACTERS]!r}"
        try:
            number = _integer(digits) if tag == "int" else float(digits)
        except ValueError:
            number = math.nan
        except OverflowError:
            limit = f"2^{MAX_INTEGER_BITS} - 1"
            beyond = (
                f"smaller than -({limit})" if digits.startswith("-") else f"larger than {limit}"
            )
            self._reject(
                f"{said} is {beyond}",
                f"Write a number of at most {MAX_INTEGER_BITS} bits, or put text into quotation "
                "marks.",
            )
        if not math.isfinite(number):
            self._reject(
                f"{said} is not a {'number' if tag == 'int' else 'finite number'}",
                "Write a decimal number without leading zeros, or put text into quotation marks.",
            )
        return number

    def _text(self, node: Any) -> str:
        text: str = node.value
        if is_utf8(text):
            return text
        try:
            # JSON writes a character beyond U+FFFF as a pair of surrogates.
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._reject(
                f"{_position(node)}: {text[:_SHOWN_CHARACTERS]!a} has half of a surrogate pair",
                "Write the character itself.",
            )

    def _reject(self, message: str, fix: str) -> NoReturn:
        # A message about one place begins with its line and column.
        separator = ":" if _PLACE.match(message) else ": "
        raise CapsuleError("CAP-S002", f"{self.name}{separator}{message}", fix=fix)


def _integer(digits: str) -> int:
    """Read an integer of YAML 1.2 without underscores.

    Raises:
        ValueError: It is not one.
        OverflowError: It has more than 53 bits: no field takes it, and canonical JSON (RFC 8785)
            has no larger ones.
    """
    if len(digits) > _LONGEST_INTEGER:  # Python takes some of these for malformed
        raise OverflowError("too long")
    # Base 0 reads 0x1f and 0o17, and rejects 017, which YAML 1.1 takes for an octal number and YAML
    # 1.2 for a decimal one.
    number = int(digits, 0)
    if number.bit_length() > MAX_INTEGER_BITS:
        raise OverflowError("too large")
    return number


def _place_after(text: str) -> str:
    """Return the line and column of what follows a text."""
    lines = text.split("\n")
    return f"{len(lines)}:{len(lines[-1]) + 1}"


def _position(node: Any) -> str:
    return f"{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def dotted(path: FieldPath) -> str:
    """Return a path as messages show it."""
    return ".".join(str(part) for part in path)
