"""Bundles of runs that nobody ran, and what is read of them."""

import json
from pathlib import Path

import pytest

from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import generate, load_private, load_public
from capsule.bundle.receipts import Detail, VerificationPolicy, make_statement, write_receipt
from capsule.experiment.canonical import sha256_hex
from capsule.machine.compare import compare
from capsule.machine.kind import MachineKind
from capsule.report.subject import read_subject
from capsule.verification.verdict import (
    Cause,
    Divergence,
    DivergenceMap,
    Explanation,
    ReplicaResults,
    Report,
    TraceDifference,
)
from tests.report import runs

COMPONENTS = ("streams", "observations", "minibatch", "loss", "parameters")


@pytest.fixture(scope="session")
def bundles(tmp_path_factory) -> dict[str, Path]:
    """One bundle of each kind of trainer."""
    kinds = {"dqn": runs.DQN, "r2d2": runs.R2D2, "impala": runs.POPULATION, "own": runs.PROGRAM}
    return {
        name: runs.pack(tmp_path_factory.mktemp(name), document) for name, document in kinds.items()
    }


def read(bundle: Path, *files: Path, trusted=True, others=()):
    keys = [load_public(bundle.parent / "alice.pub"), *others] if trusted else []
    with open_bundle(bundle, keys) as opened:
        return read_subject(opened, bundle.name, files, keys)


@pytest.fixture(scope="session")
def subjects(bundles):
    """What is read of each bundle, without reports and receipts."""
    return {kind: read(bundle) for kind, bundle in bundles.items()}


def make_report(subject, verdict="reproduced-bitwise", **facts) -> Report:
    """Return what ``capsule verify`` reports on another machine."""
    machine = runs.MACHINE
    processor = machine.cpu.model_copy(update={"vendor": "AuthenticAMD", "name": "AMD EPYC"})
    here = machine.model_copy(update={"cpu": processor})
    usual = {
        "bundle": subject.bundle,
        "mode": "full",
        "verdict": verdict,
        "summary": "the re-execution reproduced every claim, bit for bit",
        "claim_id": subject.claims.claim_id(),
        "integrity": True,
        "environment": compare(machine, here, subject.lock.spec),
        "replica": ReplicaResults(evaluation=runs.evaluation(), divergence=divergence()),
    }
    return Report(**{**usual, **facts})


def divergence(**differing) -> DivergenceMap:
    return DivergenceMap(
        steps=runs.STEPS, components={name: differing.get(name, ()) for name in COMPONENTS}
    )


def different(subject) -> Report:
    """Return the report of a re-execution that differs from step 200 on."""
    returns = {step: tuple(value / 2 for value in row) for step, row in runs.RETURNS.items()}
    return make_report(
        subject,
        "not-reproduced",
        summary="the runs first differ at step 200, in the loss",
        first_difference=TraceDifference(step=200, component="loss", claimed="aa", found="ab"),
        replica=ReplicaResults(
            evaluation=runs.evaluation(returns),
            divergence=divergence(loss=((200, 200), (300, 400)), parameters=((200, 400),)),
        ),
        divergence=Divergence(
            a="bundle",
            b="re-execution",
            equal=False,
            causes=(
                Cause(
                    name="arithmetic",
                    certainty="likely",
                    evidence=("Minibatches are equal.", "Tensors were computed." * 20),
                    fix="Use a portable profile.",
                ),
            ),
            explanations=(
                Explanation(what="cpu.flags", a="avx2", b="avx512f", why="other kernels"),
            ),
        ),
    )


def write(path: Path, report: Report) -> Path:
    path.write_text(json.dumps(report.model_dump(mode="json", by_alias=True)))
    return path


@pytest.fixture
def saved(tmp_path):
    """A function that writes reports as files named ``N.json``, and returns their paths."""

    def save(*reports):
        return [write(tmp_path / f"{n}.json", report) for n, report in enumerate(reports, start=1)]

    return save


@pytest.fixture
def receipt(bundles, tmp_path):
    """A function that signs a receipt on the DQN run, and returns its path and the key."""

    author = bundles["dqn"].parent / "alice.pub"

    def vouch(name, verdict="reproduced-bitwise", claim=None, machine="AMD EPYC", mode="full"):
        exists = (tmp_path / name).exists()
        key = load_public(tmp_path / f"{name}.pub") if exists else generate(tmp_path / name)
        kind = MachineKind(
            processor="AuthenticAMD 25/1",
            processor_name=machine,
            instructions=("avx2",),
            gpu=None,
            system="debian 12",
            engine="docker",
        )
        detail = Detail(
            verdict=verdict,
            expected="bitwise",
            policy=VerificationPolicy(mode=mode, own_code=True, tolerance=None),
            signers=(load_public(author).fingerprint,),
            machine=kind,
            difference=None,
        )
        with open_bundle(bundles["dqn"], []) as opened:
            manifest = sha256_hex(opened.manifest.document())
        claim = claim or read(bundles["dqn"]).claims.claim_id()
        statement = make_statement(claim, manifest, "2026-11-21T12:00:00Z", detail)
        path = tmp_path / f"{name}.receipt.json"
        return write_receipt(statement, load_private(tmp_path / name), path, path), key

    return vouch
