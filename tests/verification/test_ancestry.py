"""The ancestry of a population in a bundle: it is what the trace, which is claimed, has of it."""

import json
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from capsule.bundle import run_bundle
from capsule.bundle.bundle import Content, open_bundle, pack
from capsule.bundle.keys import PrivateKey
from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.contract import Ancestry, Generation
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.trainers import ImpalaTrainer, PopulationSpec
from capsule.verification.integrity.consistency import _check_population

RATE = {"learning_rate": (0.1).hex()}


def generation(number, **changes):
    fields = {
        "number": number, "member": number % 2, "parent": None, "step": 20 * number,
        "parent_step": None, "hyperparameters": RATE, "score": None, "rival": None,
        "rival_score": None, "copied": False,
    }  # fmt: skip
    return Generation(**fields | changes)


GENERATIONS = [generation(number) for number in range(3)]


@pytest.fixture
def check(tmp_path):
    """A function that checks a bundle with a trace and an ancestry; None: with neither."""

    def check(traced, listed, population=PopulationSpec()):  # noqa: B008
        lines = [
            json.dumps({"step": 20 * (number + 1), **fields})
            for number, fields in enumerate(traced)
        ]
        names = {run_bundle.RUN + contract.TRACE: "".join(f"{line}\n" for line in lines).encode()}
        if listed is not None:
            document = Ancestry(generations=tuple(listed)).model_dump(mode="json", by_alias=True)
            names[run_bundle.POPULATION] = canonical_json(document)
        files = {name: Content(data, "run", "application/json") for name, data in names.items()}
        claims = Content(b"{}", "claims", "application/json")
        key = PrivateKey(Ed25519PrivateKey.generate())
        path = pack({"claims.json": claims, **files}, sha256_hex(b"{}"), key, tmp_path / "b")
        trainer = ImpalaTrainer(algorithm="impala", population=population)
        lock = SimpleNamespace(spec=SimpleNamespace(trainer=trainer))
        with open_bundle(path, []) as bundle:
            _check_population(SimpleNamespace(lock=lock, bundle=bundle))

    return check


def traced(*groups):
    return [{"generations": {each.name: each.facts() for each in group}} for group in groups]


def test_what_the_trace_has_is_accepted(check):
    check([*traced(GENERATIONS[:2]), {}, *traced(GENERATIONS[2:])], GENERATIONS)


def test_a_trainer_alone_has_none(check):
    check([{}], None, population=None)


@pytest.mark.parametrize(
    "listed",
    [
        GENERATIONS[:2],
        [*GENERATIONS, generation(3)],
        [*GENERATIONS[:2], generation(2, hyperparameters={"learning_rate": (0.2).hex()})],
        [*GENERATIONS[:2], generation(2, parent=1, parent_step=20, rival=1, copied=True)],
        [GENERATIONS[1], GENERATIONS[0], GENERATIONS[2]],
        [],
    ],
)
def test_another_ancestry_is_a_contradiction(check, listed):
    with pytest.raises(CapsuleError, match=run_bundle.POPULATION) as caught:
        check(traced(GENERATIONS), listed)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V010", ExitCode.TAMPERED)


@pytest.mark.parametrize("odd", [[], "generation", 3, None, [["a", "b"]]])
def test_a_trace_that_has_something_else_is_a_contradiction(check, odd):
    with pytest.raises(CapsuleError, match="the ancestry in the trace"):
        check([{"generations": odd}], GENERATIONS)


def test_an_ancestry_that_is_missing_is_refused(check):
    with pytest.raises(CapsuleError) as caught:
        check(traced(GENERATIONS), None)
    assert caught.value.code == "CAP-B144"
