"""Sentences about a run that several documents need."""

import re
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.evaluation import StartSet
from capsule.experiment.lock import LockedWheel
from capsule.experiment.spec import CudaAccelerator
from capsule.report.facts import (
    claimed_results,
    hardware_needed,
    is_program,
    last_returns,
    lasted,
    machine,
    made,
    reproduced,
    requested,
    results,
    size,
    starts,
    what,
)
from capsule.report.subject import NetworkReturns, claimed_points
from tests.report import runs
from tests.report.conftest import make_report, read

LOCK = runs.make_lock(runs.DQN)


@pytest.mark.parametrize(
    ("evaluation", "made"),
    [
        ({"noop_max": 30}, "of 1 to 30 no-ops"),
        ({"noop_max": 1}, "of 1 no-op"),
        ({}, "ranked by the final network of this run"),
        (
            {"start_set": {"run": "b" * 64}},
            f"of a start set, which names the run {'b' * 64} as its origin",
        ),
    ],
)
def test_starts_are_told_with_what_made_them(subjects, evaluation, made):
    subject = subjects["dqn"]
    spec = subject.lock.spec
    if "start_set" in evaluation:
        evaluation = {"start_set": StartSet.model_construct(**evaluation["start_set"])}
    changed = spec.evaluation.model_copy(update=evaluation)
    lock = subject.lock.model_copy(update={"spec": spec.model_copy(update={"evaluation": changed})})
    told = starts(replace(subject, lock=lock))
    assert f"start sequences {made}, SHA-256 " in told


# --- the subject, changed -----------------------------------------------------------------------


def observed(subject, **facts):
    return replace(subject, observations=subject.observations.model_copy(update=facts))


def specified(subject, **facts):
    spec = subject.lock.spec.model_copy(update=facts)
    return replace(subject, lock=subject.lock.model_copy(update={"spec": spec}))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (80.0, "1 min 20 s"),
        (3600.0 * 20, "1,200 min 0 s"),
    ],
)
def test_the_duration_is_in_minutes_and_whole_seconds(subjects, seconds, expected):
    seen = observed(subjects["dqn"], training_seconds=seconds).observations
    assert lasted(seen) == expected


def test_a_program_is_told_from_a_trainer(subjects):
    kinds = {kind: is_program(subject) for kind, subject in subjects.items()}
    assert kinds == {"dqn": False, "r2d2": False, "impala": False, "own": True}


def test_the_run_is_described_by_steps_algorithm_and_task_or_by_its_command(subjects):
    assert what(subjects["dqn"]) == "400 agent steps of DQN on gymnasium/CartPole-v1"
    assert what(subjects["own"]) == r"the program \`python train.py\`"


def test_the_machine_is_named_and_its_name_is_text(subjects):
    subject = subjects["dqn"]
    assert machine(subject) == "Intel(R) Xeon(R), NVIDIA H200, 16 GiB, debian 12"
    fingerprint = subject.observations.fingerprint
    cpu = fingerprint.cpu.model_copy(update={"name": "[evil](x)"})
    named = fingerprint.model_copy(update={"cpu": cpu})
    assert machine(observed(subject, fingerprint=named)).startswith(r"\[evil\](x), ")


def test_the_hardware_that_is_needed_is_that_of_the_spec(subjects):
    subject = subjects["dqn"]
    limits = subject.lock.spec.limits.model_copy(update={"memory_mb": 4096})
    assert hardware_needed(specified(subject, limits=limits)) == (
        "x86-64, 4,096 MiB of memory; numerics `portable-v3`"
    )


@pytest.mark.parametrize(
    ("gpu", "name"), [(None, "an NVIDIA GPU"), ("NVIDIA H200", "NVIDIA H200"), ("a|b", r"a\|b")]
)
def test_a_gpu_is_needed_with_its_driver(subjects, gpu, name):
    cuda = CudaAccelerator(kind="cuda", cuda="13.0", cudnn="9.10", driver="580.65", gpu=gpu)
    needed = hardware_needed(specified(subjects["dqn"], accelerator=cuda))
    assert f" of memory, {name}, driver 580.65; numerics `portable-v3`" in needed


def test_the_size_is_that_of_all_files(subjects):
    subject = subjects["dqn"]
    (file, *_) = subject.files
    files = tuple(file.model_copy(update={"size": size}) for size in (3 << 19, 1 << 18))
    assert size(replace(subject, files=files)) == "1.8 MiB"


def test_a_small_bundle_has_a_size(subjects):
    subject = subjects["dqn"]
    file = subject.files[0].model_copy(update={"size": 1536})
    assert size(replace(subject, files=(file,))) == "1.5 KiB"


def test_a_program_has_no_starts(subjects):
    assert starts(subjects["own"]) is None


# --- results ------------------------------------------------------------------------------------


def test_the_last_evaluation_is_described():
    points = (NetworkReturns(10, (100.0,)), NetworkReturns(1_000_000, (-1.5, 4.0, 2.0)))
    assert last_returns(LOCK, points) == (
        "at step 1,000,000, mean return 1.5 over 3 starts (lowest -1.5, highest 4)"
    )


def test_one_start_is_written_in_the_singular():
    (point,) = (NetworkReturns(10, (1.0,)),)
    text = "at step 10, mean return 1 over 1 start (lowest 1, highest 1)"
    assert last_returns(LOCK, (point,)) == text


def test_returns_of_several_games_are_described_apart():
    lock = runs.make_lock(runs.POPULATION)
    assert last_returns(lock, (NetworkReturns(640, (-21.0, 40.0, -19.0, 50.0)),)) == (
        "at step 640, pong: mean return -20 over 2 starts (lowest -21, highest -19); "
        "breakout: mean return 45 over 2 starts (lowest 40, highest 50)"
    )


@pytest.mark.parametrize("points", [(), (NetworkReturns(10, (1.0,)), NetworkReturns(20, ()))])
def test_without_returns_there_is_nothing_to_describe(points):
    assert last_returns(LOCK, points) is None


@settings(max_examples=40)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(0, 10**9))
def test_described_returns_are_those_of_the_evaluation(values, step):
    described = last_returns(LOCK, (NetworkReturns(step, tuple(values)),))
    numbers = re.findall(r"-?[\d,.]+(?:e[+-]\d+)?", described.replace(", ", "; "))
    found = [float(number.replace(",", "")) for number in numbers]
    expected = [step, statistics.fmean(values), len(values), min(values), max(values)]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_results_are_returns_or_the_files_of_a_program(subjects):
    dqn, own = subjects["dqn"], subjects["own"]
    returns = "at step 400, mean return 26 over 4 starts (lowest 10, highest 44)"
    assert results(dqn) == claimed_results(dqn.lock, dqn.claims, dqn.evaluation) == returns
    assert results(replace(dqn, evaluation=())) == "no evaluation"
    claimed = "2 files, 5 bytes of standard output"
    assert claimed_results(own.lock, own.claims, ()) == claimed
    assert results(own) == f"{claimed}; each file is claimed by its SHA-256"
    scored = replace(own, evaluation=(NetworkReturns(1, (3.0, 5.0)),))
    assert results(scored) == "at step 1, mean return 4 over 2 starts (lowest 3, highest 5)"


def test_a_program_that_left_nothing_is_not_said_to_claim_files(subjects):
    own = subjects["own"]
    nothing = own.claims.model_copy(update={"outputs": {}, "standard_output": None})
    assert results(replace(own, claims=nothing)).startswith("NOTHING: ")
    assert "SHA-256" not in results(replace(own, claims=nothing))


def test_training_without_an_evaluation_claims_none(subjects):
    lock, claims = subjects["dqn"].lock, subjects["dqn"].claims
    assert claimed_results(lock, claims, ()) == "no evaluation"


def test_a_claimed_return_that_is_not_a_number_is_refused(subjects):
    claims = subjects["dqn"].claims
    points = (claims.evaluation.points[0].model_copy(update={"returns": ("one",)}),)
    bad = claims.evaluation.model_copy(update={"points": points})
    with pytest.raises(CapsuleError) as caught:
        claimed_points(claims.model_copy(update={"evaluation": bad}))
    assert (caught.value.code, caught.value.exit_code) == ("CAP-P103", ExitCode.TAMPERED)


# --- files and re-executions --------------------------------------------------------------------


def with_roles(subject, *roles):
    (file, *_) = subject.files
    files = tuple(
        file.model_copy(update={"path": f"f{number}", "role": role})
        for number, role in enumerate(roles)
    )
    return replace(subject, files=files)


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (["claims", "checkpoint", "output", "trace"], ["f1", "f2"]),
        (["output"] * 5, ["f0", "f1", "f2", "f3", "f4"]),
        (["output"] * 6, ["f0", "f1", "f2", "f3", "f4", "manifest.json"]),
        (["claims"], ["manifest.json"]),
    ],
)
def test_few_files_are_named_and_the_manifest_lists_many_or_none(subjects, roles, expected):
    assert made(with_roles(subjects["dqn"], *roles)) == expected


def test_what_is_known_of_re_executions_is_the_story(bundles, subjects, saved):
    (report,) = saved(make_report(subjects["dqn"]))
    assert reproduced(subjects["dqn"]).startswith("Signed, not reproduced yet. The bundle is")
    known = reproduced(read(bundles["dqn"], report))
    assert known.startswith("An unsigned report says: reproduced, bit for bit. According to")


def test_requested_packages_are_listed_by_name_with_their_versions(subjects):
    subject = subjects["dqn"]
    wheels = tuple(
        LockedWheel(
            name=name,
            version=version,
            filename=f"{name}-{version}-py3-none-any.whl",
            sha256="0" * 64,
            requested=requirement,
        )
        for name, version, requirement in (
            ("torch", "2.13.0+cu130", "torch==2.13.0"),
            ("sympy", "1.14.0", None),  # a dependency
            ("numpy", "2.4.6", "numpy>=2"),
        )
    )
    image = subject.lock.image.model_copy(update={"wheels": wheels})
    lock = subject.lock.model_copy(update={"image": image})
    assert requested(replace(subject, lock=lock)) == "numpy 2.4.6, torch 2.13.0+cu130"
    assert requested(subject) == ""
