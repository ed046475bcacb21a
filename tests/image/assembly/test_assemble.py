import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import pytest

from capsule.experiment.canonical import parse_canonical_json, sha256_file, sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.variables import environment_variables
from capsule.image.archives.layers import EPOCH, file_entry, write_tar
from capsule.image.assembly import assemble as module
from capsule.image.assembly.assemble import (
    archive_chunks,
    assemble,
    known_identity,
    write_archive,
)
from capsule.image.cache import Cache
from capsule.image.code import training_code_digest
from capsule.image.distribution import DEBIAN_12
from tests import refusals
from tests.image.conftest import CODE, SPEC, TINY_DEB, TINY_WHEEL, Member, build_deb, build_wheel

SITE = DEBIAN_12.site

ROOT = Path(__file__).parents[3]

# The identity of a small image. If it changes, every image of every existing lock changes: that
# takes a new ASSEMBLER_VERSION, unless only the recipe has changed.
GOLDEN = "sha256:2d4eec5a82aa5b23a421c8798f8eb43ca8657fba08d131242a7b6b261d139a77"


refused = partial(refusals.refused, status=ExitCode.BUILD_FAILED)


def layer_files(layer):
    with tarfile.open(layer.path) as archive:
        return {m.name: m.linkname or m.mode for m in archive}


def test_golden_identity(tiny):
    assert tiny.assemble().config_digest == GOLDEN


def test_config_and_manifest_are_canonical_and_agree(tiny):
    image = tiny.assemble()
    config, manifest = parse_canonical_json(image.config), parse_canonical_json(image.manifest)
    assert image.config_digest == f"sha256:{sha256_hex(image.config)}"
    assert image.manifest_digest == f"sha256:{sha256_hex(image.manifest)}"
    assert manifest["config"]["digest"] == image.config_digest
    assert manifest["config"]["size"] == len(image.config)
    assert config["rootfs"]["diff_ids"] == [layer.diff_id for layer in image.layers]
    assert [la["digest"] for la in manifest["layers"]] == config["rootfs"]["diff_ids"]
    assert len(config["history"]) == len(image.layers) == 3
    for layer, described in zip(image.layers, manifest["layers"], strict=True):
        assert layer.diff_id == f"sha256:{sha256_file(layer.path)}"
        assert layer.size == described["size"] == layer.path.stat().st_size
    run = config["config"]
    assert run["Entrypoint"] == ["/usr/bin/python3.11", "-P", "-m", "capsule.training"]
    assert (run["Cmd"], run["User"]) == (["/out"], "61183:61183")
    assert run["Env"] == sorted(run["Env"])
    variables = dict(variable.split("=", 1) for variable in run["Env"])
    assert environment_variables(tiny.lock().spec).items() <= variables.items()
    assert (variables["HOME"], variables["USER"]) == ("/tmp", "capsule")  # noqa: S108
    assert image.reference == f"localhost/capsule/cpu:{image.config_digest[7:19]}"


def test_what_the_layers_hold(tiny):
    base, wheels, code = tiny.assemble().layers
    assert [base.name, wheels.name, code.name] == ["base", "wheels", "code"]
    files = layer_files(base)
    assert files["bin"] == "usr/bin"
    assert files["usr/bin/python"] == files["usr/bin/python3"] == "python3.11"
    assert {"etc/passwd", "etc/group", "etc/nsswitch.conf", "out"} < files.keys()
    assert "var/lib/dpkg/status.d/tiny" in files
    assert f"{SITE}/small/__init__.py" in layer_files(wheels)
    assert not [name for name in layer_files(wheels) if name.endswith((".pyc", ".pyi"))]
    assert {f"{SITE}/{name}" for name in CODE} < layer_files(code).keys()


def test_large_wheels_are_layers_of_their_own(tiny, monkeypatch):
    monkeypatch.setattr(module, "OWN_LAYER_BYTES", 7000)
    noise = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(256))
    tiny.wheels |= {name: build_wheel({f"{name}.bin": noise}, name=name) for name in ("z", "a")}
    assert [layer.name for layer in tiny.assemble().layers] == ["base", "a", "z", "wheels", "code"]


def test_order_within_the_lock_does_not_matter(tiny):
    tiny.debs.append(build_deb([Member("./a")], name="tiny1"))
    tiny.wheels["b"] = build_wheel({"b.py": b""}, name="b")
    first = tiny.assemble()
    lock = tiny.lock()
    image = lock.image.model_copy(
        update={"debian": lock.image.debian[::-1], "wheels": lock.image.wheels[::-1]}
    )
    again = tiny.assemble_lock(lock.model_copy(update={"image": image}))
    assert again.config == first.config


def test_experiments_share_an_image_but_not_across_determinism(tiny):
    first = tiny.assemble()
    tiny.spec = SPEC + b"seeds: {root: 7}\nlimits: {minutes: 3}\n"
    assert tiny.assemble().config == first.config
    tiny.spec = SPEC + b"determinism: {hash_seed: 1}\n"
    assert tiny.assemble().config_digest != first.config_digest


def test_a_second_time_nothing_is_made(tiny):
    told = []
    supplied = {"code": tiny.code_layer}
    first = assemble(tiny.lock(), tiny.cache, supplied=supplied, progress=told.append)
    assert told == [f"assembling layer {name}" for name in ("base", "wheels", "code")]
    before = {layer.path: layer.path.stat().st_mtime_ns for layer in first.layers}
    again = assemble(tiny.lock(), tiny.cache, supplied=supplied, progress=told.append)
    assert again == first
    assert len(told) == 3
    assert {path: path.stat().st_mtime_ns for path in before} == before


VARIANTS = [
    {"umask": 0o077, "TZ": "Pacific/Chatham", "PYTHONHASHSEED": "1", "cwd": "/"},
    {"umask": 0o000, "TZ": "America/St_Johns", "PYTHONHASHSEED": "2", "cwd": "."},
]
SCRIPT = """
import os, sys
from pathlib import Path
from capsule.experiment.lock import Lock
from capsule.image.assembly.assemble import assemble
from capsule.image.cache import Cache
lock = Lock.model_validate_json(Path(sys.argv[1]).read_bytes())
supplied = {"code": Path(sys.argv[3])}
image = assemble(lock, Cache(Path(sys.argv[2])), supplied=supplied, progress=lambda _: None)
print(image.config_digest, image.manifest_digest)
"""


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_identity_in_other_surroundings(tiny, tmp_path, variant):
    image = tiny.assemble()
    lock = tmp_path / "lock.json"
    lock.write_bytes(tiny.lock().document())
    shutil.rmtree(tiny.cache.root / "derived")
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, lock, tiny.cache.root, tiny.code_layer],
        check=True,
        capture_output=True,
        text=True,
        cwd=variant["cwd"],
        umask=variant["umask"],
        env={
            "PYTHONPATH": str(ROOT),
            "TZ": variant["TZ"],
            "PYTHONHASHSEED": variant["PYTHONHASHSEED"],
        },
    )
    assert process.stdout.split() == [image.config_digest, image.manifest_digest]


def interpreters():
    """Find Python 3.11 to 3.13 on this machine; the one that runs the tests is always there."""
    found = {"this": sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in ("3.11", "3.12", "3.13"):
        places = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
        if path := shutil.which(f"python{version}", path="/usr/local/bin:/usr/bin"):
            places.append(Path(path))
        if places:
            found[version] = str(places[0])
    return found


# What turns packages into layers needs the standard library and two libraries without native code.
LAYER_SCRIPT = """
import hashlib, sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from capsule.image.archives.deb import deb_entries
from capsule.image.archives.layers import write_tar
from capsule.image.archives.wheel import open_wheel, wheel_entries
folder, digest = Path(sys.argv[1]), hashlib.sha256()
deb = SimpleNamespace(name="tiny", version="1.0-1", architecture="all", pool="tiny.deb")
wheel = SimpleNamespace(name="small", version="1.0", filename="small.whl")
site = "usr/local/lib/python3.11/dist-packages"
distribution = SimpleNamespace(python="3.11", site=site, interpreter="/usr/bin/python3.11")
with ExitStack() as stack:
    scratch = stack.enter_context(open(folder / f"scratch{sys.hexversion}", "w+b"))
    archive = stack.enter_context(open_wheel(folder / "small.whl", wheel))
    entries = deb_entries(folder / "tiny.deb", deb, scratch)
    entries += wheel_entries(archive, wheel, distribution)
    write_tar(entries, digest.update)
print(digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("python", interpreters().items(), ids=lambda item: item[0])
def test_layers_by_other_pythons(tmp_path, python):
    import packaging
    import rfc8785

    (tmp_path / "tiny.deb").write_bytes(build_deb(TINY_DEB))
    (tmp_path / "small.whl").write_bytes(build_wheel(TINY_WHEEL))
    libraries = tmp_path / "libraries"
    for library in (packaging, rfc8785):
        shutil.copytree(Path(library.__file__).parent, libraries / library.__name__)
    digests = [
        subprocess.run(
            [executable, "-c", LAYER_SCRIPT, tmp_path],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": f"{ROOT}:{libraries}"},
        ).stdout
        for executable in (sys.executable, python[1])
    ]
    assert digests[0] == digests[1]


def test_a_base_layer_of_another_machine(tiny, tmp_path):
    first = tiny.assemble()
    base = shutil.copy(first.layers[0].path, tmp_path / "base.tar")
    shutil.rmtree(tiny.cache.root)
    lock = tiny.lock()
    tiny.cache.path(lock.image.debian[0].sha256).unlink()  # no Debian package is needed
    supplied = {"base": base, "code": tiny.code_layer}
    again = assemble(lock, tiny.cache, supplied=supplied, progress=lambda _: None)
    assert again.config == first.config
    assert again.layers[0].path == base


@pytest.mark.parametrize("position", [100, 512 * 3 + 5, -600])
def test_a_tampered_base_layer_is_refused(tiny, tmp_path, position):
    first = tiny.assemble()
    data = bytearray(first.layers[0].path.read_bytes())
    data[position] ^= 1
    base = tmp_path / "base.tar"
    base.write_bytes(data)
    supplied = {"base": base, "code": tiny.code_layer}
    with pytest.raises(CapsuleError) as refusal:
        assemble(tiny.lock(), tiny.cache, supplied=supplied, progress=lambda _: None)
    assert refusal.value.code in {"CAP-I104", "CAP-I107", "CAP-I110"}


def test_a_base_layer_in_another_form(tiny, tmp_path):
    base = tmp_path / "base.tar"
    with tarfile.open(base, "w") as archive:
        archive.addfile(tarfile.TarInfo("etc/x"))
    supplied = {"base": base, "code": tiny.code_layer}
    message = refused("CAP-I110", assemble, tiny.lock(), tiny.cache, supplied=supplied, progress=id)
    assert "canonical" in message


def test_a_supplied_code_layer_must_hold_the_locked_code(tiny, tmp_path):
    lock, path = tiny.lock(), tmp_path / "other.tar"
    with path.open("wb") as stream:
        changed = CODE | {"capsule/training/__init__.py": b"import evil\n"}
        write_tar([file_entry(f"{SITE}/{n}", "", d) for n, d in changed.items()], stream.write)
    assert training_code_digest(changed) in refused(
        "CAP-I110", assemble, lock, tiny.cache, supplied={"code": path}, progress=id
    )
    os.truncate(path, 65 << 20)
    assert "64 MiB" in refused(
        "CAP-I110", assemble, lock, tiny.cache, supplied={"code": path}, progress=id
    )


def test_only_code_is_taken_from_a_supplied_code_layer(tiny):
    first = tiny.assemble()
    entries = [file_entry(f"{SITE}/{name}", "", data, 0o755) for name, data in CODE.items()]
    path = tiny.folder / "executable.tar"
    with path.open("wb") as stream:
        write_tar(entries, stream.write)
    again = assemble(tiny.lock(), tiny.cache, supplied={"code": path}, progress=id)
    assert again.config == first.config


def changed_image(lock, **changes):
    return lock.model_copy(update={"image": lock.image.model_copy(update=changes)})


def test_locks_of_another_capsule(tiny):
    lock = tiny.lock()
    assert "training code here" in refused("CAP-I102", assemble, lock, tiny.cache, progress=id)
    for change in ({"assembler": 99}, {"recipe_sha256": "0" * 64}):
        other = changed_image(lock, **change)
        assert str(*change.values()) in refused(
            "CAP-I102", assemble, other, tiny.cache, progress=id
        )


def test_own_code(tiny):
    code = tiny.lock().image.code.model_copy(update={"sha256": training_code_digest()})
    image = assemble(changed_image(tiny.lock(), code=code), tiny.cache, progress=id)
    assert f"{SITE}/capsule/experiment/spec/document.py" in layer_files(image.layers[-1])


def test_the_identity_of_an_image_is_known_before_it_is_assembled_again(tiny):
    code = tiny.lock().image.code.model_copy(update={"sha256": training_code_digest()})
    lock = changed_image(tiny.lock(), code=code)
    assert known_identity(lock, tiny.cache) is None
    image = assemble(lock, tiny.cache, progress=id)
    for package in lock.image.debian:
        tiny.cache.path(package.sha256).unlink()
    before = {path: path.stat().st_ctime_ns for path in tiny.cache.root.rglob("*")}
    assert known_identity(lock, tiny.cache) == image.config_digest
    assert {path: path.stat().st_ctime_ns for path in tiny.cache.root.rglob("*")} == before
    (layer,) = (layer for layer in image.layers if layer.name == "wheels")
    layer.path.write_bytes(b"damaged")
    assert known_identity(lock, tiny.cache) is None
    tiny.cache.path(lock.image.wheels[0].sha256).unlink()
    assert known_identity(lock, tiny.cache) is None


def test_the_identity_of_an_image_of_another_capsule_is_not_known_with_any_cache(tiny, tmp_path):
    message = refused("CAP-I102", known_identity, tiny.lock(), Cache(tmp_path / "empty"))
    assert "training code here" in message


@pytest.mark.parametrize("kind", ["debian", "wheels"])
def test_packages_must_be_there_and_be_the_locked_ones(tiny, kind):
    lock = tiny.lock()
    package = getattr(lock.image, kind)[0]
    path = tiny.cache.path(package.sha256)
    path.write_bytes(path.read_bytes() + b"\n")
    assert package.name in refused("CAP-I103", tiny.assemble_lock, lock)
    path.unlink()
    assert "is not in the cache" in refused("CAP-I103", tiny.assemble_lock, lock)


@pytest.mark.parametrize(
    ("member", "code"),
    [
        (Member("./usr/bin/su", mode=0o4755), "CAP-I108"),
        (Member("./../escape"), "CAP-I107"),
        (Member("./etc/passwd", b"root::0:0::/:/bin/sh\n"), "CAP-I109"),
        (Member("./usr/bin/python3", b"not a link"), "CAP-I109"),
    ],
)
def test_refused_packages_leave_nothing(tiny, member, code):
    tiny.debs.append(build_deb([member], name="tiny1"))
    refused(code, tiny.assemble)
    assert not [p for p in tiny.cache.folder("derived").iterdir() if not _complete_pair(p)]
    assert not list(tiny.cache.folder("scratch").iterdir())


def _complete_pair(path):
    return path.with_suffix(".tar").exists() and path.with_suffix(".json").exists()


def test_wheels_that_share_a_path(tiny):
    tiny.wheels["other"] = build_wheel({"small/__init__.py": b"VALUE = 1\n"}, name="other")
    assert tiny.assemble()
    tiny.wheels["other"] = build_wheel({"small/__init__.py": b"VALUE = 2\n"}, name="other")
    message = refused("CAP-I109", tiny.assemble)
    assert "other-1.0-py3-none-any.whl" in message
    assert "small-1.0-py3-none-any.whl" in message


def test_wheels_in_different_layers_that_share_a_path(tiny, monkeypatch):
    monkeypatch.setattr(module, "OWN_LAYER_BYTES", 1)
    tiny.wheels["other"] = build_wheel({"small/__init__.py": b"VALUE = 2\n"}, name="other")
    assert "layer other and layer small" in refused("CAP-I109", tiny.assemble)


def test_archive_is_an_oci_layout_and_a_docker_archive(tiny):
    image = tiny.assemble()
    buffer = io.BytesIO()
    write_archive(image, buffer)
    assert buffer.getvalue() == b"".join(archive_chunks(image))
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as archive:
        assert {member.mtime for member in archive} == {EPOCH}
        files = {name: archive.extractfile(name).read() for name in archive.getnames()}
    for name, data in files.items():
        if name.startswith("blobs/sha256/"):
            assert name == f"blobs/sha256/{sha256_hex(data)}"
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (described,) = json.loads(files["index.json"])["manifests"]
    assert described["digest"] == image.manifest_digest
    assert described["annotations"]["io.containerd.image.name"] == image.reference
    (docker,) = json.loads(files["manifest.json"])
    assert files[docker["Config"]] == image.config
    assert docker["RepoTags"] == [image.reference]
    assert [f"sha256:{sha256_hex(files[name])}" for name in docker["Layers"]] == [
        layer.diff_id for layer in image.layers
    ]


@pytest.mark.parametrize(
    ("have", "left_out"), [([], 0), ([0], 1), ([0, 1], 2), ([1], 0), ([0, 2], 1), ([0, 1, 2], 3)]
)
def test_partial_archives_leave_out_the_bottom_run(tiny, have, left_out):
    image = tiny.assemble()
    data = b"".join(archive_chunks(image, skip={image.layers[i].diff_id for i in have}))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        names = set(archive.getnames())
    blobs = [f"blobs/sha256/{layer.diff_id[7:]}" in names for layer in image.layers]
    assert blobs == [False] * left_out + [True] * (3 - left_out)


@pytest.fixture
def engine():
    import docker
    from docker.errors import DockerException, ImageNotFound

    try:
        client = docker.from_env()
    except DockerException as error:
        pytest.fail(f"no container engine: {error}")
    loaded = []
    yield client, loaded
    for name in loaded:
        try:
            client.images.remove(name, force=True)
        except ImageNotFound:
            continue
    client.close()


def unique(tiny, tmp_path):
    """Give the image of this test layers that no engine has seen."""
    tiny.wheels["once"] = build_wheel({"once.txt": str(tmp_path).encode()}, name="once")
    return tiny.assemble()


@pytest.mark.engine
def test_the_engine_sees_what_was_assembled(tiny, tmp_path, engine):
    client, loaded = engine
    image = unique(tiny, tmp_path)
    loaded.append(image.reference)
    client.images.load(archive_chunks(image))
    seen = client.images.get(image.reference)
    assert seen.id in {image.config_digest, image.manifest_digest}
    assert seen.attrs["RootFS"]["Layers"] == [layer.diff_id for layer in image.layers]
    container = client.containers.create(image.reference)
    try:
        stream, _ = container.get_archive("/usr/share/deep")
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
            (name,) = [m.name for m in archive if m.isfile()]
    finally:
        container.remove()
    assert name.endswith("/ünïcode.txt")


@pytest.mark.engine
def test_the_engine_takes_a_partial_archive(tiny, tmp_path, engine):
    client, loaded = engine
    first = unique(tiny, tmp_path)
    tiny.spec = SPEC + b"determinism: {hash_seed: 4}\n"
    second = tiny.assemble()
    assert first.layers == second.layers
    loaded += [second.reference, first.reference]
    client.images.load(archive_chunks(first))
    partial = b"".join(archive_chunks(second, skip=[layer.diff_id for layer in first.layers]))
    assert len(partial) < 20_000
    client.images.load(partial)
    seen = client.images.get(second.reference)
    assert seen.id in {second.config_digest, second.manifest_digest}


@pytest.mark.engine
def test_the_engine_refuses_a_tampered_layer(tiny, tmp_path, engine):
    from docker.errors import APIError, ImageLoadError, ImageNotFound

    client, loaded = engine
    image = unique(tiny, tmp_path)
    loaded.append(image.reference)
    data = b"".join(archive_chunks(image))
    tampered = data.replace(str(tmp_path).encode(), str(tmp_path).encode()[::-1])
    assert tampered != data
    with pytest.raises((APIError, ImageLoadError, ImageNotFound)):
        client.images.load(tampered)
