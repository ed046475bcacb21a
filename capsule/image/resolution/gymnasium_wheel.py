"""The environments that a wheel of Gymnasium registers, and their kinds of actions.

The sources are parsed and never executed: a wheel is an untrusted program.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator
from typing import NamedTuple

_REGISTRATIONS = "gymnasium/envs/__init__.py"
_VERSION = re.compile(r"-v\d+$")  # Gymnasium completes an id without one
_SPACES = ("Box", "Discrete", "MultiDiscrete", "MultiBinary")
_MOST_STEPS = 10  # from a class to its base or to the module that defines it


class Registered(NamedTuple):
    """An environment that Gymnasium registers.

    Attributes:
        id: Its id.
        entry_point: Module and class, ``package.module:Class``; empty if it is not a plain text.
        continuous: The argument ``continuous`` of the class, if the registration gives it.
    """

    id: str
    entry_point: str
    continuous: bool | None


def registered(wheel: zipfile.ZipFile) -> Iterator[Registered]:
    """Yield the environments that a wheel registers, with and without their versions."""
    for call in ast.walk(ast.parse(wheel.read(_REGISTRATIONS))):
        if not (isinstance(call, ast.Call) and getattr(call.func, "id", None) == "register"):
            continue
        values = {word.arg: _literal(word.value) for word in call.keywords if word.arg}
        identifier = values.get("id", _literal(call.args[0]) if call.args else None)
        if isinstance(identifier, str):
            entry, arguments = values.get("entry_point"), values.get("kwargs")
            continuous = arguments.get("continuous") if isinstance(arguments, dict) else None
            found = Registered(identifier, entry if isinstance(entry, str) else "", continuous)
            yield found
            yield found._replace(id=_VERSION.sub("", identifier))


def is_continuous(wheel: zipfile.ZipFile, environment: Registered) -> bool:
    """Tell whether an environment is known to have continuous actions.

    A class that creates both kinds of spaces chooses by its argument ``continuous``, as
    ``LunarLander`` does. Of a class that is not in the wheel, nothing is known.
    """
    module, _, name = environment.entry_point.partition(":")
    for _ in range(_MOST_STEPS):
        tree = _module(wheel, module)
        if tree is None:
            return False
        found = _class(tree, name)
        spaces = set() if found is None else set(_action_spaces(found))
        if found is not None and spaces:
            chosen: object = environment.continuous
            if chosen is None:
                chosen = _default(found, "continuous")
            return spaces == {"Box"} or ("Box" in spaces and bool(chosen))
        if found is not None:  # its base makes the space
            name = next((base.id for base in found.bases if isinstance(base, ast.Name)), "")
            if _class(tree, name) is not None:
                continue
        module = _origin(tree, name)
    return False


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _module(wheel: zipfile.ZipFile, name: str) -> ast.Module | None:
    for path in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
        if path in wheel.namelist():
            return ast.parse(wheel.read(path))
    return None


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return next((each for each in classes if each.name == name), None)


def _origin(tree: ast.Module, name: str) -> str:
    """Return the module that a name is imported from; empty if it is not imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            return node.module or ""
    return ""


def _action_spaces(found: ast.ClassDef) -> Iterator[str]:
    """Yield the kinds of spaces that a class assigns to ``action_space``."""
    for node in ast.walk(found):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Call):
            continue
        assigned = node.targets if isinstance(node, ast.Assign) else [node.target]
        targets = {getattr(each, "attr", getattr(each, "id", None)) for each in assigned}
        function = node.value.func
        kind = getattr(function, "attr", getattr(function, "id", None))
        if "action_space" in targets and kind in _SPACES:
            yield str(kind)


def _default(found: ast.ClassDef, argument: str) -> object:
    """Return the default of an argument of a class; None if there is none."""
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            value = {each.arg: value for each, value in _defaults(node.args)}.get(argument)
            return None if value is None else _literal(value)
    return None


def _defaults(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    """Yield arguments with their defaults; None if a keyword-only argument has none."""
    # Defaults belong to the last positional arguments, so both lists are paired from their ends.
    named = [*arguments.posonlyargs, *arguments.args][::-1]
    yield from zip(named, arguments.defaults[::-1], strict=False)
    yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
