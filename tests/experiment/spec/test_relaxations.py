"""Relaxations: every setting that is weaker than the default is named, and no other."""

import pytest

from capsule.experiment.spec import DeterminismSpec, calendar_clock, relaxations
from tests.experiment.specs import CUDA, DQN, IMPALA, PROGRAM, R2D2, make_spec

WEAKER = {
    "hash_seed": None,
    "propagation": False,
    "threads": None,
    "cores": None,
    "sorted_listings": False,
    "algorithms": "warn",
    "fill_uninitialized_memory": False,
    "cudnn_benchmark": True,
    "tf32": True,
    "cublas_workspace": None,
    "batch_invariance": False,
    "request_seeds": False,
    "deterministic_routing": False,
}


def named(document=DQN, **changes):
    return relaxations(make_spec(document, **changes))


@pytest.mark.parametrize("document", [DQN, R2D2, IMPALA, PROGRAM], ids=lambda each: each["name"])
def test_the_defaults_relax_nothing(document):
    assert named(document) == []
    assert named(document, accelerator=CUDA) == []


def test_every_switch_is_tried():
    assert set(WEAKER) == set(DeterminismSpec.model_fields)


@pytest.mark.parametrize(("name", "value"), WEAKER.items())
def test_a_layer_that_is_off_is_declared(name, value):
    assert named(determinism={name: value}) == [f"determinism.{name}={value}"]


@pytest.mark.parametrize(
    "choice",
    [{"hash_seed": 42}, {"threads": 2}, {"cores": 1}, {"cores": 64}, {"cublas_workspace": ":16:8"}],
)
def test_another_fixed_value_is_no_relaxation(choice):
    assert named(determinism=choice) == []


def test_relaxations_are_named():
    loose = {"algorithms": "warn", "tf32": True}
    assert named(determinism=loose) == ["determinism.algorithms=warn", "determinism.tf32=True"]
    assert named(determinism={"algorithms": "off"}) == ["determinism.algorithms=off"]


def test_layers_are_named_in_alphabetical_order_before_the_other_sections():
    found = named(
        PROGRAM,
        determinism=dict(reversed(WEAKER.items())),
        entropy={"mode": "system", "clock": "system", "supervised": False},
        trainer={"outputs": ["*", "!*.log"], "standard_output": False},
    )
    layers = [f"determinism.{name}={value}" for name, value in sorted(WEAKER.items())]
    assert found == [
        *layers,
        "entropy.clock=system",
        "entropy.mode=system",
        "entropy.supervised=False",
        "trainer.outputs=!*.log",
        "trainer.standard_output=False",
    ]


@pytest.mark.parametrize(
    ("entropy", "expected"),
    [
        ({"mode": "system"}, ["entropy.mode=system"]),
        ({"mode": "recorded"}, []),
        (
            {"mode": "recorded", "on_exhaustion": "virtual"},
            ["entropy.on_exhaustion=virtual"],
        ),
        ({"mode": "virtual", "on_exhaustion": "virtual"}, []),  # nothing can be exhausted
        ({"seed": 9}, []),
        ({"supervised": False}, ["entropy.supervised=False"]),
        ({"address_randomization": True}, ["entropy.address_randomization=True"]),
    ],
)
def test_randomness_that_may_reach_the_run_is_a_relaxation(entropy, expected):
    assert named(entropy=entropy) == expected


def test_what_is_not_claimed_is_a_relaxation():
    found = named(PROGRAM, trainer={"outputs": ["*", "!*.log"], "standard_output": False})
    assert found == ["trainer.outputs=!*.log", "trainer.standard_output=False"]


@pytest.mark.parametrize(
    ("document", "given", "clock"),
    [
        (PROGRAM, None, "virtual"),
        (PROGRAM, "virtual", "virtual"),
        (PROGRAM, "fixed", "fixed"),
        (PROGRAM, "system", "system"),
        (DQN, None, "system"),
        (DQN, "virtual", "virtual"),
        (IMPALA, "fixed", "fixed"),
    ],
)
def test_the_clock_of_a_program_is_virtual_unless_the_spec_says_otherwise(document, given, clock):
    spec = make_spec(document, entropy={"clock": given})
    assert calendar_clock(spec) == clock


def test_only_a_program_may_depend_on_the_machines_clock():
    assert named(PROGRAM, entropy={"clock": "system"}) == ["entropy.clock=system"]
    assert named(DQN, entropy={"clock": "system"}) == []
