from pathlib import Path

import capsule
from capsule.experiment.canonical import canonical_json, sha256_file
from capsule.experiment.canonical import sha256_hex as sha256
from capsule.image.code import training_code, training_code_digest

PACKAGE = Path(capsule.__file__).parent


def test_the_training_side_and_nothing_else():
    rooms = {name.split("/")[1] for name in training_code() if "/" in name}
    assert {"__init__.py", "py.typed", "experiment", "training"} <= rooms
    assert rooms <= {"__init__.py", "py.typed", "experiment", "native", "training", "entropy"}


def test_every_source_file_of_the_rooms_is_there():
    expected = {
        path.relative_to(PACKAGE.parent).as_posix(): sha256_file(path)
        for room in ("experiment", "training", "entropy")
        for path in (PACKAGE / room).rglob("*.py")
    }
    found = {name: sha256(data) for name, data in training_code().items()}
    assert expected.items() <= found.items()


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
    assert list(training_code(package)) == [
        "capsule/__init__.py",
        "capsule/experiment/a.py",
        "capsule/experiment/b.py",
        "capsule/py.typed",
        "capsule/training/deep/table.json",
    ]


def test_digest_is_over_the_canonical_listing():
    listing = {name: sha256(data) for name, data in training_code().items()}
    assert training_code_digest() == sha256(canonical_json(listing))
    assert training_code_digest({"a": b"1", "b": b"2"}) == training_code_digest(
        {"b": b"2", "a": b"1"}
    )
    assert training_code_digest({"a": b"1"}) != training_code_digest({"a": b"2"})
