"""The ledger: each row rests on what the run left behind, and changes when that does."""

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from capsule.entropy.evidence import Evidence, is_own
from capsule.entropy.ledger import SOURCES, Ledger, compare_ledgers, compute_ledger
from capsule.entropy.report import RequestTally
from capsule.experiment.arrival_log import NOTHING, ArrivalLog, Messages
from capsule.experiment.canonical import parse_canonical_json
from capsule.experiment.contract import FIRST_PROCESS, PROGRAM_PROCESS, DataRead, StreamProfiles
from capsule.experiment.inference import Inference
from capsule.experiment.lock import LockedData
from capsule.experiment.spec import Spec
from tests.entropy.evidence import (
    FLAGS,
    PROGRAM,
    RUNTIME,
    SERIAL,
    STREAMS,
    SURROUNDINGS,
    TORCH_FLAGS,
    TRAINER,
    executed,
    make_interpreters,
    make_mechanisms,
    make_report,
    told,
)

ARRIVALS = ArrivalLog(waits={"mail~1": Messages(sources=("a",), order=(0, NOTHING, 0))})
READ = DataRead(sets={"mnist": LockedData(sha256="0" * 64, files=2, size=9)})
ANSWERED = Inference(
    rows=16, independent=False, tested_rows=16, replicas=2, requests=480, own_row=480,
    own_stream=480,
)  # fmt: skip
CUDA = SERIAL.model_copy(update={"device": "cuda:0"})


def judged(evidence):
    return {row.source: row.treatment for row in compute_ledger(evidence).rows}


def evidence_of(evidence, source):
    return next(row.evidence for row in compute_ledger(evidence).rows if row.source == source)


def test_a_trainer_on_a_cpu_in_a_container():
    assert judged(TRAINER) == {
        "Interpreter hash seed": "eliminated",
        "Operating-system entropy": "seeded",
        "Processor randomness": "assumed",
        "Start bytes of programs": "seeded",
        "Memory addresses": "eliminated",
        "Random streams": "seeded",
        "Clocks": "assumed",
        "Listing order": "ordered",
        "Processor count": "eliminated",
        "Process numbers": "eliminated",
        "Scheduling": "ordered",
        "Torch operators": "eliminated",
        "Uninitialised memory": "eliminated",
        "Maths threads": "ordered",
        "CPU instruction sets": "eliminated",
        "Compute device": "eliminated",
        "Software": "eliminated",
        "File system": "assumed",
        "Network": "eliminated",
    }


def test_a_program_has_no_rows_of_what_only_trainers_have():
    assert judged(PROGRAM) == {
        "Interpreter hash seed": "eliminated",
        "Operating-system entropy": "seeded",
        "Processor randomness": "assumed",
        "Start bytes of programs": "seeded",
        "Memory addresses": "eliminated",
        "Clocks": "ordered",
        "Listing order": "ordered",
        "Processor count": "eliminated",
        "Process numbers": "eliminated",
        "Scheduling": "assumed",
        "Torch operators": "eliminated",
        "Uninitialised memory": "eliminated",
        "Maths threads": "ordered",
        "CPU instruction sets": "eliminated",
        "Compute device": "eliminated",
        "Child processes": "eliminated",
        "Software": "eliminated",
        "File system": "assumed",
        "Network": "eliminated",
    }


def test_a_program_without_python_has_no_rows_of_python_and_torch():
    shell = replace(
        PROGRAM,
        mechanisms=make_mechanisms(program=True, interpreters=make_interpreters(0)),
        report=make_report(programs=(executed(), executed("0.2x", "dash")), uses=()),
    )
    found = judged(shell)
    gone = {"Interpreter hash seed", "Torch operators", "Uninitialised memory", "Child processes"}
    assert gone.isdisjoint(found)
    assert found["Maths threads"] == found["CPU instruction sets"] == "assumed"


def mechanisms(evidence=TRAINER, **changes):
    return replace(evidence, mechanisms=evidence.mechanisms.model_copy(update=changes))


def surroundings(evidence=TRAINER, **changes):
    return mechanisms(evidence, surroundings=SURROUNDINGS.model_copy(update=changes))


def report(evidence=TRAINER, **changes):
    return replace(evidence, report=evidence.report.model_copy(update=changes))


def telling(evidence, **changes):
    """Change what the processes of a run were told."""
    told = tuple(each.model_copy(update=changes) for each in evidence.report.told)
    return report(evidence, told=told)


def answered(**changes):
    inference = ANSWERED.model_copy(update=changes)
    return mechanisms(trainer=SERIAL.model_copy(update={"inference": inference}))


def interpreters(evidence=TRAINER, *arguments, **changes):
    return mechanisms(evidence, interpreters=make_interpreters(*arguments, **changes))


def torch(evidence=TRAINER, **flags):
    """Change flags of torch; two underscores stand for a dot."""
    changed = {f"torch.{name.replace('__', '.')}": value for name, value in flags.items()}
    return interpreters(evidence, flags={**TORCH_FLAGS, **changed})


def runtime(evidence=TRAINER, **changes):
    return replace(evidence, runtime=RUNTIME.model_copy(update=changes))


def flags(evidence=TRAINER, **changes):
    """Change flags of the environment; None removes one."""
    changed = {f"environment.{name}": value for name, value in changes.items()}
    kept = {name: value for name, value in {**FLAGS, **changed}.items() if value is not None}
    return runtime(evidence, flags=kept)


ON_GPU = flags(mechanisms(trainer=CUDA), CUBLAS_WORKSPACE_CONFIG=":4096:8")

# A run, the same with a mechanism broken or missing, and the rows that change; None: no such row.
BROKEN = {
    "hash(): another seed": (
        TRAINER,
        interpreters(hash_seeds={"7": 1}),
        {"Interpreter hash seed": "seeded"},
    ),
    "hash(): drawn, from virtual entropy": (
        TRAINER,
        interpreters(hash_seeds={"random": 1}),
        {"Interpreter hash seed": "seeded"},
    ),
    "hash(): one of two processes ignores its environment, and entropy is the system's": (
        report(mode="system"),
        report(interpreters(TRAINER, 2, torch=1, hash_seeds={"0": 1, "random": 1}), mode="system"),
        {"Interpreter hash seed": "unsupported", "Child processes": "eliminated"},
    ),
    "a Python process that tells nothing": (
        PROGRAM,
        report(PROGRAM, programs=(executed(), executed("0.2x"), executed("0.2x.1x"))),
        {
            "Interpreter hash seed": "assumed",
            "Torch operators": "assumed",
            "Uninitialised memory": "assumed",
            "Maths threads": "assumed",
            "Child processes": "assumed",
        },
    ),
    "an account that the program spoilt": (
        PROGRAM,
        mechanisms(PROGRAM, interpreters=None),
        {
            "Interpreter hash seed": "assumed",
            "Torch operators": "assumed",
            "Uninitialised memory": "assumed",
            "Maths threads": "assumed",
            "CPU instruction sets": "assumed",
            "Child processes": "assumed",
        },
    ),
    "no launcher": (
        TRAINER,
        replace(TRAINER, report=None),
        {
            "Operating-system entropy": "assumed",
            "Entropy by raw system calls": "assumed",
            "Start bytes of programs": "assumed",
            "Memory addresses": "assumed",
            "Process numbers": "assumed",
            "Listing order": "assumed",
            "Processor count": "assumed",
        },
    ),
    "entropy left alone": (
        TRAINER,
        report(mode="system"),
        {
            "Operating-system entropy": "unsupported",
            "Entropy by raw system calls": "unsupported",
            "Start bytes of programs": "assumed",
        },
    ),
    "entropy recorded": (
        TRAINER,
        report(mode="record"),
        {"Operating-system entropy": "recorded", "Start bytes of programs": "recorded"},
    ),
    "a program that calls the kernel itself": (
        TRAINER,
        report(programs=(executed(getrandom=RequestTally(calls=3, bytes=24)),)),
        {"Entropy by raw system calls": "seeded"},
    ),
    "a program that opens a random file which nothing answers for": (
        TRAINER,
        report(programs=(executed(unanswered=1),)),
        {"Entropy by raw system calls": "unsupported"},
    ),
    "no supervisor": (
        TRAINER,
        report(supervised=False, programs=()),
        {"Entropy by raw system calls": "assumed", "Start bytes of programs": "assumed"},
    ),
    "a program whose processes nobody counted": (
        PROGRAM,
        report(PROGRAM, supervised=False, programs=()),
        {
            "Interpreter hash seed": "assumed",
            "Entropy by raw system calls": "assumed",
            "Start bytes of programs": "assumed",
            "Torch operators": "assumed",
            "Uninitialised memory": "assumed",
            "Maths threads": "assumed",
            "Child processes": "assumed",
        },
    ),
    "start bytes of one program from the kernel": (
        PROGRAM,
        report(PROGRAM, programs=(executed("0.2x", start_bytes_derived=False),)),
        {"Start bytes of programs": "assumed"},
    ),
    "random addresses": (
        TRAINER,
        report(address_randomization=True),
        {"Memory addresses": "unsupported"},
    ),
    "paths of this machine's own": (
        TRAINER,
        surroundings(fixed_paths=False),
        {"Memory addresses": "assumed"},
    ),
    "no streams": (TRAINER, replace(TRAINER, streams=None), {"Random streams": None}),
    "a fixed clock": (TRAINER, telling(TRAINER, clock="fixed"), {"Clocks": "eliminated"}),
    "a virtual clock": (TRAINER, telling(TRAINER, clock="virtual"), {"Clocks": "ordered"}),
    "a program that reads the machine's clock": (
        PROGRAM,
        telling(PROGRAM, clock="system"),
        {"Clocks": "assumed"},
    ),
    "listings in the order of the file system": (
        PROGRAM,
        telling(PROGRAM, sorted=False, listings=0),
        {"Listing order": "assumed"},
    ),
    "the machine's number of processors": (
        PROGRAM,
        telling(PROGRAM, cores=None, core_questions=0),
        {"Processor count": "assumed"},
    ),
    "programs that were told different numbers of processors": (
        PROGRAM,
        report(PROGRAM, told=(*PROGRAM.report.told, told("0.2x.1x", clock="virtual", cores=2))),
        {"Processor count": "assumed"},
    ),
    "a static program": (
        PROGRAM,
        report(
            PROGRAM,
            programs=(executed(), executed("0.2x", preloaded=False, linkage="static")),
        ),
        {"Clocks": "assumed", "Listing order": "assumed", "Processor count": "assumed"},
    ),
    "the launcher is not alone in its process id namespace": (
        PROGRAM,
        report(PROGRAM, own_numbers=False),
        {"Process numbers": "assumed"},
    ),
    "the first process has another number": (
        TRAINER,
        report(first_process=FIRST_PROCESS + 1),
        {"Process numbers": "assumed"},
    ),
    "the program has another number": (
        PROGRAM,
        mechanisms(PROGRAM, process=PROGRAM_PROCESS + 1),
        {"Process numbers": "assumed"},
    ),
    "unrolls in the order of arrival, written down": (
        TRAINER,
        mechanisms(trainer=SERIAL.model_copy(update={"schedule": "recorded", "actors": 4})),
        {"Scheduling": "recorded"},
    ),
    "unrolls in the order of arrival": (
        TRAINER,
        mechanisms(trainer=SERIAL.model_copy(update={"schedule": "live", "actors": 4})),
        {"Scheduling": "unsupported"},
    ),
    "arrivals, written down": (
        PROGRAM,
        replace(PROGRAM, arrivals=ARRIVALS),
        {"Order of arrival": "recorded"},
    ),
    "data sets on read-only mounts": (
        TRAINER,
        replace(surroundings(data="read-only"), data=READ),
        {"Data sets": "eliminated"},
    ),
    "data sets that could be written": (
        TRAINER,
        replace(surroundings(data="writable"), data=READ),
        {"Data sets": "assumed"},
    ),
    "actors that are answered": (
        TRAINER,
        answered(),
        {
            "Batching of inference": "ordered",
            "Seeds of requests": "seeded",
            "Routing of requests": "ordered",
        },
    ),
    "actors that asked for nothing": (TRAINER, answered(requests=0, own_row=0, own_stream=0), {}),
    "batches as requests arrive": (
        answered(),
        answered(own_row=479),
        {"Batching of inference": "unsupported"},
    ),
    "batches of a fixed size without a test": (
        answered(),
        answered(tested_rows=0),
        {"Batching of inference": "unsupported"},
    ),
    "layers of independent rows": (
        answered(),
        answered(independent=True, own_row=0),
        {"Batching of inference": "eliminated"},
    ),
    "layers of independent rows without a test": (
        answered(),
        answered(independent=True, own_row=0, tested_rows=0),
        {"Batching of inference": "assumed"},
    ),
    "an action that was drawn otherwise": (
        answered(),
        answered(own_stream=479),
        {"Seeds of requests": "unsupported"},
    ),
    "a request that another replica answered": (
        answered(),
        answered(misrouted=1),
        {"Routing of requests": "unsupported"},
    ),
    "one replica": (answered(), answered(replicas=1), {"Routing of requests": "eliminated"}),
    "actors that are answered where they play": (
        answered(),
        answered(replicas=0),
        {"Routing of requests": None},
    ),
    "torch warns only": (
        TRAINER,
        torch(deterministic_debug_mode="1"),
        {"Torch operators": "assumed"},
    ),
    "torch lets anything run": (
        TRAINER,
        torch(deterministic_debug_mode="0", fill_uninitialized_memory="False"),
        {"Torch operators": "unsupported", "Uninitialised memory": "assumed"},
    ),
    "a flag that no process read back": (
        TRAINER,
        interpreters(flags={}),
        {
            "Torch operators": "unsupported",
            "Uninitialised memory": "assumed",
            "Maths threads": "unsupported",
        },
    ),
    "torch takes another number of threads": (
        TRAINER,
        torch(num_threads="2"),
        {"Maths threads": "unsupported"},
    ),
    "any number of threads": (
        TRAINER,
        flags(OMP_NUM_THREADS=None),
        {"Maths threads": "unsupported"},
    ),
    "the widest instructions": (
        TRAINER,
        runtime(flags={**FLAGS, "numerics.self_test": "no expectation"}),
        {"CPU instruction sets": "assumed"},
    ),
    "instructions that were not asked for": (
        TRAINER,
        runtime(flags={name: value for name, value in FLAGS.items() if name != "onednn.isa"}),
        {"CPU instruction sets": "assumed"},
    ),
    "networks on a GPU": (
        TRAINER,
        ON_GPU,
        {
            "Compute device": "assumed",
            "cuDNN autotuning": "eliminated",
            "cuBLAS workspace": "ordered",
            "Reduced GPU precision": "eliminated",
        },
    ),
    "a program that sees a GPU": (
        PROGRAM,
        surroundings(PROGRAM, gpus=("/dev/nvidia0",)),
        {
            "Compute device": "assumed",
            "cuDNN autotuning": "eliminated",
            "cuBLAS workspace": "unsupported",
            "Reduced GPU precision": "eliminated",
        },
    ),
    "cuDNN by timing": (
        ON_GPU,
        torch(ON_GPU, cudnn__benchmark="True"),
        {"cuDNN autotuning": "unsupported"},
    ),
    "any cuBLAS workspace": (
        ON_GPU,
        flags(mechanisms(trainer=CUDA)),
        {"cuBLAS workspace": "unsupported"},
    ),
    "TensorFloat-32": (
        ON_GPU,
        torch(ON_GPU, cudnn__allow_tf32="True"),
        {"Reduced GPU precision": "assumed"},
    ),
    "a program whose processes do not set torch's flags": (
        PROGRAM,
        interpreters(PROGRAM, unwatched=1),
        {
            "Torch operators": "assumed",
            "Uninitialised memory": "assumed",
            "Maths threads": "assumed",
            "Child processes": "assumed",
        },
    ),
    "a trainer with processes": (
        TRAINER,
        interpreters(TRAINER, 3),
        {"Child processes": "eliminated"},
    ),
    "no container": (TRAINER, replace(TRAINER, image=None), {"Software": "assumed"}),
    "a way out": (TRAINER, surroundings(interfaces={"eth0": "everywhere"}), {"Network": "assumed"}),
    "a network of containers": (
        replace(TRAINER, engine={"name": "docker", "cluster": "docker:2"}),
        surroundings(
            replace(TRAINER, engine={"name": "docker", "cluster": "docker:2"}),
            interfaces={"eth0": "everywhere"},
        ),
        {"Network": "assumed"},
    ),
    "another machine after an interruption": (
        TRAINER,
        runtime(earlier_devices=({"kind": "cpu", "name": "Another CPU"},)),
        {"Change of machine": "assumed"},
    ),
}


@pytest.mark.parametrize(("whole", "broken", "changes"), BROKEN.values(), ids=BROKEN)
def test_a_broken_mechanism_changes_its_rows_and_no_others(whole, broken, changes):
    expected = {name: how for name, how in {**judged(whole), **changes}.items() if how is not None}
    assert judged(broken) == expected


def test_every_row_is_broken_by_some_case():
    changed = {name for _, _, changes in BROKEN.values() for name in changes}
    assert {source.name for source in SOURCES} - changed == {
        "Processor randomness",
        "File system",
    }
    assert "run directory on ext4, temporary files on tmpfs" in evidence_of(TRAINER, "File system")
    assert "could not determine" in evidence_of(surroundings(file_systems={}), "File system")
    assert "they were not masked" in evidence_of(report(mode="system"), "Processor randomness")
    assert "configured not to" in evidence_of(TRAINER, "Processor randomness")


def test_no_row_can_be_taken_from_the_spec():
    fields = {field.name for field in dataclasses.fields(Evidence)}
    assert fields == {
        *("runtime", "mechanisms", "report", "streams", "arrivals", "data", "engine", "image")
    }
    assert not any(isinstance(getattr(TRAINER, name), Spec) for name in fields)


def test_requests_of_capsules_own_interpreter_are_told_apart():
    assert evidence_of(PROGRAM, "Operating-system entropy") == (
        "answered: 4 requests for 72 bytes (and 5 of Capsule's own interpreter)"
    )
    assert evidence_of(TRAINER, "Operating-system entropy") == (
        "answered: 3 requests for 2,504 bytes"
    )
    assert [is_own(path) for path in ("0", "0.1", "0.2x", "0.2x.1", "#c0ffee")] == [
        *(True, True, False, False, False)
    ]


def test_a_resumed_run_says_of_which_start_it_speaks():
    text = evidence_of(report(starts=3), "Operating-system entropy")
    assert text.endswith("in the last of 3 attempts")


def test_a_network_that_only_leads_to_the_runs_own_containers_is_no_way_out():
    cluster = replace(TRAINER, engine={"name": "docker", "cluster": "docker:2"})
    inside = surroundings(cluster, interfaces={"eth0": "neighbours"})
    assert judged(inside)["Network"] == "eliminated"
    remote = replace(inside, engine={"name": "docker", "cluster": "remote"})
    assert judged(remote)["Network"] == "assumed"


def test_streams_are_counted():
    streams = StreamProfiles(streams=STREAMS.streams * 3)
    assert "3 counter-based streams gave 3,702 words" in evidence_of(
        replace(TRAINER, streams=streams), "Random streams"
    )


def test_ledgers_are_compared_by_their_treatments():
    recorded, here = compute_ledger(TRAINER), compute_ledger(replace(TRAINER, image=None))
    assert compare_ledgers(recorded, recorded) == ()
    (difference,) = compare_ledgers(recorded, here)
    assert (difference.source, difference.recorded, difference.here) == (
        *("Software", "eliminated", "assumed"),
    )
    cut = Ledger(rows=tuple(row for row in recorded.rows if row.treatment != "assumed"))
    hidden = compare_ledgers(cut, recorded)
    assert [(each.source, each.recorded) for each in hidden] == [
        ("Processor randomness", None),
        ("Clocks", None),
        ("File system", None),
    ]


def test_the_document_is_canonical_and_says_what_it_rests_on():
    ledger = compute_ledger(TRAINER)
    document = parse_canonical_json(ledger.document())
    assert document["schema"] == "capsule/ledger/v1"
    assert Ledger.model_validate_json(ledger.document()) == ledger
    assert json.loads(ledger.document()) == document
    assert all(row.evidence and row.weakened_by for row in ledger.rows)


def test_the_documentation_lists_the_rows_in_their_order():
    page = (Path(__file__).parents[2] / "docs/ledger.md").read_text()
    section = page.partition("## The rows")[2]
    rows = re.findall(r"^\| ([A-Za-z][^|]*?) \|", section, re.MULTILINE)
    assert rows == ["source", *(source.name for source in SOURCES)]


def test_arrivals_are_counted_without_the_moments_at_which_nothing_had_come():
    evidence = replace(PROGRAM, arrivals=ARRIVALS)
    assert evidence_of(evidence, "Order of arrival") == "the order of 2 arrivals was recorded"
