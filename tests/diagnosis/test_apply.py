"""Writing settings into a spec file."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.diagnosis.apply import apply_patch, patch_of, patched
from capsule.diagnosis.findings import CATALOGUE, finding
from capsule.diagnosis.settings import described
from capsule.experiment.errors import CapsuleError
from capsule.host.spec_file import parse_spec

ROOT = Path(__file__).parents[2]
SPEC = """\
# What I try
schema: capsule/spec/v1
name: mine   # short
image:
  packages:
    - torch==2.13.0  # with CUDA
    - "numpy==2.4.6"
environment: {suite: gymnasium, id: CartPole-v1}
trainer: {algorithm: dqn, network: mlp, total_steps: 20_000_000}
determinism:
  # too slow otherwise
  algorithms: off  # really?

entropy: {mode: system}
"""


def refuse(path, data):
    raise PermissionError(13, "Permission denied")


def test_a_patch_holds_what_errors_and_warnings_ask_for():
    found = [finding("CAP-D105", ""), finding("CAP-D202", ""), finding("CAP-D107", "")]
    assert patch_of(found) == {"determinism.algorithms": "error", "determinism.hash_seed": 0}
    assert patch_of([finding("CAP-D302", "", level="note")]) == {}


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_patch_is_a_field_of_the_spec_and_is_named_in_its_effect(code):
    for remedy in CATALOGUE[code].remedies:
        setting = {remedy.field: remedy.value}
        assert described(setting) in remedy.effect
        assert parse_spec(patched(SPEC, setting).encode(), "patched")


def test_comments_order_and_notation_survive():
    patch = {"determinism.algorithms": "error", "entropy.mode": "virtual"}
    expected = SPEC.replace("algorithms: off  #", "algorithms: error #")
    assert patched(SPEC, patch) == expected.replace("mode: system", "mode: virtual")
    assert patched(SPEC, {}) == SPEC


@pytest.mark.parametrize("path", sorted((ROOT / "specs").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_shipped_spec_only_gains_lines(path):
    before = path.read_text()
    after = patched(before, {"entropy.clock": "fixed", "determinism.hash_seed": 0})
    assert set(before.splitlines()) <= set(after.splitlines())
    assert parse_spec(after.encode(), path.name).entropy.clock == "fixed"


PATCHES = [
    (remedy.field, remedy.value) for entry in CATALOGUE.values() for remedy in entry.remedies
]


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(PATCHES)))
def test_patching_is_idempotent(patches):
    once = patched(SPEC, dict(patches))
    assert patched(once, dict(patches)) == once


def test_a_file_is_patched_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    apply_patch(path, {"entropy.mode": "virtual"})
    assert "mode: virtual" in path.read_text()
    before = path.read_text()
    with pytest.raises(CapsuleError) as caught:
        apply_patch(path, {"entropy.mode": "no such mode"})
    assert caught.value.code == "CAP-S003"
    assert path.read_text() == before
    monkeypatch.setattr("capsule.diagnosis.apply.write_atomic", refuse)
    with pytest.raises(CapsuleError) as caught:
        apply_patch(path, {"entropy.mode": "recorded"})
    assert caught.value.code == "CAP-D004"
    assert path.read_text() == before


def test_a_spec_that_names_a_file_is_patched(tmp_path):
    start_set = {
        "schema": "capsule/starts/v1", "run": "a" * 64, "task": "CartPole-v1",
        "full_action_set": False, "candidates": 1000, "shortlist": 250,
        "min_actions": 55, "max_actions": 95, "starts": [[1]],
    }  # fmt: skip
    (tmp_path / "starts.json").write_text(json.dumps(start_set))
    path = tmp_path / "spec.yaml"
    path.write_text(f"{SPEC}evaluation: {{starts: 1, start_set: starts.json}}\n")
    apply_patch(path, {"entropy.mode": "virtual"})
    assert "mode: virtual" in path.read_text()
    assert "start_set: starts.json" in path.read_text()


def test_a_comment_that_cannot_be_kept_is_refused_and_nothing_is_lost(tmp_path):
    text = SPEC.replace("name: mine   # short", "name: # short\n  mine\n")
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(CapsuleError) as caught:
        apply_patch(path, {"seeds.root": 2})
    assert caught.value.code == "CAP-D004"
    assert path.read_text() == text


def test_a_spec_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CapsuleError) as caught:
        apply_patch(tmp_path / "none.yaml", {})
    assert caught.value.code == "CAP-S001"
