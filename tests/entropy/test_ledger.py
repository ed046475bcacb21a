"""The ledger: computed from facts; whatever is turned off, or not read back, changes its row."""

import json
import re
from pathlib import Path

import pytest

from capsule.entropy.ledger import SOURCES, Ledger, compute_ledger
from capsule.entropy.report import EntropyReport, ProgramReport, Tally
from capsule.experiment.canonical import parse_canonical_json
from capsule.experiment.contract import FIRST_PROCESS, Runtime, StreamProfile, StreamProfiles
from capsule.experiment.spec_file import parse_spec

CPU = {"kind": "cpu", "numerics": "portable-v3"}
GPU = {"kind": "cuda", "cuda": "13.0", "cudnn": ">=9.10", "driver": ">=580"}
PROGRAM = {"command": ["python", "train.py"]}
FLAGS = {
    "environment.PYTHONHASHSEED": "0",
    "environment.OMP_NUM_THREADS": "1",
    "environment.CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "environment.CAPSULE_DETERMINISM": "{}",
    "torch.deterministic_debug_mode": "2",
    "torch.fill_uninitialized_memory": "True",
    "torch.num_threads": "1",
    "torch.cpu_capability": "AVX2",
    "onednn.isa": "Intel AVX2",
    "mkl.branch": "AVX2",
    "torch.cudnn.benchmark": "False",
    "torch.cudnn.allow_tf32": "False",
    "torch.cuda.matmul.allow_tf32": "False",
}


def make_spec(**sections):
    document = {
        "name": "ledger",
        "accelerator": CPU,
        "environment": {"suite": "gymnasium", "id": "CartPole-v1"},
        "trainer": {"algorithm": "dqn", "network": "mlp"},
        **sections,
    }
    if document["trainer"] is PROGRAM:
        del document["environment"]
    return parse_spec(json.dumps(document).encode(), "test")


def make_report(*, program=(), **facts):
    """Return a report with the parts that the ledger reads."""
    one = {"start_bytes_derived": True, "getrandom": Tally(), "devices": Tally(), "unanswered": 0}
    defaults = {
        "mode": "virtual",
        "clock": "system",
        "supervised": True,
        "address_randomization": False,
        "own_numbers": True,
        "first_process": FIRST_PROCESS,
        "programs": (ProgramReport.model_construct(**{**one, **dict(program)}),),
        "coverage": (),
    }
    return EntropyReport.model_construct(**{**defaults, **facts})


STREAMS = StreamProfiles(
    streams=(StreamProfile(name="no-op", seed=0, key="0" * 32, draws=1234, digest="0" * 64),)
)


def treatments(
    *, spec=None, flags=None, report=None, streams=STREAMS, engine="docker", cluster=None
):
    ledger = compute_ledger(
        spec or make_spec(),
        Runtime(flags={**FLAGS, **(flags or {})}, libraries={"torch": "2.13.0"}, device={}),
        make_report() if report is None else report or None,
        streams,
        engine,
        cluster,
    )
    return {row.source: row.treatment for row in ledger.rows}


def test_the_default_run():
    assert treatments() == {
        "Interpreter hash seed": "eliminated",
        "Operating-system entropy": "seeded",
        "Entropy by raw system calls": "seeded",
        "Processor randomness": "assumed",
        "Start bytes of programs": "seeded",
        "Memory addresses": "eliminated",
        "Clocks": "assumed",
        "Random streams": "seeded",
        "Scheduling": "ordered",
        "Torch operators": "eliminated",
        "Uninitialised memory": "eliminated",
        "Maths threads": "ordered",
        "CPU instruction sets": "eliminated",
        "Compute device": "eliminated",
        "cuDNN autotuning": "eliminated",
        "cuBLAS workspace": "eliminated",
        "Reduced GPU precision": "eliminated",
        "Child processes": "eliminated",
        "Batching of inference": "ordered",
        "Seeds of requests": "seeded",
        "Routing of requests": "ordered",
        "Software": "eliminated",
        "Network": "eliminated",
    }


def determinism(**settings):
    return {"spec": make_spec(determinism=settings)}


# What is turned off: the facts that the run then shows, and what becomes of each row.
TURNED_OFF = {
    "hash_seed": (
        {**determinism(hash_seed=None), "flags": {"environment.PYTHONHASHSEED": "random"}},
        {"Interpreter hash seed": "seeded"},  # from the system's entropy, which is virtual
    ),
    "algorithms: warn": (
        {**determinism(algorithms="warn"), "flags": {"torch.deterministic_debug_mode": "1"}},
        {"Torch operators": "assumed"},
    ),
    "algorithms: off": (
        {
            **determinism(algorithms="off"),
            "flags": {
                "torch.deterministic_debug_mode": "0",
                "torch.fill_uninitialized_memory": "False",
            },
        },
        {"Torch operators": "unsupported", "Uninitialised memory": "assumed"},
    ),
    "fill_uninitialized_memory": (
        {
            **determinism(fill_uninitialized_memory=False),
            "flags": {"torch.fill_uninitialized_memory": "False"},
        },
        {"Uninitialised memory": "assumed"},
    ),
    "threads": (determinism(threads=None), {"Maths threads": "unsupported"}),
    "cudnn_benchmark": (
        {**determinism(cudnn_benchmark=True), "flags": {"torch.cudnn.benchmark": "True"}},
        {"cuDNN autotuning": "unsupported"},
    ),
    "cublas_workspace": (determinism(cublas_workspace=None), {"cuBLAS workspace": "unsupported"}),
    "tf32": (
        {**determinism(tf32=True), "flags": {"torch.cudnn.allow_tf32": "True"}},
        {"Reduced GPU precision": "assumed"},
    ),
    "propagation": (determinism(propagation=False), {"Child processes": "assumed"}),
    "batch_invariance": (
        determinism(batch_invariance=False),
        {"Batching of inference": "unsupported"},
    ),
    "request_seeds": (determinism(request_seeds=False), {"Seeds of requests": "unsupported"}),
    "deterministic_routing": (
        determinism(deterministic_routing=False),
        {"Routing of requests": "unsupported"},
    ),
    "entropy.mode": (
        {"spec": make_spec(entropy={"mode": "system"}), "report": make_report(mode="system")},
        {
            "Operating-system entropy": "unsupported",
            "Entropy by raw system calls": "unsupported",
            "Start bytes of programs": "assumed",
        },
    ),
    "entropy.supervised": (
        {
            "spec": make_spec(entropy={"supervised": False}),
            "report": make_report(supervised=False, program={"start_bytes_derived": False}),
        },
        {"Entropy by raw system calls": "assumed", "Start bytes of programs": "assumed"},
    ),
    "entropy.address_randomization": (
        {
            "spec": make_spec(entropy={"address_randomization": True}),
            "report": make_report(address_randomization=True),
        },
        {"Memory addresses": "unsupported"},
    ),
    "entropy.clock: fixed": (
        {"spec": make_spec(entropy={"clock": "fixed"}), "report": make_report(clock="fixed")},
        {"Clocks": "eliminated"},
    ),
    "entropy.clock: virtual": (
        {"spec": make_spec(entropy={"clock": "virtual"}), "report": make_report(clock="virtual")},
        {"Clocks": "ordered"},
    ),
    "entropy.mode: recorded": (
        {"spec": make_spec(entropy={"mode": "recorded"}), "report": make_report(mode="replay")},
        {
            "Operating-system entropy": "recorded",
            "Entropy by raw system calls": "recorded",
            "Start bytes of programs": "recorded",
        },
    ),
    "numerics": (
        {"spec": make_spec(accelerator={"kind": "cpu", "numerics": "native"})},
        {"CPU instruction sets": "assumed"},
    ),
    "a container": ({"engine": "process"}, {"Software": "assumed", "Network": "assumed"}),
    "a GPU instead": (
        {"spec": make_spec(accelerator=GPU)},
        {
            "Compute device": "assumed",
            "CPU instruction sets": "assumed",
            "cuBLAS workspace": "ordered",
        },
    ),
    "a trainer of ours": (
        {"spec": make_spec(trainer=PROGRAM, code={"path": "."}), "streams": None},
        {"Random streams": "seeded", "Scheduling": "assumed"},
    ),
}


@pytest.mark.parametrize(("facts", "changes"), TURNED_OFF.values(), ids=TURNED_OFF)
def test_whatever_is_turned_off_changes_its_rows_and_no_others(facts, changes):
    assert treatments(**facts) == treatments() | changes


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_was_not_read_back_is_only_assumed(name):
    gpu = make_spec(accelerator=GPU) if "CUBLAS" in name else make_spec()
    runtime = Runtime(
        flags={key: value for key, value in FLAGS.items() if key != name}, libraries={}, device={}
    )
    ledger = compute_ledger(gpu, runtime, make_report(), STREAMS, "docker")
    rows = [row for row in ledger.rows if row.evidence == "not read back in this run"]
    assert rows
    assert {row.treatment for row in rows} == {"assumed"}


def test_a_run_without_the_launcher_claims_nothing_of_it():
    found = treatments(report=False)
    assert found["Operating-system entropy"] == "assumed"
    assert found["Entropy by raw system calls"] == "assumed"
    assert found["Memory addresses"] == "assumed"


def test_a_random_hash_seed_is_as_good_as_the_entropy_it_comes_from():
    off = make_spec(determinism={"hash_seed": None}, entropy={"mode": "system"})
    found = treatments(spec=off, report=make_report(mode="system"))
    assert found["Interpreter hash seed"] == "unsupported"


def test_a_setting_that_had_no_effect_is_not_believed():
    found = treatments(report=make_report(mode="system", address_randomization=True))
    assert found["Operating-system entropy"] == "unsupported"
    assert found["Memory addresses"] == "unsupported"
    found = treatments(report=make_report(program={"unanswered": 2}))
    assert found["Entropy by raw system calls"] == "unsupported"
    assert treatments(flags={"torch.num_threads": "2"})["Maths threads"] == "unsupported"


def test_a_network_is_told_by_where_it_leads():
    assert treatments(cluster="docker:2")["Network"] == "eliminated"
    assert treatments(cluster="remote")["Network"] == "assumed"
    assert treatments(engine="process", cluster="remote")["Network"] == "assumed"


def test_the_document_is_canonical_and_says_what_it_rests_on():
    runtime = Runtime(flags=FLAGS, libraries={"torch": "2.13.0"}, device={})
    ledger = compute_ledger(make_spec(), runtime, make_report(), STREAMS, "docker")
    document = parse_canonical_json(ledger.document())
    assert document["schema"] == "capsule/ledger/v1"
    assert Ledger.model_validate_json(ledger.document()) == ledger
    assert all(row.evidence and row.weakened_by for row in ledger.rows)
    assert "1,234 words" in next(r.evidence for r in ledger.rows if r.source == "Random streams")


def test_the_documentation_lists_the_rows_in_their_order():
    page = (Path(__file__).parents[2] / "docs/diagnose.md").read_text()
    section = page.partition("## The ledger")[2]
    rows = re.findall(r"^\| ([A-Za-z][^|]*?) \|", section, re.MULTILINE)
    assert rows == ["source", *(source.name for source in SOURCES)]
