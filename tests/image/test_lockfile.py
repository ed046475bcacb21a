"""The lock file beside a spec: read, kept while its pins fit, and written anew."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule import __version__
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock, LockedWheel
from capsule.experiment.spec import ImageSpec, SourcesSpec
from capsule.experiment.versions import satisfies
from capsule.host.cuda import cuda_versions
from capsule.host.spec_file import parse_spec
from capsule.image import lockfile
from capsule.image.assembly.making import ASSEMBLER_VERSION
from capsule.image.cache import Cache
from capsule.image.code import training_code_digest
from capsule.image.distribution import DEBIAN_12
from capsule.image.lockfile import (
    MAX_LOCK_BYTES,
    MAX_SHOWN,
    Pins,
    capture,
    find_pins,
    lock_path,
    locked_image,
    names_lock,
    obtain_lock,
    pins_fit,
    read_lock,
    resolve,
    write_lock,
)
from capsule.image.recipe import recipe_for
from capsule.image.resolution.debian import shipped_base
from capsule.image.resolution.sources import machine_sources
from capsule.image.resolution.tasks import check_packages
from tests.image.conftest import SPEC
from tests.image.package_index import CUDA, make_spec

DEBIAN = shipped_base(DEBIAN_12).packages
PROGRAM = b"""\
schema: capsule/spec/v1
name: own
code: {path: tree}
trainer: {command: [python, train.py]}
"""


def wheel(name):
    filename = f"{name}-1.0-py3-none-any.whl"
    return LockedWheel(name=name, version="1.0", filename=filename, sha256="a" * 64)


def spec_of(*overrides, document=SPEC):
    return parse_spec(document, "tiny", list(overrides))


def lock_of(spec, wheels=("old",), base="b" * 64, **image):
    pins = Pins(tuple(map(wheel, wheels)), DEBIAN, base)
    locked = locked_image(recipe_for(spec), pins, base).model_copy(update=image)
    return Lock(spec=spec, image=locked)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.lock.json"


@pytest.fixture
def resolved(monkeypatch):
    """Have packages resolved to 'new', without a package index; what was asked for."""
    asked = []

    def resolve_wheels(_spec, own, _cache, _progress):
        asked.append(own)
        return (wheel("new"),)

    def resolve_debian(*_arguments, refresh_base, progress):
        asked.append(refresh_base)
        return DEBIAN

    monkeypatch.setattr(lockfile, "resolve_wheels", resolve_wheels)
    monkeypatch.setattr(lockfile, "resolve_debian", resolve_debian)
    return asked


@pytest.fixture
def obtain(path, cache):
    """Return a function that obtains the lock of a spec: the lock, and what was said."""

    def obtained(spec, **options):
        said = []
        return obtain_lock(spec, path, cache, progress=said.append, **options), said

    return obtained


def packages(lock):
    return [each.name for each in lock.image.wheels]


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "lock"),
    [
        ("x.yaml", "x.lock.json"),
        ("deep/x.yml", "deep/x.lock.json"),
        ("x.json", "x.lock.json"),
        ("v1.2.yaml", "v1.2.lock.json"),
        ("x", "x.lock.json"),
    ],
)
def test_a_lock_is_beside_its_spec(spec, lock):
    assert lock_path(Path(spec)) == Path(lock)
    assert names_lock(Path(lock))


@pytest.mark.parametrize(
    ("name", "is_lock"),
    [("runs/x/lock.json", True), ("x.yaml", False), ("lock.yaml", False), ("xlock.json", False)],
)
def test_a_lock_is_known_by_its_name(name, is_lock):
    assert names_lock(Path(name)) is is_lock


def test_a_lock_is_read_as_it_was_written(path):
    lock = lock_of(spec_of())
    write_lock(path, lock)
    assert path.read_bytes() == lock.document() + b"\n"
    assert read_lock(path) == lock
    path.write_bytes(lock.document())
    assert read_lock(path) == lock


@pytest.mark.parametrize("size", [None, 0, MAX_LOCK_BYTES, MAX_LOCK_BYTES + 1])
def test_a_file_that_cannot_be_a_lock_is_refused(path, size):
    if size is None:
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, size)
    reasons = {None: "Is a directory", MAX_LOCK_BYTES + 1: "larger than 4 MiB"}
    code = "CAP-L001" if size in reasons else "CAP-L002"
    with pytest.raises(CapsuleError) as caught:
        read_lock(path)
    assert (caught.value.code, caught.value.exit_code) == (code, ExitCode.USAGE)
    assert caught.value.message.startswith(f"lock file {path}: {reasons.get(size, '')}")
    assert "capsule lock" in caught.value.fix


def test_a_missing_lock_is_refused(path):
    with pytest.raises(CapsuleError, match="No such file") as caught:
        read_lock(path)
    assert caught.value.code == "CAP-L001"
    assert caught.value.fix == "Name an existing lock file, or make one with 'capsule lock'."
    path.touch()
    with pytest.raises(CapsuleError, match="Not a directory") as below:
        read_lock(path / "x.lock.json")
    assert (below.value.code, below.value.fix) == ("CAP-L001", caught.value.fix)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"capsule/lock/v1", b"capsule/lock/v2", "schema: Input should be 'capsule/lock/v1'"),
        (b'"assembler":', b'"assembler":"x', "JSON"),
        (b'"recipe":"cpu"', b'"recipe":"tpu"', "image.recipe: "),
        (b'"discount":0.99', b'"discount":1.5', "trainer"),
        (b'{"image":', b'{"extra":1,"image":', "extra: Extra inputs"),
        (b'{"image":', b'{ "image":', "canonical"),
        (b',"project":null', b"", "omits a field"),
        (b"\n", b"\n\n", "canonical"),
    ],
)
def test_what_is_wrong_with_a_lock_is_named(path, old, new, reason):
    document = lock_of(spec_of()).document() + b"\n"
    assert old in document
    path.write_bytes(document.replace(old, new, 1))
    with pytest.raises(CapsuleError) as caught:
        read_lock(path)
    assert caught.value.code == "CAP-L002"
    assert str(path) in caught.value.message
    assert reason in caught.value.message


def test_the_packages_of_trainers_are_checked_before_anything_is_made(cache, monkeypatch):
    pins = Pins((wheel("old"),), DEBIAN, None)
    monkeypatch.setattr(lockfile, "check_packages", check_packages)
    monkeypatch.setattr(lockfile, "find_pins", lambda *_, **__: pins)
    with pytest.raises(CapsuleError) as caught:
        resolve(spec_of(), cache, progress=lambda _: None)
    assert caught.value.code == "CAP-L112"


@given(noise=st.binary(max_size=40))
def test_no_noise_is_a_lock(tmp_path_factory, noise):
    place = tmp_path_factory.getbasetemp() / "noise.lock.json"
    place.write_bytes(noise)
    with pytest.raises(CapsuleError, match="CAP-L002"):
        read_lock(place)


# --- pins -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "fit"),
    [
        ("seeds.root=7", True),
        ("trainer.discount=0.98", True),
        ("determinism.hash_seed=1", True),
        ("image.sources.index=https://example.org/simple", True),
        ("image.packages=[torch]", False),
        ("image.debian=[hello]", False),
        ("image.base=debian-13", False),
        ("accelerator={kind: cuda, cuda: '13.0', cudnn: '>=9', driver: '>=580'}", False),
        ("accelerator.numerics=native", False),
    ],
)
def test_pins_fit_the_same_image_on_the_same_accelerator(override, fit):
    lock = lock_of(spec_of())
    assert pins_fit(lock, spec_of())
    assert pins_fit(lock, spec_of(override)) is fit


def test_pins_of_another_recipe_do_not_fit():
    assert not pins_fit(lock_of(spec_of(), recipe_sha256="0" * 64), spec_of())


def test_pins_that_fit_are_kept_and_others_are_resolved(cache, resolved):
    lock = lock_of(spec_of())
    kept = find_pins(spec_of("seeds.root=7"), cache, previous=lock, progress=print)
    assert kept == Pins((wheel("old"),), DEBIAN, "b" * 64)
    assert resolved == []
    found = find_pins(spec_of("image.packages=[x]"), cache, previous=lock, progress=print)
    assert found == Pins((wheel("new"),), DEBIAN, None)
    assert find_pins(spec_of(), cache, progress=print) == found
    assert resolved == [recipe_for(spec_of()).packages, False] * 2


def test_a_base_layer_by_other_rules_of_assembly_is_not_kept(cache, resolved):
    old = lock_of(spec_of(), assembler=ASSEMBLER_VERSION - 1)
    assert find_pins(spec_of(), cache, previous=old, progress=print).base is None
    # The shipped list of packages comes with the digest of its layer.
    assert resolve(spec_of(), cache, previous=old, progress=print).image.base != "b" * 64
    assert resolved == []


def test_a_locked_image_has_the_rules_and_the_code_of_this_capsule():
    recipe = recipe_for(spec_of())
    image = locked_image(recipe, Pins((wheel("a"),), DEBIAN[:1], None), "c" * 64)
    assert (image.recipe, image.recipe_sha256) == ("cpu", recipe.digest())
    assert (image.wheels, image.debian, image.base) == ((wheel("a"),), DEBIAN[:1], "c" * 64)
    assert (image.code.version, image.code.sha256) == (__version__, training_code_digest())
    assert image.assembler == ASSEMBLER_VERSION


# --- obtaining a lock -----------------------------------------------------------------------------


def test_a_lock_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CapsuleError, match=r"x\.lock\.json' cannot be written") as caught:
        write_lock(tmp_path / "file" / "x.lock.json", lock_of(spec_of()))
    assert caught.value.code in {"CAP-X003", "CAP-X004"}


def test_a_new_lock_that_cannot_be_written_is_found_before_packages_are_resolved(
    tmp_path, cache, resolved
):
    (tmp_path / "file").touch()
    with pytest.raises(CapsuleError, match=r"x\.lock\.json' cannot be written") as caught:
        obtain_lock(spec_of(), tmp_path / "file" / "x.lock.json", cache, progress=print)
    assert "Copy the spec to a folder that you may write to" in caught.value.fix
    assert resolved == []


def test_a_lock_that_could_not_be_read_again_is_not_made(obtain, path, resolved, monkeypatch):
    lock, _ = obtain(spec_of())
    size = len(lock.document())
    monkeypatch.setattr(lockfile, "MAX_LOCK_BYTES", size + 1)
    assert obtain(spec_of())[0] == read_lock(path) == lock
    monkeypatch.setattr(lockfile, "MAX_LOCK_BYTES", size)
    path.unlink()
    with pytest.raises(CapsuleError, match=rf"CAP-L204 the lock would have {size:,} bytes"):
        obtain(spec_of())
    assert not path.exists()


def test_a_new_lock_is_written_once(obtain, path, resolved):
    lock, said = obtain(spec_of())
    assert said == [f"wrote {path}"]
    assert read_lock(path) == lock
    assert packages(lock) == ["new"]
    before = path.stat().st_ino
    assert obtain(spec_of()) == (lock, [])
    assert path.stat().st_ino == before
    assert len(resolved) == 2


def test_everything_but_the_pins_follows_the_spec(obtain, path, resolved):
    old = lock_of(spec_of())
    code = old.image.code.model_copy(update={"sha256": "0" * 64})
    write_lock(path, lock_of(spec_of(), code=code))
    lock, said = obtain(spec_of("seeds.root=7"))
    assert (lock.spec.seeds.root, packages(lock)) == (7, ["old"])
    assert lock.image.code.sha256 == training_code_digest()
    assert said == [f"wrote {path}"]
    assert read_lock(path) == lock
    assert resolved == []


def test_a_lock_of_another_image_is_resolved_anew(obtain, path, resolved):
    write_lock(path, lock_of(spec_of()))
    assert packages(obtain(spec_of("image.packages=[x]"))[0]) == ["new"]


@pytest.mark.parametrize(
    ("options", "base_refreshed"), [({"refresh": True}, False), ({"refresh_base": True}, True)]
)
def test_pins_are_resolved_again_if_it_is_asked_for(
    obtain, path, resolved, options, base_refreshed
):
    write_lock(path, lock_of(spec_of()))
    assert packages(obtain(spec_of(), **options)[0]) == ["new"]
    assert resolved[1] is base_refreshed


@pytest.mark.parametrize("exists", [False, True])
def test_nothing_is_written_if_it_is_not_asked_for(obtain, path, resolved, exists):
    if exists:
        write_lock(path, lock_of(spec_of()))
    before = [(each, each.read_bytes()) for each in path.parent.glob("*.json")]
    lock, said = obtain(spec_of("seeds.root=7"), write=False)
    assert (lock.spec.seeds.root, said) == (7, [])
    assert [(each, each.read_bytes()) for each in path.parent.glob("*.json")] == before


def test_a_damaged_lock_stays_unless_it_is_refreshed(obtain, path, resolved):
    path.write_bytes(b"damaged")
    with pytest.raises(CapsuleError, match="CAP-L002"):
        obtain(spec_of())
    assert path.read_bytes() == b"damaged"
    lock, _ = obtain(spec_of(), refresh=True)
    assert read_lock(path) == lock


def test_a_data_set_that_changed_is_pinned_again_only_if_that_is_asked_for(obtain, path, resolved):
    digits = path.with_name("digits.txt")
    digits.write_text("1")
    spec = spec_of(f"data.digits.path={digits.name}")
    before, _ = obtain(spec)
    digits.write_text("2")
    with pytest.raises(CapsuleError, match="the data set 'digits' has changed") as caught:
        obtain(spec, refresh=True)
    assert caught.value.code == "CAP-L308"
    assert read_lock(path) == before
    after, _ = obtain(spec, refresh_data=True)
    assert after.data != before.data


def test_sources_are_no_part_of_a_lock(obtain, path, resolved):
    obtain(spec_of("image.sources.index=https://example.org/simple"))
    assert b"example.org" not in path.read_bytes()


def test_another_platform_resolves_nothing(cache, monkeypatch, resolved):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(CapsuleError, match="on aarch64") as caught:
        resolve(spec_of(), cache, progress=print)
    assert caught.value.code == "CAP-E019"
    assert resolved == []


@pytest.mark.slow
def test_lock_is_deterministic_and_names_no_place(torch_machine):
    machine = torch_machine
    for name, version in {"pydantic": "2.12", "rfc8785": "0.1.4", "xxhash": "3.6"}.items():
        machine.publish(name, version)
    spec = make_spec("torch==2.13.0", find_links=[str(machine.folder)])
    first = resolve(spec, machine.cache, progress=lambda _: None)
    fresh = Cache(machine.cache.root.with_name("fresh"))
    assert resolve(spec, fresh, progress=lambda _: None) == first
    document = first.document().decode()
    for place in ("://", "file:", str(machine.folder), str(machine.index)):
        assert place not in document
    assert [package.name for package in first.image.debian] == sorted(
        package.name for package in first.image.debian
    )
    assert cuda_versions((wheel.name, wheel.version) for wheel in first.image.wheels) == {}


@pytest.mark.network
@pytest.mark.parametrize("accelerator", [None, CUDA], ids=["cpu", "cuda"])
def test_real_packages_lock(tmp_path, accelerator):
    spec = make_spec(*ImageSpec().packages, accelerator=accelerator)
    lock = resolve(spec, Cache(tmp_path), progress=lambda _: None)
    names = {wheel.name for wheel in lock.image.wheels}
    assert {"torch", "numpy", "gymnasium", "ale-py", "pydantic", "rfc8785", "xxhash"} <= names
    sources = machine_sources(SourcesSpec())
    for place in ("://", "file:", *sources.extra_indexes, *sources.find_links):
        assert place not in lock.document().decode()
    libraries = cuda_versions((wheel.name, wheel.version) for wheel in lock.image.wheels)
    assert set(libraries) == ({"CUDA", "cuDNN", "cuBLAS"} if accelerator else set())
    if accelerator:
        assert satisfies(libraries["CUDA"], "13.0")
        assert not any("+cpu" in wheel.version for wheel in lock.image.wheels)


# --- source trees ---------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """A source tree, with a lock, its spec, a data set, and a file of another run in it."""
    folder = tmp_path / "tree"
    (folder / "digits").mkdir(parents=True)
    names = ["train.py", "own.lock.json", "own.yaml", "own.yml", "own.json", "other.yaml"]
    for name in (*names, "digits/1.txt", "bundle.tar"):
        (folder / name).write_text(name)
    return folder


def captured(tree, cache, *leave_out, spec=PROGRAM):
    said = []
    own = spec.replace(b"path: tree", b"path: .")
    document = spec_of(document=own)
    found = capture(document, tree / "own.lock.json", cache, said.append, leave_out)
    return found, said


def test_a_spec_without_code_has_no_source_tree(path, cache):
    assert capture(spec_of(), path, cache, print) is None


def test_a_spec_under_another_suffix_is_no_part_of_the_tree(tree, cache, resolved):
    (tree / "own.spec").write_text("own.spec")
    document = spec_of(document=PROGRAM.replace(b"path: tree", b"path: ."))
    (tree / "own.lock.json").unlink()
    lock = obtain_lock(
        document,
        tree / "own.lock.json",
        cache,
        leave_out=[tree / "own.spec"],
        progress=lambda _: None,
    )
    assert "own.spec" not in lock.project.files


def test_the_lock_and_its_spec_are_no_part_of_the_tree(tree, cache):
    project, said = captured(tree, cache, tree / "bundle.tar")
    assert project.files.keys() == {"train.py", "other.yaml", "digits/1.txt"}
    assert said == []  # outside of git, nothing is untracked


def test_data_sets_of_the_spec_are_no_part_of_the_tree(tree, cache):
    spec = PROGRAM + b"data: {digits: {path: digits}, more: {url: https://example.org/x}}\n"
    project, _ = captured(tree, cache, spec=spec)
    assert project.files.keys() == {"train.py", "other.yaml", "bundle.tar"}


@pytest.mark.parametrize(
    ("more", "end"), [(0, ""), (MAX_SHOWN - 3, ""), (MAX_SHOWN, " and 3 more")]
)
def test_files_that_git_does_not_track_are_listed(tree, cache, more, end):
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    words = (["init", "--quiet"], ["add", "train.py"], ["commit", "--quiet", "-m", "first"])
    for line in words:
        subprocess.run(["git", *author, *line], cwd=tree, check=True)
    for number in range(more):
        (tree / f"x{number:03}").touch()
    _, (said,) = captured(tree, cache)
    names = ["bundle.tar", "digits/1.txt", "other.yaml", *(f"x{n:03}" for n in range(more))]
    listed = ", ".join(names[:MAX_SHOWN])
    assert said == f"the source tree includes files that git does not track: {listed}{end}"
