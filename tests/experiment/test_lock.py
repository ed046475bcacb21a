"""The lock: identity without hosts, paths or dates."""

from pathlib import Path

from capsule.experiment.contract import checkpoint_name
from capsule.experiment.lock import Lock, LockedCode, LockedImage, LockedWheel, without_sources
from capsule.experiment.spec import relaxations
from capsule.experiment.variables import environment_variables
from capsule.host.spec_file import load_spec, parse_spec

SPECS = Path(__file__).parents[2] / "specs"
SMALL = (SPECS / "dqn-breakout-small.yaml").read_bytes()
ZERO = "0" * 64


def make_lock(spec):
    wheel = LockedWheel(
        name="torch", version="2.13.0", filename="torch-2.13.0-py3-none-any.whl", sha256=ZERO
    )
    image = LockedImage(
        assembler=1,
        recipe="cpu",
        recipe_sha256=ZERO,
        debian=(),
        base=ZERO,
        wheels=(wheel,),
        code=LockedCode(version="0", sha256=ZERO),
    )
    return Lock(spec=without_sources(spec), image=image)


def test_sources_are_no_part_of_a_lock():
    here = parse_spec(SMALL, "a", ["image.sources.find_links=[/somewhere/wheels]"])
    there = parse_spec(SMALL, "b", ["image.sources.index=https://example.org/simple"])
    assert here.image.sources != there.image.sources
    assert make_lock(here).document() == make_lock(there).document()
    assert b"somewhere" not in make_lock(here).document()


def test_every_field_of_the_spec_is_part_of_the_identity():
    base = make_lock(parse_spec(SMALL, "a")).digest()
    for change in ("seeds.root=2", "trainer.discount=0.98", "limits.minutes=61"):
        assert make_lock(parse_spec(SMALL, "a", [change])).digest() != base


def test_a_lock_reads_back_as_itself():
    lock = make_lock(load_spec(SPECS / "dqn-breakout.yaml"))
    assert Lock.model_validate_json(lock.document()) == lock


def test_relaxations_are_named():
    strict = parse_spec(SMALL, "a")
    assert relaxations(strict) == []
    loose = parse_spec(SMALL, "a", ["determinism.algorithms=warn", "determinism.tf32=true"])
    assert relaxations(loose) == ["determinism.algorithms=warn", "determinism.tf32=True"]


def test_the_variables_follow_the_numerics_profile():
    pinned = environment_variables(parse_spec(SMALL, "a"))
    native = environment_variables(parse_spec(SMALL, "a", ["accelerator.numerics=native"]))
    assert pinned["ATEN_CPU_CAPABILITY"] == "avx2"
    assert "ATEN_CPU_CAPABILITY" not in native
    assert native["PYTHONHASHSEED"] == "0"
    cuda = environment_variables(
        parse_spec(
            SMALL, "a", ["accelerator={kind: cuda, cuda: '13.0', cudnn: '>=9', driver: '>=580'}"]
        )
    )
    assert cuda["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert cuda["NVIDIA_TF32_OVERRIDE"] == "0"


def test_checkpoint_names_sort_by_step():
    assert checkpoint_name(1_000) == "step-000000001000"
    assert checkpoint_name(999_999) < checkpoint_name(20_000_000)
