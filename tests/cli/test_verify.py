"""``capsule verify``: what is rejected before the bundle is opened, and on every machine."""

import json
from pathlib import Path

import pytest

from capsule.verification.execution import admission
from tests.cli.conftest import capsule

CORPUS = Path(__file__).parents[1] / "corpus"
OF_MACHINES = [("--engine", "podman"), ("--gpu", "0")]
OF_EXECUTIONS = [
    ("--image", "embedded"),
    ("--pull", "registry.example/capsule:1"),
    ("--base", "supplied"),
    ("--code", "supplied"),
    ("--data", "levels=levels"),
    ("--limit", "minutes=10"),
]
GRADE = ("--grade", "statistical")


@pytest.mark.parametrize(
    ("mode", "option"),
    [
        *(("integrity", option) for option in (*OF_MACHINES, *OF_EXECUTIONS, GRADE)),
        *(("environment", option) for option in (*OF_EXECUTIONS, GRADE)),
        *((mode, GRADE) for mode in ("prefix:240", "segments:3", "fresh-seed")),
    ],
)
def test_an_option_that_the_mode_would_ignore_is_rejected(mode, option):
    done = capsule("verify", "no.capsule.tar", "--allow-untrusted", "--mode", mode, *option)
    assert done.exit_code == 2
    assert f"CAP-X005: {option[0]} has no effect with --mode {mode}\n" in done.stderr
    assert f"fix: Remove {option[0]}. It is for" in done.stderr


@pytest.mark.parametrize(
    "whole", [("--image", "embedded"), ("--pull", "registry.example/capsule:1")]
)
def test_a_base_layer_for_an_image_that_is_taken_as_a_whole_is_rejected(whole):
    words = ("--allow-untrusted", "--base", "supplied", *whole)
    done = capsule("verify", "no.capsule.tar", *words)
    assert done.exit_code == 2
    assert "CAP-X005: --base has no effect with --" in done.stderr


def test_a_passphrase_without_a_receipt_to_sign_is_rejected(tmp_path):
    words = ("--allow-untrusted", "--passphrase-file", tmp_path / "phrase")
    done = capsule("verify", "no.capsule.tar", *words)
    assert done.exit_code == 2
    assert "CAP-X005: --passphrase-file has no effect with a verification without" in done.stderr


@pytest.mark.parametrize("challenge", [("--challenge", "1"), ("--fresh-seed",)])
def test_a_run_that_can_never_be_challenged_is_rejected_without_an_engine(monkeypatch, challenge):
    monkeypatch.setattr(admission, "open_engine", lambda *_, **__: pytest.fail("it was opened"))
    words = ("--key", CORPUS / "author.pub", *challenge, "--report", "/dev/null", "--json")
    done = capsule("verify", CORPUS / "program.capsule.tar", *words)
    assert done.exit_code == 2
    assert json.loads(done.stdout)["code"] == "CAP-V062"
