"""Options of ``capsule verify`` that contradict each other, and what the others ask for."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from capsule.bundle.trust import TrustPolicy
from capsule.experiment.errors import CapsuleError
from capsule.experiment.trainers import CommandTrainer
from capsule.verification.request import Expectation, Mode, VerifyRequest, parse_image
from tests.hostile.genuine import SIGNER


@pytest.mark.parametrize(
    ("mode", "challenge", "fresh_seed", "wanted"),
    [
        ("full", None, False, Mode("full")),
        ("prefix:80", None, False, Mode("prefix", steps=80)),
        ("full", None, True, Mode("fresh-seed")),
        ("full", "3", False, Mode("segments", segments=3)),
        ("full", "all", True, Mode("segments")),  # a challenge includes a fresh seed
    ],
)
def test_options_choose_a_mode(mode, challenge, fresh_seed, wanted):
    assert Mode.of_options(mode, challenge, fresh_seed=fresh_seed) == wanted


@pytest.mark.parametrize(
    ("challenge", "fresh_seed", "option"),
    [("3", False, "--challenge"), (None, True, "--fresh-seed"), ("3", True, "--challenge")],
)
def test_a_mode_beside_a_challenge_is_rejected(challenge, fresh_seed, option):
    with pytest.raises(CapsuleError, match=f"CAP-V064 --mode integrity contradicts {option}"):
        Mode.of_options("integrity", challenge, fresh_seed=fresh_seed)


@pytest.mark.parametrize("mode", [Mode("segments"), Mode("fresh-seed")])
def test_the_remedy_for_a_program_that_cannot_be_challenged_is_possible(mode):
    trainer = CommandTrainer(command=("python", "x.py"))
    with pytest.raises(CapsuleError, match=r"CAP-V062 .*a user program") as caught:
        mode.check(SimpleNamespace(spec=SimpleNamespace(trainer=trainer)))
    assert caught.value.fix == "Use --mode full."


def test_trusted_keys_beside_allow_untrusted_are_rejected():
    trusting = TrustPolicy.of([SIGNER.public])
    with pytest.raises(CapsuleError, match="CAP-V006"):
        VerifyRequest(Path("b"), trusting, Mode("full"), allow_untrusted=True)
    assert VerifyRequest(Path("b"), TrustPolicy(), Mode("full"), allow_untrusted=True)
    assert VerifyRequest(Path("b"), trusting, Mode("full"))


def test_an_image_is_rebuilt_embedded_or_pulled():
    assert parse_image("rebuilt", None) == ("rebuilt", None)
    assert parse_image("embedded", None) == ("embedded", None)
    choice, reference = parse_image("rebuilt", "registry.example/a/b:tag")
    assert (choice, str(reference)) == ("registry", "registry.example/a/b:tag")
    with pytest.raises(CapsuleError, match="CAP-V068"):
        parse_image("embedded", "registry.example/a/b:tag")


def test_an_expectation_is_parsed():
    assert Expectation.parse(None, None, None) == Expectation()
    digest = "0123456789abcdef" * 4
    assert Expectation.parse(None, digest, digest) == Expectation(lock=digest, claim=digest)
    for lock, claim, code in (("x", None, "CAP-V058"), (None, "x", "CAP-V043")):
        with pytest.raises(CapsuleError, match=code):
            Expectation.parse(None, lock, claim)
