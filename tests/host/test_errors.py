"""One table of error codes: every code that is raised is in it, and the other way about."""

import ast
import errno
import re
import runpy
from pathlib import Path

import pytest

import capsule
from capsule.diagnosis import findings
from capsule.experiment.errors import register
from capsule.host.errors import ENTRIES, IMAGE_CODES, CapsuleError, ExitCode, coded, refusal_of

PACKAGE = Path(capsule.__file__).parent
ROOT = PACKAGE.parent
TABLE = PACKAGE / "experiment/errors.py"
INSIDE = ("experiment", "training", "native")  # rooms that go into images
CODE = re.compile(r"CAP-[A-Z][0-9]{3}")


def codes_by_module():
    """Return the codes that each module names in a string of its own, tables left out."""
    found = {}
    for path in sorted(set(PACKAGE.rglob("*.py")) - {TABLE}):
        text = path.read_text()
        if "CAP-" not in text:
            continue
        strings = {
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        whole = {string.partition(":")[0] for string in strings}
        if codes := {code for code in whole if CODE.fullmatch(code)}:
            found[path.relative_to(PACKAGE)] = codes
    return found


def imported_from(path):
    """Return the modules from which a module imports names."""
    tree = ast.parse((PACKAGE / path).read_text())
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


MODULES = codes_by_module()
TITLES = set(findings.CATALOGUE)


def test_modules_name_codes():
    assert len(MODULES) > 90


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_raises_codes_of_the_table_that_it_imports(path):
    codes = MODULES[path] - TITLES
    if path.parts[0] in INSIDE:
        assert codes <= set(IMAGE_CODES)
    else:
        assert codes <= set(ENTRIES)
        assert "capsule.experiment.errors" not in imported_from(path) or path.stem == "errors"


def test_each_code_is_raised():
    inside = {path for path in MODULES if path.parts[0] in INSIDE}
    assert set().union(*(MODULES[path] for path in inside)) == set(IMAGE_CODES)
    assert (
        set().union(*(MODULES[path] for path in MODULES if path not in inside))
        >= ENTRIES.keys() - IMAGE_CODES.keys()
    )
    assert set(ENTRIES) >= set(IMAGE_CODES)


def test_each_code_is_listed_once():
    lines = (PACKAGE / "host/errors.txt").read_text().splitlines()
    assert sum(line.startswith("CAP-") for line in lines) == len(ENTRIES)


def beginnings_of_fixes(path):
    """Yield the literal words with which each fix begins that a module passes to an error."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    given = [
        value
        for node in ast.walk(tree)
        for name, value in (
            *((each.arg, each.value) for each in getattr(node, "keywords", ())),
            *defaults_of(node),
        )
        if name == "fix"
    ]
    while given:
        value = given.pop()
        if isinstance(value, ast.Name):
            given += [constants[value.id]] if value.id in constants else []
        elif isinstance(value, ast.IfExp):
            given += [value.body, value.orelse]
        elif isinstance(value, ast.BinOp):
            given.append(value.left)
        elif isinstance(value, ast.JoinedStr):
            given.append(value.values[0])
        elif isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


def defaults_of(node):
    """Yield the parameters of a function that have a default, and the default."""
    if isinstance(node, ast.FunctionDef):
        named = reversed(node.args.args)
        yield from (
            (each.arg, value)
            for each, value in zip(named, reversed(node.args.defaults), strict=False)
        )


def test_a_fix_begins_with_a_capital_letter_or_is_a_command():
    fixes = {
        (path.relative_to(PACKAGE).as_posix(), words)
        for path in PACKAGE.rglob("*.py")
        for words in beginnings_of_fixes(path)
    }
    assert len(fixes) > 400
    commands = ("capsule ", "chmod ", "pip ")
    assert [
        each for each in fixes if each[1][:1].islower() and not each[1].startswith(commands)
    ] == []


@pytest.mark.parametrize("code", ENTRIES)
def test_the_cause_and_the_fix_of_a_code_are_sentences(code):
    for text in (ENTRIES[code].cause, ENTRIES[code].fix):
        assert re.fullmatch(r"[A-Z`].*\.", text)


@pytest.mark.slow
def test_the_host_side_imports_the_error_type_from_its_own_table():
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE).parts[0] in INSIDE
        if not inside and path != PACKAGE / "host/errors.py":
            assert "capsule.experiment.errors" not in imported_from(path), path


def test_the_page_is_what_the_script_writes():
    page = runpy.run_path(str(ROOT / "scripts/errors_page.py"))["page"]
    assert (ROOT / "docs/errors.md").read_text() == page()


def test_a_code_gives_the_exit_status():
    error = CapsuleError("CAP-V005", "another image", fix="Compare.")
    assert (error.exit_code, str(error)) == (ExitCode.INCONCLUSIVE, "CAP-V005 another image")


def test_an_unknown_code_cannot_be_raised_and_none_is_registered_twice():
    with pytest.raises(KeyError, match="CAP-V999"):
        CapsuleError("CAP-V999", "message", fix="fix")
    for code in ("CAP-V005", "CAP-T101"):
        with pytest.raises(ValueError, match=f"registered twice: {code}"):
            register({code: ExitCode.OK})


def test_an_error_of_the_operating_system_gets_a_code(tmp_path):
    with (
        pytest.raises(
            CapsuleError, match=r"^CAP-S001 no spec: No such file or directory$"
        ) as raised,
        coded("CAP-S001", "no spec", fix="Write one."),
    ):
        (tmp_path / "absent").read_bytes()
    assert raised.value.fix == "Write one."
    assert isinstance(raised.value.__cause__, FileNotFoundError)


def test_other_errors_keep_their_type():
    with pytest.raises(KeyError), coded("CAP-S001", "no spec", fix="Write one."):
        raise KeyError("absent")


def test_a_refusal_of_the_operating_system_is_coded():
    refusal = refusal_of(OSError(28, "No space left on device", "/somewhere"))
    assert (refusal.code, refusal.exit_code) == ("CAP-X003", ExitCode.INCONCLUSIVE)
    assert refusal_of(OSError(2, "No such file or directory")) is None


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "'ulimit -n'"),
        (OSError(errno.ENFILE, "Too many open files in system"), "'ulimit -n'"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "'ulimit -v'"),
        (MemoryError(), "'ulimit -v'"),
        (OSError(errno.EFBIG, "File too large"), "'ulimit -f'"),
    ],
)
def test_the_fix_of_a_limit_names_the_limit(error, remedy):
    refusal = refusal_of(error)
    assert refusal.code == "CAP-X003"
    assert remedy in refusal.fix


def test_used_up_memory_has_the_words_of_the_system():
    assert refusal_of(MemoryError()).message.endswith("error: Cannot allocate memory")


def test_a_missing_temporary_folder_is_a_refusal():
    missing = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/x']")
    assert refusal_of(missing).code == "CAP-X003"
