"""What runs leave behind for their ledgers, made by hand: a whole one, changed in places."""

from dataclasses import replace

from capsule.entropy.evidence import Evidence
from capsule.entropy.journal import ToldReport
from capsule.entropy.ledger import compute_ledger
from capsule.entropy.report import (
    EntropyReport,
    LibraryUse,
    ProgramReport,
    RequestTally,
)
from capsule.experiment.contract import (
    FIRST_PROCESS,
    PROGRAM_PROCESS,
    Runtime,
    StreamProfile,
    StreamProfiles,
)
from capsule.experiment.inference import Inference
from capsule.experiment.mechanisms import (
    Interpreters,
    Mechanisms,
    Surroundings,
    TorchProcesses,
    TrainerUse,
)

TORCH_FLAGS = {
    "torch.deterministic_debug_mode": "2",
    "torch.fill_uninitialized_memory": "True",
    "torch.num_threads": "1",
    "torch.cudnn.benchmark": "False",
    "torch.cudnn.allow_tf32": "False",
    "torch.cuda.matmul.allow_tf32": "False",
}
FLAGS = {
    "environment.PYTHONHASHSEED": "0",
    "environment.OMP_NUM_THREADS": "1",
    "torch.cpu_capability": "AVX2",
    "onednn.isa": "Intel AVX2",
    "mkl.branch": "AVX2",
    "numerics.self_test": "112 answers as expected",
    **TORCH_FLAGS,
}
RUNTIME = Runtime(
    flags=FLAGS,
    libraries={"python": "3.11.2", "torch": "2.13.0"},
    device={"kind": "cpu", "name": "Some CPU", "cores": 2},
)
STREAMS = StreamProfiles(
    streams=(StreamProfile(name="no-op", seed=0, key="0" * 32, draws=1234, digest="0" * 64),)
)
SURROUNDINGS = Surroundings(
    fixed_paths=True,
    c_library="glibc 2.36",
    interfaces={},
    file_systems={"run directory": "ext4", "temporary files": "tmpfs"},
    gpus=(),
)
SERIAL = TrainerUse(device="cpu", actors=1, schedule="serial")
IMAGE = f"sha256:{'1' * 64}"


def make_interpreters(started=1, *, torch=None, flags=TORCH_FLAGS, **changes):
    """Return the account of Python processes, all of which imported torch unless told otherwise."""
    count = started if torch is None else torch
    told = Interpreters(
        hash_seeds={"0": started} if started else {},
        restarted=0,
        unwatched=0,
        torch=(TorchProcesses(processes=count, flags=flags),) if count else (),
    )
    return told.model_copy(update=changes)


def make_mechanisms(*, program=False, **changes):
    """Return what a trainer, or a program of the user's own, says that it used."""
    whole = Mechanisms(
        surroundings=SURROUNDINGS,
        interpreters=make_interpreters(),
        trainer=None if program else SERIAL,
        process=PROGRAM_PROCESS if program else None,
    )
    return whole.model_copy(update=changes)


def executed(process="0", executable="python3.11", **changes):
    """Return what the supervisor saw of a program."""
    whole = ProgramReport(
        process=process,
        executed=True,
        executable=executable,
        linkage="glibc",
        preloaded=True,
        start_bytes_derived=True,
        getrandom=RequestTally(),
        inside_libc=RequestTally(calls=1, bytes=8),
        devices=RequestTally(),
        unanswered=0,
    )
    return whole.model_copy(update=changes)


def use(process="0", calls=2, size=2496):
    """Return what a process asked for through the preloaded library."""
    return LibraryUse(
        process=process, source="getrandom", caller="libpython", calls=calls, bytes=size
    )


def told(process="0", **changes):
    """Return what a process was told in place of the machine."""
    whole = ToldReport(
        process=process,
        clock="system",
        readings=0,
        waits=0,
        sorted=True,
        listings=12,
        cores=4,
        core_questions=2,
    )
    return whole.model_copy(update=changes)


def make_report(**changes):
    """Return the launcher's account of a run of one Python process."""
    whole = EntropyReport(
        mode="virtual",
        clock="system",
        supervised=True,
        address_randomization=False,
        own_numbers=True,
        first_process=FIRST_PROCESS,
        status=0,
        processes=1,
        outlived=0,
        programs=(executed(),),
        uses=(use(),),
        told=(told(),),
        coverage=(),
    )
    return whole.model_copy(update=changes)


TRAINER = Evidence(
    runtime=RUNTIME,
    mechanisms=make_mechanisms(),
    report=make_report(),
    streams=STREAMS,
    arrivals=None,
    engine={"name": "docker"},
    image=IMAGE,
)
PROGRAM = replace(
    TRAINER,
    mechanisms=make_mechanisms(program=True),
    report=make_report(
        processes=3,
        programs=(executed(), executed("0.2x")),
        uses=(use(), use("0.1"), use("0.2x", 3, 64)),
        told=(told(clock="virtual", readings=9), told("0.2x", clock="virtual", readings=70)),
    ),
    streams=None,
)
ANSWERED = Inference(
    rows=16, independent=False, tested_rows=16, replicas=2, requests=480, own_row=480,
    own_stream=480,
)  # fmt: skip


def judged(evidence):
    return {row.source: row.treatment for row in compute_ledger(evidence).rows}


def evidence_of(evidence, source):
    return next(row.evidence for row in compute_ledger(evidence).rows if row.source == source)


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


def assert_changed(whole, broken, changes):
    """Check that a run's rows change as given, where None is no such row, and no others."""
    expected = {name: how for name, how in {**judged(whole), **changes}.items() if how is not None}
    assert judged(broken) == expected


def changed_rows(cases):
    """Return the names of all rows that a module's cases change."""
    return {name for _, _, changes in cases.values() for name in changes}
