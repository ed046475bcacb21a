"""Nothing is in a lock that neither the spec, the recipe nor a dependency asks for."""

from __future__ import annotations

import hashlib
from functools import partial

import pytest
from packaging.markers import Marker

from capsule import execution
from capsule.engine.process import ProcessEngine
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock, LockedDebianPackage, LockedProject, LockedWheel
from capsule.experiment.spec import ImageSpec, SourcesSpec
from capsule.image.archives.layers import file_entry, write_tar
from capsule.image.cache import Cache
from capsule.image.closure import check_packages, check_pins
from capsule.image.distribution import DEBIAN_12
from capsule.image.recipe import load_recipe
from capsule.image.resolution.debian import shipped_base
from capsule.image.resolution.project import read_project
from capsule.report.progress import SilentReporter
from tests import refusals
from tests.bundle.locks import make_lock
from tests.image.conftest import Member, build_deb, build_wheel

PURE = {"x.py": b""}


class Maker:
    """Makes packages, puts them into a cache, and locks them."""

    def __init__(self, folder):
        self.folder, self.cache = folder, Cache(folder / "cache")

    def add(self, data):
        digest, path = hashlib.sha256(data).hexdigest(), self.folder / "package"
        path.write_bytes(data)
        self.cache.add(path, digest)
        return digest

    def wheel(self, name, *requires, files=None, requested=None):
        stem = name.replace("-", "_")
        data = build_wheel({f"{stem}.py": b"", **(files or {})}, name=stem, requires=requires)
        return LockedWheel(
            name=name,
            version="1.0",
            filename=f"{stem}-1.0-py3-none-any.whl",
            sha256=self.add(data),
            requested=requested,
        )

    def deb(self, name, relations="", *, requested=False):
        data = build_deb([Member(f"./usr/share/{name}", b"")], name=name, relations=relations)
        return LockedDebianPackage(
            name=name,
            version="1.0-1",
            architecture="all",
            pool=f"pool/main/x/x/{name}_1.0-1_all.deb",
            size=len(data),
            sha256=self.add(data),
            requested=requested,
        )

    def lock(self, *wheels, packages=("asked",), **image) -> Lock:
        """Lock a spec that asks for packages, by a recipe that is not Capsule's."""
        lock = make_lock(wheels=wheels, image=ImageSpec(packages=packages))
        return lock.model_copy(update={"image": lock.image.model_copy(update=image)})


@pytest.fixture
def made(tmp_path):
    return Maker(tmp_path)


refused = partial(refusals.refused, "CAP-I306", status=ExitCode.TAMPERED)


def test_dependencies_are_followed_with_their_markers_and_extras(made):
    asked = made.wheel(
        "asked",
        "Needed.One>=1",
        "windows; sys_platform == 'win32'",
        "old; python_version < '3.8'",
        "with-extra[fast]",
        "unwanted; extra == 'docs'",
        requested="asked",
    )
    wheels = [asked, made.wheel("needed-one", "deep"), made.wheel("deep", "asked")]
    wheels += [made.wheel("with-extra", "speed; extra == 'fast'"), made.wheel("speed")]
    assert check_packages(made.lock(*wheels), made.cache, debian=False).startup == ()
    for name in ("windows", "old", "unwanted", "numpy-speedups"):
        lock = made.lock(*wheels, made.wheel(name))
        message = refused(check_packages, lock, made.cache, debian=False)
        assert (
            f"no requirement asks for its wheel {name.replace('-', '_')}-1.0-py3-none-any.whl"
            in message
        )


def test_an_extra_of_the_spec_asks_for_more(made):
    wheels = (
        made.wheel("asked", "speed; extra == 'fast'", requested="asked[fast]"),
        made.wheel("speed"),
    )
    check_packages(made.lock(*wheels, packages=("asked[fast]",)), made.cache, debian=False)
    refused(check_packages, made.lock(*wheels), made.cache, debian=False)


def test_each_marker_is_evaluated_once_for_each_extra(made, monkeypatch):
    """A chain of extras of one package, each of which asks for the next."""
    needs = [f"asked[e{number + 1}]; extra == 'e{number}'" for number in range(20)]
    asked = made.wheel("asked", *needs, "last; extra == 'e20'", requested="asked[e0]")
    evaluated, original = [], Marker.evaluate
    monkeypatch.setattr(
        Marker,
        "evaluate",
        lambda marker, known: evaluated.append(marker) or original(marker, known),
    )
    lock = made.lock(asked, made.wheel("last"), packages=("asked[e0]",))
    check_packages(lock, made.cache, debian=False)
    # For 21 extras and none, and once more to find what is usual.
    assert len(evaluated) <= 21 * 22 * 2


def test_what_nobody_asked_for_is_refused_before_an_engine_gets_it(made, monkeypatch):
    """The audit's S4: the spec as published, beside it a wheel with a ``.pth`` file."""
    prepared = []
    monkeypatch.setattr(ProcessEngine, "prepare", lambda *_, **__: prepared.append(True))
    arguments = {"sources": SourcesSpec(), "reporter": SilentReporter()}
    asked = made.wheel("asked", requested="asked")
    evil = made.wheel("numpy-speedups", files={"evil.pth": b"import numpy_speedups"})
    lock = made.lock(asked, evil)
    refused(execution.prepare, lock, ProcessEngine(), made.cache, **arguments)
    assert prepared == []
    execution.prepare(made.lock(asked), ProcessEngine(), made.cache, **arguments)
    assert prepared == [True]


def test_a_source_tree_is_never_taken_for_a_package(made, monkeypatch):
    """A tree whose last file is a wheel: its archive can be read as that wheel, from the end."""
    monkeypatch.setattr(execution, "fetch", lambda *_, **__: None)  # no index has such a wheel
    monkeypatch.setattr(ProcessEngine, "prepare", lambda *_, **__: None)
    wheel = build_wheel({"asked.py": b"print('score 500')"}, name="asked")
    tree = made.folder / "tree.tar"
    with tree.open("wb") as stream:
        write_tar([file_entry("project/data.bin", "test", wheel)], stream.write)
    facts, digest = read_project(tree)
    project = LockedProject(sha256=digest, size=tree.stat().st_size, files=facts, git=None)
    genuine = made.wheel("asked", requested="asked")
    arguments = {"sources": SourcesSpec(), "project": tree, "reporter": SilentReporter()}
    for asked in (genuine, genuine.model_copy(update={"sha256": digest})):
        lock = made.lock(asked).model_copy(update={"project": project})
        if asked is genuine:
            execution.prepare(lock, ProcessEngine(), made.cache, **arguments)
            continue
        with pytest.raises(CapsuleError) as caught:
            execution.prepare(lock, ProcessEngine(), made.cache, **arguments)
        assert caught.value.code == "CAP-I103"
        assert not made.cache.has(digest)


def test_what_every_start_executes_is_reported(made):
    nested = {"asked/data.pth": b"", "asked/sitecustomize.py": b""}  # no start looks there
    asked = made.wheel("asked", "helper", requested="asked", files=nested)
    helper = made.wheel("helper", files={"helper-nspkg.pth": b"import helper"})
    found = check_packages(made.lock(asked, helper), made.cache, debian=False)
    assert found.startup == ("helper 1.0: helper-nspkg.pth",)
    assert found.besides == ("asked 1.0", "helper 1.0")


def test_a_plugin_that_importing_torch_executes_is_reported(made):
    asked = made.wheel("asked", "helper", "tool", requested="asked")
    plugin = {"helper-1.0.dist-info/entry_points.txt": b"[torch.backends]\nx = helper:start\n"}
    scripts = {"tool-1.0.dist-info/entry_points.txt": b"[console_scripts]\nx = tool:main\n"}
    wheels = [asked, made.wheel("helper", files=plugin), made.wheel("tool", files=scripts)]
    found = check_packages(made.lock(*wheels), made.cache, debian=False)
    assert found.startup == ("helper 1.0: torch.backends",)


@pytest.mark.parametrize(
    "path",
    ["asked.abi3.so", "asked/__init__.py", "asked.cpython-311-x86_64-linux-gnu.so", "asked.pyc"],
)
def test_a_module_that_is_imported_in_place_of_another_wheels_is_refused(made, path):
    asked = made.wheel("asked", "helper", requested="asked", files={"asked/part.py": b""})
    lock = made.lock(asked, made.wheel("helper", files={path: b""}))
    with pytest.raises(CapsuleError) as caught:
        check_packages(lock, made.cache, debian=False)
    assert caught.value.code == "CAP-I109"
    assert "are one module" in caught.value.message
    beside = made.wheel("helper", files={path.replace("asked", "asked/more"): b""})
    check_packages(made.lock(asked, beside), made.cache, debian=False)  # a part of its own


@pytest.mark.parametrize(
    "path",
    [
        "sitecustomize.py",
        "usercustomize/__init__.py",
        "apport_python_hook.py",  # imported by the sitecustomize.py of Debian's own interpreter
        "helper-1.0.data/platlib/apport_python_hook.abi3.so",
        "sitecustomize.cpython-311-x86_64-linux-gnu.so",
        "helper-1.0.data/purelib/usercustomize.py",
        "helper-1.0.data/data/lib/python3.11/dist-packages/sitecustomize.py",
        "helper-1.0.data/scripts/python3.11",
        "helper-1.0.data/scripts/python",
    ],
)
def test_a_wheel_that_changes_every_start_must_be_named_by_the_spec(made, path):
    asked = made.wheel("asked", "helper", requested="asked")
    helper = made.wheel("helper", files={path: b""})
    lock = made.lock(asked, helper)
    assert "does not name" in refusals.refused(
        "CAP-I307", check_packages, lock, made.cache, debian=False, status=ExitCode.TAMPERED
    )
    named = helper.model_copy(update={"requested": "helper"})
    lock = made.lock(asked, named, packages=("asked", "helper"))
    name = path.rpartition("/")[2]
    assert check_packages(lock, made.cache, debian=False).startup == (f"helper 1.0: {name}",)


def test_pins_are_compared_with_the_spec(made):
    asked = made.wheel("asked", requested="asked")
    check_pins(made.lock(asked))
    check_pins(made.lock(asked, packages=("asked", "absent; sys_platform == 'win32'")))
    assert "it pins nothing for 'absent'" in refused(
        check_pins, made.lock(asked, packages=("asked", "absent"))
    )
    other = asked.model_copy(update={"requested": "asked==99.0"})
    assert "it pins 1.0 for 'asked==99.0'" in refused(
        check_pins, made.lock(other, packages=("asked==99.0",))
    )
    assert "the spec asks for" in refused(check_pins, made.lock(made.wheel("asked")))
    assert "twice" in refused(check_pins, made.lock(asked, asked))


@pytest.mark.parametrize(
    "text",
    [
        "asked @ file:///etc/passwd",
        "asked; 'a' ~= 'b'",
        "asked ==",
        "asked; extra == 1",
        f"asked; {'(' * 1_500}os_name == 'posix'{')' * 1_500}",
    ],
)
def test_a_strangers_requirements_may_be_anything(made, text):
    asked = made.wheel("asked", requested=text)
    refused(check_pins, made.lock(asked, packages=(text,)))


@pytest.fixture
def with_debian(made):
    """Lock what the recipe asks for, with relations of a name, and further Debian packages."""

    def work(*packages, asked=("tool",), **relations):
        recipe = load_recipe("cpu", "debian-12")
        base = [each.model_copy() for each in shipped_base(DEBIAN_12).packages]
        for index, each in enumerate(base):
            base[index] = made.deb(each.name, relations.get(each.name, ""), requested=True)
        wheels = [made.wheel(text.partition(">")[0]) for text in recipe.packages]
        image = ImageSpec(packages=(), debian=asked)
        lock = make_lock(wheels=tuple(wheels), packages=(*base, *packages), image=image)
        facts = {"recipe_sha256": recipe.digest()}
        return lock.model_copy(update={"image": lock.image.model_copy(update=facts)})

    return work


def test_debian_packages_are_the_specs_or_dependencies_of_them(made, with_debian):
    tool = made.deb("tool", "Depends: libx (>= 1), mail-agent | other\n", requested=True)
    libx, agent = (
        made.deb("libx", "Pre-Depends: liby\n"),
        made.deb("exim", "Provides: mail-agent\n"),
    )
    packages = tool, libx, agent, made.deb("liby")
    check_packages(with_debian(*packages), made.cache, debian=True)
    lock = with_debian(*packages, made.deb("evil"))
    assert "Debian package evil" in refused(check_packages, lock, made.cache, debian=True)
    check_packages(lock, made.cache, debian=False)  # the layer comes from elsewhere


@pytest.mark.parametrize(
    ("asked", "relation"),
    [("libc6", ""), ("tool", "Depends: libc6 (>= 3)\n"), ("tool", "Breaks: libc6 (<< 3)\n")],
)
def test_a_replaced_package_of_the_base_brings_its_dependencies(made, with_debian, asked, relation):
    tool = made.deb("tool", relation, requested=asked == "tool")
    extra = () if asked == "libc6" else (tool,)
    packages = *extra, made.deb("libnew")
    relations = {"libc6": "Depends: libnew\n", "dash": "Depends: evil\n"}
    check_packages(with_debian(*packages, asked=(asked,), **relations), made.cache, debian=True)
    # No package of the spec has to do with dash, so nothing has replaced it.
    lock = with_debian(*packages, made.deb("evil"), asked=(asked,), **relations)
    assert "Debian package evil" in refused(check_packages, lock, made.cache, debian=True)


def test_debian_pins_are_compared_with_spec_and_recipe(made, with_debian):
    tool = made.deb("tool", requested=True)
    for packages, asked, reason in (
        ((), ("tool",), "pins nothing for the Debian package tool"),
        ((tool,), (), "no requirement asks for its Debian package tool"),
        ((tool, tool), ("tool",), "pins a Debian package twice"),
        ((made.deb("tool"),), ("tool",), "requested of the Debian package tool is wrong"),
    ):
        lock = with_debian(*packages, asked=asked)
        wheels = tuple(
            each.model_copy(
                update={"version": "99", "filename": each.filename.replace("1.0", "99")}
            )
            for each in lock.image.wheels
        )
        lock = lock.model_copy(update={"image": lock.image.model_copy(update={"wheels": wheels})})
        assert reason in refused(check_pins, lock)


def test_a_package_of_two_kinds_is_none(tiny):
    """An index of wheels must not bring what is taken for a package of Debian."""
    tiny.debs[0] += build_wheel(PURE)
    with pytest.raises(CapsuleError, match="is also a zip archive"):
        tiny.assemble()
