"""The environment of the plain-process engine: made once, of what the lock names, or refused."""

import hashlib
import platform
from pathlib import Path

import pytest

from capsule.engine.environment import environment_key, prepare_environment
from capsule.experiment.canonical import sha256_file
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import LockedDebianPackage
from capsule.image.distribution import DEBIAN_12
from capsule.image.resolution.debian import shipped_base
from tests.engine.conftest import installations
from tests.image.conftest import Member, build_deb

BASE = shipped_base(DEBIAN_12).packages


def test_the_key_covers_what_an_environment_is_made_of(make_lock):
    wheels = [("a", "1" * 64), ("b", "2" * 64)]
    key = environment_key(make_lock(wheels, debian=BASE))
    python = next(each for each in BASE if each.name == "python3.11-minimal")
    changed = python.model_copy(update={"sha256": "3" * 64})
    others = [
        make_lock([("a", "1" * 64), ("b", "3" * 64)], debian=BASE),
        make_lock([("a", "1" * 64), ("c", "2" * 64)], debian=BASE),
        make_lock(wheels[:1], debian=BASE),
        make_lock(wheels, debian=[changed if each is python else each for each in BASE]),
        make_lock(wheels, debian=[each for each in BASE if each is not python]),
        make_lock(wheels, debian=BASE, code="0" * 64),
    ]
    keys = {key, *map(environment_key, others)}
    assert len(keys) == 1 + len(others)
    assert all(len(each) == 64 and int(each, 16) >= 0 for each in keys)


def test_the_key_covers_nothing_else(make_lock):
    lock = make_lock(debian=BASE)
    spec = lock.spec.model_copy(update={"name": "other", "seeds": lock.spec.seeds.model_copy()})
    others = [each for each in BASE if each.name not in DEBIAN_12.python_packages]
    assert 0 < len(others) < len(BASE)
    for same in (
        lock.model_copy(update={"spec": spec}),
        make_lock(debian=[each for each in BASE if each != others[0]]),
        lock.model_copy(update={"image": lock.image.model_copy(update={"base": "1" * 64})}),
    ):
        assert same.digest() != lock.digest()
        assert environment_key(same) == environment_key(lock)


@pytest.mark.parametrize(
    ("libc", "named"),
    [
        (("glibc", "2.35"), "glibc 2.35"),
        (("musl", "2.99"), "musl 2.99"),
        (("", ""), "another C library"),
    ],
)
def test_an_older_c_library_is_refused_before_anything_is_made(
    make_lock, cache, monkeypatch, libc, named
):
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    with pytest.raises(CapsuleError) as refusal:
        prepare_environment(make_lock(), cache, lambda _: None)
    assert refusal.value.code == "CAP-E015"
    assert "needs glibc 2.36" in refusal.value.message
    assert refusal.value.message.endswith(f"this machine has {named}")
    assert "image.base" in refusal.value.fix
    assert not cache.root.exists()


@pytest.mark.parametrize("version", ["2.36", "2.100", "3.0"])
def test_versions_of_c_libraries_are_compared_as_numbers(make_lock, cache, monkeypatch, version):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", version))
    with pytest.raises(CapsuleError, match="CAP-E014"):  # the next check
        prepare_environment(make_lock(code="0" * 64), cache, lambda _: None)


@pytest.fixture
def unusable(tmp_path, cache):
    """A package with the interpreter's name, whose program is none."""
    program = Member("./usr/bin/python3.11", Path("/bin/true").read_bytes(), mode=0o755)
    path = tmp_path / "python.deb"
    path.write_bytes(build_deb([program], name="python3.11-minimal"))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    cache.add(path, sha256)
    return LockedDebianPackage(
        name="python3.11-minimal",
        version="1.0-1",
        architecture="all",
        pool="pool/main/p/python3.11-minimal_1.0-1_all.deb",
        size=path.stat().st_size,
        sha256=sha256,
        requested=True,
    )


@pytest.mark.parametrize("damaged", [False, True])
def test_a_wheel_must_be_in_the_cache_and_be_the_locked_one(
    make_lock, cache, tmp_path, unusable, damaged
):
    (tmp_path / "one.whl").write_bytes(b"one")
    sha256 = hashlib.sha256(b"one").hexdigest()
    if damaged:
        cache.add(tmp_path / "one.whl", sha256).write_bytes(b"two")
    lock = make_lock(wheels=[("one", sha256)], debian=[unusable])
    with pytest.raises(CapsuleError, match=r"one-1-py3-none-any\.whl is missing") as refusal:
        prepare_environment(lock, cache, lambda _: None)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E013", ExitCode.BUILD_FAILED)
    assert str(cache.path(sha256)) in refusal.value.fix
    assert [*(cache.root / "environments").iterdir()] == []


def test_an_interpreter_that_uv_cannot_use_is_refused(make_lock, cache, wheel, unusable):
    notes = []
    with pytest.raises(CapsuleError, match=r"uv cannot make the environment: \w") as refusal:
        prepare_environment(make_lock(wheels=[wheel], debian=[unusable]), cache, notes.append)
    assert (refusal.value.code, installations(notes)) == ("CAP-E015", 1)
    assert "\n" not in refusal.value.message
    assert [*(cache.root / "environments").iterdir()] == []


@pytest.mark.network  # for the packages of the interpreter, unless they are cached
def test_the_environment_is_made_once_and_shared_by_specs_that_differ_in_numbers(lock, cache):
    notes = []
    other = lock.model_copy(
        update={
            "spec": lock.spec.model_copy(
                update={"seeds": lock.spec.seeds.model_copy(update={"root": 7})}
            )
        }
    )
    assert other.digest() != lock.digest()
    for each in (lock, lock, other):
        prepare_environment(each, cache, notes.append)
    assert installations(notes) == 1


@pytest.mark.network  # for the packages of the interpreter, unless they are cached
def test_a_damaged_wheel_is_refused_and_nothing_is_left(lock, cache, wheel):
    cache.path(wheel[1]).write_bytes(b"damaged")
    with pytest.raises(CapsuleError) as refusal:
        prepare_environment(lock, cache, lambda _: None)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E013", ExitCode.BUILD_FAILED)
    assert list((cache.root / "environments").iterdir()) == []


def test_other_code_than_the_locked_is_refused(make_lock, cache):
    with pytest.raises(CapsuleError, match=f"the lock needs {'0' * 64}") as refusal:
        prepare_environment(make_lock(code="0" * 64), cache, lambda _: None)
    assert refusal.value.code == "CAP-E014"
    assert "Use Capsule 1 unchanged" in refusal.value.fix
    assert [*(cache.root / "environments").iterdir()] == []


@pytest.mark.network  # for the packages of the interpreter, unless they are cached
def test_a_wheel_that_does_not_fit_this_machine(make_lock, cache, tmp_path, interpreter):
    path = tmp_path / "broken"
    path.write_bytes(b"not a zip archive")
    digest = sha256_file(path)
    cache.add(path, digest)
    with pytest.raises(CapsuleError) as refusal:
        lock = make_lock(wheels=[("broken", digest)], debian=interpreter)
        prepare_environment(lock, cache, lambda _: None)
    assert refusal.value.code == "CAP-E015"
    assert "broken" in refusal.value.message
