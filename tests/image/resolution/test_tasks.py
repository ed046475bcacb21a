"""A misspelt game or id is refused when the spec is locked."""

import importlib.metadata
import io
import json
import zipfile

import gymnasium
import pytest

from capsule.experiment.canonical import sha256_hex
from capsule.experiment.lock import LockedWheel
from capsule.experiment.spec import ImageSpec, Spec
from capsule.host.errors import CapsuleError
from capsule.image.resolution.tasks import check_packages, check_tasks

REGISTRATIONS = """\
from gymnasium.envs.registration import make, register
register(id="CartPole-v0", entry_point="a:B")
register(
    id="CartPole-v1",
    entry_point="a:B",
)
make("Pong-v0")
"""
FILES = {
    "ale-py": {"ale_py/roms/pong.bin": "", "ale_py/roms/klax.bin": "", "ale_py/readme.md": ""},
    "gymnasium": {"gymnasium/envs/__init__.py": REGISTRATIONS},
}


@pytest.fixture
def wheels(tmp_path, cache):
    """A small ale-py and a small Gymnasium, in the cache."""
    locked = []
    for name, files in FILES.items():
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for path, text in files.items():
                archive.writestr(path, text)
        data = buffer.getvalue()
        (tmp_path / name).write_bytes(data)
        cache.add(tmp_path / name, sha256_hex(data))
        filename = f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
        locked.append(
            LockedWheel(name=name, version="1.0", filename=filename, sha256=sha256_hex(data))
        )
    return locked


@pytest.mark.parametrize("missing", ["torch", "numpy", "safetensors", "gymnasium"])
def test_a_package_that_trainers_import_is_not_missing(missing):
    spec = spec_of({"suite": "gymnasium", "id": "CartPole-v1"})
    names = {"torch", "numpy", "safetensors", "gymnasium"}
    pinned = {
        name: LockedWheel(name=name, version="1", filename=f"{name}.whl", sha256="0" * 64)
        for name in names
    }
    check_packages(spec, [*pinned.values()])
    del pinned[missing]
    with pytest.raises(CapsuleError, match=f"packages lack {missing}, which") as caught:
        check_packages(spec, [*pinned.values()])
    assert caught.value.code == "CAP-L112"


def spec_of(environment, *packages):
    network = {"network": "mlp"} if environment["suite"] == "gymnasium" else {}
    document = {
        "schema": "capsule/spec/v1",
        "name": "task",
        "environment": environment,
        "trainer": {"algorithm": "dqn", **network},
        "image": {"packages": [*ImageSpec().packages, *packages]},
    }
    return Spec.model_validate_json(json.dumps(document))


def check(environment, wheels, cache, *packages):
    check_tasks(spec_of(environment, *packages), wheels, cache, lambda _: None)


def test_a_misspelt_game_is_refused_with_those_that_are_near(wheels, cache):
    with pytest.raises(CapsuleError) as raised:
        check({"suite": "atari", "game": "klaxx"}, wheels, cache)
    assert raised.value.code == "CAP-L110"
    assert "environment.game 'klaxx': ale-py 1.0 has no" in raised.value.message
    assert "Did you mean klax?" in raised.value.fix


def test_a_game_of_ale_py_passes_and_one_of_atari_57_needs_no_wheel(wheels, cache):
    check({"suite": "atari", "game": "klax"}, wheels, cache)
    check({"suite": "atari", "game": "breakout"}, [], cache)


@pytest.mark.parametrize("name", ["Cartpole-v1", "CartPole-v2", "Pong-v0"])
def test_an_id_that_gymnasium_does_not_register_is_refused(wheels, cache, name):
    with pytest.raises(CapsuleError) as raised:
        check({"suite": "gymnasium", "id": name}, wheels, cache)
    assert raised.value.code == "CAP-L110"


def test_ids_of_gymnasium_pass_with_and_without_their_version(wheels, cache):
    for name in ("CartPole-v0", "CartPole-v1", "CartPole"):
        check({"suite": "gymnasium", "id": name}, wheels, cache)


def test_ids_that_others_may_register_are_not_refused(wheels, cache):
    check({"suite": "gymnasium", "id": "Mine-v0", "modules": ["mine"]}, wheels, cache)
    for name in ("mine:Mine-v0", "ALE/Pong-v5"):
        check({"suite": "gymnasium", "id": name}, wheels, cache)
    check({"suite": "gymnasium", "id": "Mine-v0"}, wheels, cache, "mine==1.0")


def check_actions(name, locked, cache):
    """Compare the answer with the space of the environment, where this Python can make it."""
    try:
        space = gymnasium.make(name).action_space
    except (gymnasium.error.Error, ImportError):  # needs packages that are not installed
        space = None
    try:
        check({"suite": "gymnasium", "id": name}, locked, cache)
    except CapsuleError as error:
        assert error.code == "CAP-L111"
        assert f"environment.id {name!r} has continuous actions" in error.message
        assert space is None or isinstance(space, gymnasium.spaces.Box)
    else:
        assert not isinstance(space, gymnasium.spaces.Box)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Gymnasium warns of environments that are out of date
def test_the_real_packages_are_read(cache, tmp_path):
    """The wheels are made again of what is installed, with the files that are looked at."""
    locked = []
    for name in ("gymnasium", "ale-py"):
        distribution = importlib.metadata.distribution(name)
        path = tmp_path / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file in distribution.files:
                if file.suffix in (".bin", ".py"):
                    archive.write(distribution.locate_file(file), str(file))
        sha256 = sha256_hex(path.read_bytes())
        cache.add(path, sha256)
        locked.append(LockedWheel(name=name, version="1.0", filename=path.name, sha256=sha256))
    check({"suite": "gymnasium", "id": "LunarLander-v3"}, locked, cache)
    check({"suite": "atari", "game": "adventure"}, locked, cache)
    for name in sorted(set(gymnasium.registry)):
        task = gymnasium.registry[name]
        if task.namespace is None and str(task.entry_point).startswith("gymnasium.envs"):
            check_actions(name, locked, cache)
    with pytest.raises(CapsuleError, match="'LunarLander-v4'"):
        check({"suite": "gymnasium", "id": "LunarLander-v4"}, locked, cache)
