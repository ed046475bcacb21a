import ast
from pathlib import Path

import capsule
from capsule.experiment.canonical import canonical_json
from capsule.experiment.canonical import sha256_hex as sha256
from capsule.image.code import is_program, training_code, training_code_digest

PACKAGE = Path(capsule.__file__).parent
PROGRAMS = {  # what is started inside an image, or imported there by a program of the user's own
    "capsule.training.__main__",
    "capsule.training.arrivals",
    "capsule.training.determinism.child_processes",
    "capsule.training.determinism.self_test",
    "capsule.training.film",
    "capsule.training.impala.actors.ray.node",
    "capsule.training.instruments.hooks",
    "capsule.training.own_program.recorder",
}


def source_of(module):
    """Return the file of a module of the package, None if there is no such module."""
    path = PACKAGE.parent / module.replace(".", "/")
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def imports_of(module):
    """Yield the names that a module imports at any place: modules, and what is in them."""
    for node in ast.walk(ast.parse(source_of(module).read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def closure(modules):
    """Return the modules of the package that these import, directly or not, themselves included."""
    found, waiting = set(), set(modules)
    while waiting:
        module = waiting.pop()
        if module.split(".")[0] != "capsule" or module in found or source_of(module) is None:
            continue
        found.add(module)
        waiting |= {module.rpartition(".")[0], *imports_of(module)}
    return found


def test_the_files_are_those_that_programs_of_an_image_import():
    expected = {str(source_of(name).relative_to(PACKAGE.parent)) for name in closure(PROGRAMS)}
    assert {name for name in training_code() if name.endswith(".py")} == expected


def test_other_files_are_native_parts_and_data_and_hooks():
    others = {name for name in training_code() if not name.endswith(".py")}
    native = {name for name in others if name.startswith("capsule/native/lib/")}
    assert {name.rpartition("/")[2] for name in native} == {
        "capsule-launch",
        "libcapsule-entropy.so",
        "libcapsule-kernels.so",
        "libcapsule-math.so",
    }
    assert [name for name in native if is_program(name)] == ["capsule/native/lib/capsule-launch"]
    assert {name.rpartition(".")[2] for name in others - native} == {"csv", "json", "pth"}
    assert {name for name in others if "/" not in name} == {
        "capsule-determinism.pth",
        "capsule-diagnose.pth",
    }


def test_order_and_what_is_left_out(tmp_path):
    package = tmp_path / "capsule"
    for name in (
        "__init__.py",
        "py.typed",
        "cli/main.py",
        "experiment/b.py",
        "experiment/a.py",
        "experiment/__pycache__/a.cpython-311.pyc",
        "training/.a.py.swp",
        "training/deep/table.json",
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    names = list(training_code(package))
    assert names == sorted(names)
    assert [name for name in names if "/native/" not in name] == [
        "capsule/__init__.py",
        "capsule/experiment/a.py",
        "capsule/experiment/b.py",
        "capsule/training/deep/table.json",
    ]


def test_digest_is_over_the_canonical_listing():
    listing = {name: sha256(data) for name, data in training_code().items()}
    assert training_code_digest() == sha256(canonical_json(listing))
    assert training_code_digest({"a": b"1", "b": b"2"}) == training_code_digest(
        {"b": b"2", "a": b"1"}
    )
    assert training_code_digest({"a": b"1"}) != training_code_digest({"a": b"2"})
