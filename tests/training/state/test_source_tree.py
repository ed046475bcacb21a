"""Modules of the source tree: found behind the packages, from the folder of the run."""

import sys

import pytest

from capsule.experiment.contract import PROJECT_VARIABLE
from capsule.training.state.source_tree import import_module


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A function that writes a module of the source tree of this run, to be forgotten again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setenv(PROJECT_VARIABLE, str(tmp_path))

    def write(name, code):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        return tmp_path

    return write


def test_a_module_of_the_source_tree_is_imported(tree):
    tree("capsule_tree_one.py", "ANSWER = 42\n")
    assert import_module("capsule_tree_one").ANSWER == 42


def test_modules_of_a_package_in_the_source_tree_import_each_other(tree):
    tree("capsule_tree_package/__init__.py", "")
    tree("capsule_tree_package/part.py", "ANSWER = 1\n")
    tree("capsule_tree_package/whole.py", "from capsule_tree_package.part import ANSWER\n")
    assert import_module("capsule_tree_package.whole").ANSWER == 1


def test_a_module_of_the_source_tree_replaces_no_package(tree):
    folder = tree("colorsys.py", "raise AssertionError('the module of the tree was executed')\n")
    sys.modules.pop("colorsys", None)
    assert import_module("colorsys").rgb_to_hsv(1.0, 0.0, 0.0) == (0.0, 1.0, 1.0)
    assert sys.path[-1] == str(folder)


def test_the_source_tree_is_searched_once_however_many_modules_are_imported(tree):
    folder = tree("capsule_tree_two.py", "")
    import_module("capsule_tree_two")
    import_module("json")
    assert sys.path.count(str(folder)) == 1


def test_a_run_without_a_source_tree_has_its_packages_alone(tree, tmp_path, monkeypatch):
    monkeypatch.setenv(PROJECT_VARIABLE, str(tmp_path / "missing"))
    before = list(sys.path)
    assert import_module("json").loads("1") == 1
    with pytest.raises(ImportError, match="capsule_no_such_module"):
        import_module("capsule_no_such_module")
    assert sys.path == before


def test_a_module_that_imports_what_is_missing_is_an_import_error(tree):
    tree("capsule_tree_three.py", "import capsule_no_such_module\n")
    with pytest.raises(ImportError, match="capsule_no_such_module"):
        import_module("capsule_tree_three")
