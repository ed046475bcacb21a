"""Locks of images that were never made."""

from capsule.experiment.canonical import sha256_hex
from capsule.experiment.lock import (
    Lock,
    LockedDebianPackage,
    LockedWheel,
)
from capsule.experiment.spec import GymnasiumEnvironment, Spec
from capsule.experiment.trainers import DqnTrainer
from tests.locked_images import locked_image


def digest_of(name: str) -> str:
    return sha256_hex(name.encode())


def wheel(name, version="1.0", tag="py3-none-any"):
    filename = f"{name.replace('-', '_')}-{version}-{tag}.whl"
    return LockedWheel(name=name, version=version, filename=filename, sha256=digest_of(filename))


def debian(name, version, architecture="amd64"):
    pool = f"pool/main/{name[0]}/{name}/{name}_{version.replace(':', '%3a')}_{architecture}.deb"
    return LockedDebianPackage(
        name=name,
        version=version,
        architecture=architecture,
        pool=pool,
        size=1,
        sha256=digest_of(pool),
        requested=False,
    )


def make_lock(recipe="cpu", wheels=(), packages=(), **spec):
    return Lock(
        spec=Spec(
            name="test",
            environment=GymnasiumEnvironment(suite="gymnasium", id="CartPole-v1"),
            trainer=DqnTrainer(algorithm="dqn", network="mlp"),
            **spec,
        ),
        image=locked_image(
            digest_of("code"),
            recipe=recipe,
            recipe_sha256=digest_of(recipe),
            debian=packages,
            base=digest_of("base"),
            wheels=wheels,
        ),
    )
