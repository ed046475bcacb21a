"""Rows on arithmetic: torch's flags in every process, libraries, devices and child processes."""

import pytest

from capsule.entropy.rows import computing
from capsule.experiment.mechanisms import TorchProcesses
from tests.entropy.evidence import (
    FLAGS,
    PROGRAM,
    SERIAL,
    TORCH_FLAGS,
    TRAINER,
    assert_changed,
    changed_rows,
    evidence_of,
    flags,
    interpreters,
    judged,
    make_interpreters,
    mechanisms,
    runtime,
    surroundings,
    torch,
)

CUDA = SERIAL.model_copy(update={"device": "cuda:0"})
ON_GPU = flags(mechanisms(trainer=CUDA), CUBLAS_WORKSPACE_CONFIG=":4096:8")

# A run, the same with a mechanism broken or missing, and the rows that change; None: no such row.
BROKEN = {
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
}


@pytest.mark.parametrize(("whole", "broken", "changes"), BROKEN.values(), ids=BROKEN)
def test_a_broken_mechanism_changes_its_rows_and_no_others(whole, broken, changes):
    assert_changed(whole, broken, changes)


def test_every_row_is_broken_by_some_case():
    assert {source.name for source in computing.SOURCES} - changed_rows(BROKEN) == set()


def groups(*changes, evidence=PROGRAM):
    """Let groups of one process, of two, and so on have read back other flags."""
    found = tuple(
        TorchProcesses(processes=number, flags={**TORCH_FLAGS, **each})
        for number, each in enumerate(changes, start=1)
    )
    told = make_interpreters(sum(each.processes for each in found))
    return mechanisms(evidence, interpreters=told.model_copy(update={"torch": found}))


@pytest.mark.parametrize(
    ("modes", "treatment"),
    [
        (("2",), "eliminated"),
        (("2", "2"), "eliminated"),
        (("2", "1"), "assumed"),
        (("1", "1"), "assumed"),
        (("2", "0"), "unsupported"),
        (("1", "0"), "unsupported"),
    ],
)
def test_the_weakest_process_decides_on_torchs_operators(modes, treatment):
    found = groups(*({"torch.deterministic_debug_mode": mode} for mode in modes))
    assert judged(found)["Torch operators"] == treatment


def test_the_flags_of_each_group_of_processes_are_shown():
    found = groups({}, {"torch.num_threads": "8"})
    assert judged(found)["Maths threads"] == "unsupported"
    assert evidence_of(found, "Maths threads") == (
        "read back: torch.num_threads=1 in 1 process; torch.num_threads=8 in 2 processes"
    )


def test_processes_with_the_same_flags_of_a_row_are_counted_together():
    found = groups({}, {"onednn.isa": "another"})  # a flag of another row
    assert evidence_of(found, "Maths threads") == "read back: torch.num_threads=1 in 3 processes"


def test_a_flag_that_a_library_lacks_is_shown_as_absent():
    found = interpreters(flags={})
    assert evidence_of(found, "Torch operators") == (
        "read back: torch.deterministic_debug_mode=absent in 1 process"
    )


def test_threads_are_only_assumed_where_no_library_was_asked():
    found = interpreters(PROGRAM, 1, torch=0)
    assert judged(found)["Maths threads"] == "assumed"
    assert evidence_of(found, "Maths threads") == (
        "OMP_NUM_THREADS=1 is set, but no library was queried"
    )


@pytest.mark.parametrize(
    ("test", "treatment"),
    [
        ("112 answers as expected", "eliminated"),
        ("2 of 112 answers differ", "assumed"),
        ("no expectation", "assumed"),
    ],
)
def test_only_known_answers_prove_what_a_library_computes(test, treatment):
    found = runtime(flags={**FLAGS, "numerics.self_test": test})
    assert judged(found)["CPU instruction sets"] == treatment
    assert evidence_of(found, "CPU instruction sets").endswith(f"self-test: {test}")


@pytest.mark.parametrize(("compilers", "were"), [("numba", "was"), ("jaxlib, numba", "were")])
def test_an_imported_compiler_computes_what_no_profile_pins(compilers, were):
    found = interpreters(compilers=compilers)
    assert judged(found)["CPU instruction sets"] == "assumed"
    assert evidence_of(found, "CPU instruction sets").startswith(f"{compilers} {were} imported, ")


def test_a_gpu_is_named_and_never_controlled():
    device = {"kind": "cuda", "name": "NVIDIA H200"}
    found = runtime(mechanisms(trainer=CUDA), device=device)
    assert judged(found)["Compute device"] == "assumed"
    assert evidence_of(found, "Compute device").startswith("cuda:0 (NVIDIA H200): ")
    seen = surroundings(PROGRAM, gpus=("/dev/nvidia0", "/dev/nvidia1"))
    text = "the program could use /dev/nvidia0, /dev/nvidia1"
    assert evidence_of(seen, "Compute device") == text


def test_a_trainer_on_the_cpu_of_a_machine_with_a_gpu_does_not_use_it():
    found = surroundings(gpus=("/dev/nvidia0",))
    assert judged(found)["Compute device"] == "eliminated"
    assert "cuDNN autotuning" not in judged(found)


def test_the_trainer_itself_is_no_child_process():
    assert "Child processes" not in judged(interpreters(TRAINER, 1))
    assert evidence_of(interpreters(TRAINER, 3), "Child processes") == (
        "3 Python processes were started; torch was imported in 3, forked ones included; each set "
        "its flags and read them back"
    )


def test_a_forked_child_that_imports_torch_is_not_one_of_the_started_ones():
    text = evidence_of(interpreters(PROGRAM, 3, torch=4), "Child processes")
    assert text.startswith("3 Python processes were started; torch was imported in 4, forked ")


def test_children_without_torch_are_no_row():
    assert "Child processes" not in judged(interpreters(TRAINER, 3, torch=0))


def test_children_that_set_no_flags_are_counted():
    found = interpreters(TRAINER, 3, unwatched=2)
    assert judged(found)["Child processes"] == "assumed"
    assert evidence_of(found, "Child processes") == "2 of 3 processes did not set their flags"


def test_one_process_is_written_in_the_singular():
    unwatched = interpreters(PROGRAM, unwatched=1)
    assert evidence_of(unwatched, "Torch operators") == (
        "1 Python process did not set them: determinism.propagation is off"
    )
    child = interpreters(started=3, unwatched=1)
    assert evidence_of(child, "Child processes") == "1 of 3 processes did not set its flags"
