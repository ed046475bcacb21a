"""The lock: identity without hosts, paths or dates."""

from pathlib import Path

from capsule.experiment.lock import Lock, LockedWheel, without_sources
from capsule.experiment.spec import CodeSpec
from capsule.host.spec_file import load_spec, parse_spec
from tests.experiment.specs import PROGRAM, make_spec
from tests.locked_images import locked_image

SPECS = Path(__file__).parents[2] / "specs"
SMALL = (SPECS / "dqn-breakout-small.yaml").read_bytes()
ZERO = "0" * 64


def make_lock(spec):
    wheel = LockedWheel(
        name="torch", version="2.13.0", filename="torch-2.13.0-py3-none-any.whl", sha256=ZERO
    )
    return Lock(spec=without_sources(spec), image=locked_image(wheels=(wheel,)))


def test_sources_are_no_part_of_a_lock():
    here = parse_spec(SMALL, "a", ["image.sources.find_links=[/somewhere/wheels]"])
    there = parse_spec(SMALL, "b", ["image.sources.index=https://example.org/simple"])
    assert here.image.sources != there.image.sources
    assert make_lock(here).document() == make_lock(there).document()
    assert b"somewhere" not in make_lock(here).document()


def test_the_place_of_the_code_is_no_part_of_a_lock():
    spec = make_spec(PROGRAM, code={"path": "program", "files": ["*", "!data/*"]})
    assert without_sources(spec).code == CodeSpec()


def test_every_field_of_the_spec_is_part_of_the_identity():
    base = make_lock(parse_spec(SMALL, "a")).digest()
    for change in ("seeds.root=2", "trainer.discount=0.98", "limits.minutes=61"):
        assert make_lock(parse_spec(SMALL, "a", [change])).digest() != base


def test_a_lock_reads_back_as_itself():
    lock = make_lock(load_spec(SPECS / "dqn-breakout.yaml"))
    assert Lock.model_validate_json(lock.document()) == lock
