"""Documents that gain fields: stored ones keep their bytes, their digests and their meaning."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from capsule.experiment.canonical import canonical_json
from capsule.experiment.fields import Model, added
from capsule.experiment.lock import Lock
from tests.bundle.locks import make_lock

ROOT = Path(__file__).parents[2]


class Inner(Model):
    kept: int = 1


class NewInner(Inner):
    kept: int = 2  # another default than at first
    more: int = added(absent=0, description="Came later.")
    other: str = added(absent="as before", default="better")


class Outer(Model):
    schema_id: str = Field("outer/v1", alias="schema")
    one: Inner = Inner()
    several: tuple[Inner, ...] = ()
    named: dict[str, Inner]


class NewOuter(Outer):
    one: NewInner = NewInner()
    several: tuple[NewInner, ...] = ()
    named: dict[str, NewInner]


inner = st.builds(Inner, kept=st.integers(0, 9))
outer = st.builds(
    Outer, one=inner, several=st.tuples(inner, inner), named=st.dictionaries(st.text("ab"), inner)
)


@given(outer)
def test_what_was_stored_before_keeps_its_bytes(stored):
    found = NewOuter.parse(stored.document())
    assert found.document() == stored.document()
    assert {each.other for each in (found.one, *found.several, *found.named.values())} == {
        "as before"
    }


def test_a_new_document_has_the_new_defaults_and_says_so():
    document = json.loads(
        NewOuter(several=(NewInner(more=3, other="as before"),), named={}).document()
    )
    assert document["one"] == {"kept": 2, "other": "better"}
    assert document["several"] == [{"kept": 2, "more": 3}]
    assert NewOuter.parse(canonical_json(document)).several[0].other == "as before"


def test_outside_of_stored_documents_an_absent_field_gets_the_default():
    assert NewInner.model_validate_json("{}").other == "better"
    assert NewInner.parse(b'{"kept":1}').other == "as before"
    with pytest.raises(ValidationError):
        NewInner.parse(b'{"kept":"1"}')
    assert NewInner.model_validate_json("{}").other == "better"  # a failure leaves nothing behind


def test_the_schema_names_both_values():
    field = NewInner.model_json_schema()["properties"]["other"]
    assert (field["default"], field["absent"]) == ("better", "as before")


CHANGED = """
import importlib.abc, importlib.util, sys
from pathlib import Path

NAME = "capsule.experiment.trainers.dqn"

class Changed(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == NAME else None
    def get_filename(self, name):
        return str(Path(sys.argv[1], "capsule/experiment/trainers/dqn.py"))
    def get_data(self, path):
        text = Path(path).read_text()
        old = "    discount: Probability = Field(0.99, "
        new = "    novelty: int = added(absent=0, default=7)\\n" + old.replace("0.99", "0.5")
        text = text.replace("    Model,\\n", "    Model,\\n    added,\\n", 1)
        changed = text.replace(old, new, 1)
        assert changed.count("added(") == 1 and "\\n    added,\\n" in changed
        return changed.encode()

sys.meta_path.insert(0, Changed())
from capsule.experiment.lock import Lock
from capsule.experiment.trainers import DqnTrainer

stored = sys.stdin.buffer.read()
lock = Lock.parse(stored)
assert lock.document() == stored
assert (lock.spec.trainer.novelty, DqnTrainer(algorithm="dqn").novelty) == (0, 7)
assert (lock.spec.trainer.discount, DqnTrainer(algorithm="dqn").discount) == (0.99, 0.5)
print(lock.digest())
"""


def test_a_lock_keeps_its_digest_when_a_field_is_added_and_a_default_changes():
    lock = make_lock()
    done = subprocess.run(
        [sys.executable, "-c", CHANGED, str(ROOT)],
        input=lock.document(),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    assert done.stdout.decode().strip() == lock.digest(), done.stderr.decode()
    assert Lock.parse(lock.document()) == lock


@pytest.mark.parametrize(
    "value", [[], {}, (1,), Inner(), b"", object()], ids=lambda value: type(value).__name__
)
def test_what_is_left_out_is_a_scalar(value):
    with pytest.raises(TypeError, match="not a scalar of JSON"):
        added(absent=value)
    with pytest.raises(TypeError, match="not a scalar of JSON"):
        added(absent=None, default=value)
    for scalar in (None, True, 1, 0.5, "text"):
        added(absent=scalar, default=scalar)


def test_keys_of_documents_are_strings():
    class Numbered(Model):
        numbered: dict[int, Inner]

    with pytest.raises(TypeError, match="not a string, as keys of documents are: 1"):
        Numbered(numbered={1: Inner()}).document()
