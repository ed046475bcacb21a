"""Writing settings into a spec file."""

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from capsule.diagnosis.apply import apply_patch, patch_of, patched, set_fields
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


def refuse(*_):
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


def test_line_ends_are_those_of_the_file(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_bytes(SPEC.replace("\n", "\r\n").encode())
    patch = {"determinism.algorithms": "error", "seeds.root": 2}
    apply_patch(path, patch)
    assert path.read_bytes() == patched(SPEC, patch).replace("\n", "\r\n").encode()


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


# --- fields of a document -----------------------------------------------------------------------


def test_fields_are_set_in_sections_that_are_made_if_they_are_missing():
    document = {"name": "mine", "seeds": {"root": 1, "streams": {"minibatch": 5}}}
    set_fields(document, {"seeds.root": 2, "entropy.mode": "virtual", "a.b.c": True, "name": "x"})
    assert document == {
        "name": "x",
        "seeds": {"root": 2, "streams": {"minibatch": 5}},
        "entropy": {"mode": "virtual"},
        "a": {"b": {"c": True}},
    }
    assert list(document) == ["name", "seeds", "entropy", "a"]


FIELDS = st.sampled_from(["name", "seeds.root", "entropy.mode", "entropy.clock", "a.b.c"])
VALUES = st.one_of(st.booleans(), st.integers(), st.sampled_from(["off", "null", "1", "a: b", "#"]))


@settings(max_examples=20)
@given(st.dictionaries(FIELDS, VALUES, max_size=3))
def test_a_patched_document_is_the_document_with_these_fields(patch):
    """A reader that keeps nothing but the values finds them."""
    text = 'name: mine\nentropy: {mode: system}  # why\nwords: ["off", null, 1.50]\n'
    expected = {"name": "mine", "entropy": {"mode": "system"}, "words": ["off", None, 1.5]}
    for field, value in patch.items():
        *sections, key = field.split(".")
        place = expected
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    assert YAML(typ="safe").load(patched(text, patch)) == expected


def test_null_quotes_long_lines_and_the_indentation_of_lists_survive():
    text = (
        "threads: null\n"
        "'name': \"a # b\"\n"
        "packages:\n"
        "    - one\n"
        f"command: {' '.join(['word'] * 200)}\n"
    )  # fmt: skip
    assert patched(text, {"entropy.mode": "virtual"}) == f"{text}entropy:\n  mode: virtual\n"


def test_the_fields_of_a_patch_are_in_order_and_the_last_finding_counts():
    first = finding("CAP-D105", "").model_copy(update={"patch": {"b": 1, "a": 1}})
    second = finding("CAP-D105", "").model_copy(update={"patch": {"b": 2}})
    assert list(patch_of([first, second]).items()) == [("a", 1), ("b", 2)]
    assert patch_of([]) == {}


# --- files that cannot be changed ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("name: [\n", "CAP-S002"),
        (SPEC + "no_such_section: 1\n", "CAP-S003"),
        (SPEC + "evaluation: {starts: 1, start_set: missing.json}\n", "CAP-S010"),
    ],
    ids=["no YAML", "an unknown section", "a missing start set"],
)
def test_a_file_that_is_no_valid_spec_is_refused_and_stays_as_it_was(tmp_path, text, code):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(CapsuleError) as caught:
        apply_patch(path, {"entropy.mode": "virtual"})
    assert caught.value.code == code
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_named_with_the_reason_and_a_remedy(tmp_path, monkeypatch):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    monkeypatch.setattr("capsule.diagnosis.apply.write_atomic", refuse)
    with pytest.raises(CapsuleError) as caught:
        apply_patch(path, {"entropy.mode": "virtual"})
    assert caught.value.code == "CAP-D004"
    assert caught.value.message == f"cannot write spec {path}: Permission denied"
    assert caught.value.fix == "Make it writable, or set the fields by hand."


def test_a_symbolic_link_and_the_permissions_of_a_spec_stay(tmp_path):
    spec, link = tmp_path / "own.yaml", tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    spec.chmod(0o600)
    link.symlink_to(spec.name)
    apply_patch(link, {"entropy.mode": "virtual"})
    assert link.is_symlink()
    assert "mode: virtual" in spec.read_text()
    assert stat.S_IMODE(spec.stat().st_mode) == 0o600


def test_a_spec_that_is_read_only_is_not_replaced(tmp_path, monkeypatch):
    path, opened = tmp_path / "spec.yaml", Path.open
    path.write_text(SPEC)

    def read_only(self, mode="r", *rest, **options):
        """Open a file as the system does for any user but root."""
        return opened(self, mode, *rest, **options) if "+" not in mode else refuse()

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(CapsuleError, match="CAP-D004"):
        apply_patch(path, {"entropy.mode": "virtual"})
    assert path.read_text() == SPEC


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path):
    with pytest.raises(CapsuleError) as caught:
        apply_patch(tmp_path, {})
    assert caught.value.message == f"cannot read spec {tmp_path}: Is a directory"
