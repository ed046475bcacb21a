"""The ledger: every known source of nondeterminism, and what became of it in one run.

It is computed from facts: flags that the training process read back, what the interposer and the
supervisor counted, the streams' own accounts, the engine. A setting whose effect was not read back
counts as *assumed*, whatever the spec says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from capsule.entropy.report import EntropyReport
from capsule.experiment.canonical import canonical_json
from capsule.experiment.contract import Runtime, StreamProfiles
from capsule.experiment.fields import Model
from capsule.experiment.spec import CpuAccelerator, Spec
from capsule.experiment.trainers import CommandTrainer

Treatment = Literal[
    "eliminated",  # cannot occur in this run
    "seeded",  # derived from a seed in the lock
    "ordered",  # happens in a fixed order
    "recorded",  # written down, and replayed by verify
    "assumed",  # not controlled, or not read back; believed to be the same elsewhere
    "unsupported",  # not controlled, and able to change the result
]
_Judgement = tuple[Treatment, str]  # and the evidence


class Row(Model):
    """One source of nondeterminism."""

    source: str
    treatment: Treatment
    evidence: str = Field(description="What was measured or read back.")
    weakened_by: str = Field(description="What would make the treatment fail.")


class Ledger(Model):
    """All rows, in the order of :data:`SOURCES`."""

    schema_id: Literal["capsule/ledger/v1"] = Field("capsule/ledger/v1", alias="schema")
    rows: tuple[Row, ...]

    def document(self) -> bytes:
        """Return the canonical JSON bytes of the ledger."""
        return canonical_json(self.model_dump(mode="json", by_alias=True))


@dataclass(frozen=True)
class _Facts:
    spec: Spec
    flags: Mapping[str, str]
    libraries: Mapping[str, str]
    report: EntropyReport | None
    streams: StreamProfiles | None
    engine: str
    cluster: str | None

    @property
    def on_gpu(self) -> bool:
        return not isinstance(self.spec.accelerator, CpuAccelerator)

    @property
    def is_program(self) -> bool:
        return isinstance(self.spec.trainer, CommandTrainer)

    def read_back(self, *names: str) -> str | None:
        """Return flags as text; None if one of them was not read back."""
        if not all(name in self.flags for name in names):
            return None
        return ", ".join(
            f"{name.removeprefix('environment.')}={self.flags[name]}" for name in names
        )


def compute_ledger(
    spec: Spec,
    runtime: Runtime,
    report: EntropyReport | None,
    streams: StreamProfiles | None,
    engine: str,
    cluster: str | None = None,
) -> Ledger:
    """Compute the ledger of a finished run.

    Args:
        spec: What was asked for.
        runtime: What the training process read back.
        report: What the interposer and the supervisor counted; None if they were not used.
        streams: What the trainer's random streams gave out; None for a program of the user's own.
        engine: Where it ran: docker, podman or process.
        cluster: Its Ray cluster: ``docker:N`` of N containers made for it, ``remote`` of one that
            was there; None without.
    """
    facts = _Facts(spec, runtime.flags, runtime.libraries, report, streams, engine, cluster)
    return Ledger(rows=tuple(_row(source, facts) for source in SOURCES))


@dataclass(frozen=True)
class _Source:
    name: str
    judge: Callable[[_Facts], _Judgement]
    weakened_by: str


def _row(source: _Source, facts: _Facts) -> Row:
    treatment, evidence = source.judge(facts)
    return Row(
        source=source.name,
        treatment=treatment,
        evidence=evidence,
        weakened_by=source.weakened_by,
    )


def _shown(
    facts: _Facts, wanted: Mapping[str, str], treatment: Treatment, otherwise: Treatment
) -> _Judgement:
    """Judge by flags: a treatment if all read back as wanted, another if they do not."""
    evidence = facts.read_back(*wanted)
    if evidence is None:
        return "assumed", "not read back in this run"
    matches = all(facts.flags[name] == value for name, value in wanted.items())
    return (treatment if matches else otherwise), f"read back: {evidence}"


def _hash_seed(facts: _Facts) -> _Judgement:
    seed = facts.spec.determinism.hash_seed
    if seed is None:  # the interpreter takes one from the system's entropy
        return _system_entropy(facts)
    wanted = {"environment.PYTHONHASHSEED": str(seed)}
    return _shown(facts, wanted, "seeded" if seed else "eliminated", "unsupported")


def _system_entropy(facts: _Facts) -> _Judgement:
    report = facts.report
    if facts.spec.entropy.mode == "system":
        return "unsupported", "entropy.mode is system: it was left alone"
    if report is None:
        return "assumed", "the run was not started by the launcher"
    if report.mode == "system":
        return "unsupported", "the launcher was told to leave it alone"
    treatment: Treatment = "seeded" if report.mode == "virtual" else "recorded"
    return treatment, f"{report.calls:,} requests for {report.bytes:,} bytes were answered"


def _raw_calls(facts: _Facts) -> _Judgement:
    treatment, evidence = _system_entropy(facts)
    report = facts.report
    if report is None or report.mode == "system":
        return treatment, evidence
    if not report.supervised:
        return "assumed", "entropy.supervised is off: they would not have been seen"
    missed = sum(program.unanswered for program in report.programs)
    if missed:
        return "unsupported", f"{missed:,} opens of random files were let through"
    return treatment, f"{report.bypassed:,} requests bypassed the preloaded library, all answered"


def _instructions(facts: _Facts) -> _Judgement:
    masked = "libraries known to use them are told not to" if facts.report else "nothing masks them"
    return "assumed", f"RDRAND and RDSEED cannot be intercepted; {masked}"


def _start_bytes(facts: _Facts) -> _Judgement:
    treatment, evidence = _raw_calls(facts)
    if facts.report is None or treatment in {"assumed", "unsupported"}:
        return "assumed", evidence
    programs = facts.report.programs
    derived = sum(program.start_bytes_derived for program in programs)
    shown = f"replaced in {derived} of {len(programs)} programs"
    return (treatment if derived == len(programs) else "assumed"), shown


def _addresses(facts: _Facts) -> _Judgement:
    if facts.spec.entropy.address_randomization:
        return "unsupported", "entropy.address_randomization is on"
    if facts.report is None:
        return "assumed", "the run was not started by the launcher, which switches it off"
    if facts.report.address_randomization:
        return "unsupported", "the launcher left it on"
    return "eliminated", "the launcher read back that it is off"


def _clock(facts: _Facts) -> _Judgement:
    if facts.report is None or facts.report.clock == "system":
        return "assumed", "the calendar clock was left alone"
    treatment: Treatment = "eliminated" if facts.report.clock == "fixed" else "ordered"
    return treatment, f"the calendar clock was {facts.report.clock}; others were left alone"


def _streams(facts: _Facts) -> _Judgement:
    if facts.streams is None:
        treatment, _ = _system_entropy(facts)
        return treatment, "the program seeds its own generators, or takes the system's entropy"
    drawn = sum(stream.draws for stream in facts.streams.streams)
    count = len(facts.streams.streams)
    return "seeded", f"{count} counter-based streams gave {drawn:,} words; each draw is digested"


def _scheduling(facts: _Facts) -> _Judgement:
    if facts.is_program:
        return "assumed", "Capsule does not order the program's threads and processes"
    return "ordered", "one fixed schedule; the trace covers every step"


def _algorithms(facts: _Facts) -> _Judgement:
    name = "torch.deterministic_debug_mode"
    if facts.flags.get(name) == "1":
        return "assumed", f"read back: {facts.read_back(name)}, which only warns"
    return _shown(facts, {name: "2"}, "eliminated", "unsupported")


def _fresh_memory(facts: _Facts) -> _Judgement:
    return _shown(facts, {"torch.fill_uninitialized_memory": "True"}, "eliminated", "assumed")


def _threads(facts: _Facts) -> _Judgement:
    threads = str(facts.spec.determinism.threads)
    wanted = {"environment.OMP_NUM_THREADS": threads, "torch.num_threads": threads}
    if facts.spec.determinism.threads is None:
        return "unsupported", "determinism.threads is null: as many as the machine has cores"
    return _shown(facts, wanted, "ordered", "unsupported")


def _dispatch(facts: _Facts) -> _Judgement:
    if facts.on_gpu:
        return "assumed", "the CPU's part of a GPU run is not held to one instruction set"
    names = ("torch.cpu_capability", "onednn.isa", "mkl.branch")
    evidence = facts.read_back(*names)
    if evidence is None:
        return "assumed", "not read back in this run"
    portable = str(getattr(facts.spec.accelerator, "numerics", "")).startswith("portable")
    return ("eliminated" if portable else "assumed"), f"read back: {evidence}"


def _device(facts: _Facts) -> _Judgement:
    if facts.on_gpu:
        return "assumed", "equal bits need the same GPU model and the same libraries"
    return "eliminated", "computed on the CPU"


def _autotuning(facts: _Facts) -> _Judgement:
    return _shown(facts, {"torch.cudnn.benchmark": "False"}, "eliminated", "unsupported")


def _workspace(facts: _Facts) -> _Judgement:
    workspace = facts.spec.determinism.cublas_workspace
    if workspace is None:
        return "unsupported", "determinism.cublas_workspace is null"
    if not facts.on_gpu:
        return "eliminated", "no GPU was used"
    return _shown(facts, {"environment.CUBLAS_WORKSPACE_CONFIG": workspace}, "ordered", "assumed")


def _reduced_precision(facts: _Facts) -> _Judgement:
    wanted = {"torch.cuda.matmul.allow_tf32": "False", "torch.cudnn.allow_tf32": "False"}
    return _shown(facts, wanted, "eliminated", "assumed")


def _propagation(facts: _Facts) -> _Judgement:
    if not facts.spec.determinism.propagation:
        return "assumed", "determinism.propagation is off"
    if facts.read_back("environment.CAPSULE_DETERMINISM") is None:
        return "assumed", "not read back in this run"
    return "eliminated", "every Python process that imports torch checks and sets its flags"


def _switch(name: str, treatment: Treatment, effect: str) -> Callable[[_Facts], _Judgement]:
    """Judge by a switch of the spec's ``determinism``."""

    def judge(facts: _Facts) -> _Judgement:
        if getattr(facts.spec.determinism, name):
            return treatment, f"determinism.{name}: {effect}"
        return "unsupported", f"determinism.{name} is off"

    return judge


def _software(facts: _Facts) -> _Judgement:
    versions = ", ".join(
        f"{name} {facts.libraries[name]}" for name in ("python", "torch") if name in facts.libraries
    )
    if facts.engine == "process":
        return "assumed", f"loaded: {versions}; the C library is this machine's own"
    return "eliminated", f"loaded from the locked image: {versions}"


def _network(facts: _Facts) -> _Judgement:
    if facts.engine == "process":
        return "assumed", "the plain-process engine does not cut it off"
    if facts.cluster == "remote":
        return "assumed", f"{facts.engine} let it reach a Ray cluster, and all else"
    if facts.cluster is not None:
        return "eliminated", f"{facts.engine} ran it on a network of its own containers alone"
    return "eliminated", f"{facts.engine} ran it without a network"


SOURCES: tuple[_Source, ...] = (
    _Source(
        "Interpreter hash seed", _hash_seed, "a child process started with another environment"
    ),
    _Source(
        "Operating-system entropy", _system_entropy, "a program that draws in an order of its own"
    ),
    _Source(
        "Entropy by raw system calls", _raw_calls, "a kernel that answers without a system call"
    ),
    _Source("Processor randomness", _instructions, "a program that uses it for its results"),
    _Source("Start bytes of programs", _start_bytes, "a program that is not supervised"),
    _Source("Memory addresses", _addresses, "memory from other processes; a hash of an address"),
    _Source("Clocks", _clock, "a program whose results depend on the time"),
    _Source("Random streams", _streams, "a generator of the program's that is seeded otherwise"),
    _Source("Scheduling", _scheduling, "threads or processes that race for shared state"),
    _Source("Torch operators", _algorithms, "custom operators that torch knows nothing about"),
    _Source("Uninitialised memory", _fresh_memory, "extensions that allocate for themselves"),
    _Source("Maths threads", _threads, "a library that is not told through the environment"),
    _Source("CPU instruction sets", _dispatch, "a library with a dispatch of its own"),
    _Source("Compute device", _device, "another GPU model, driver branch or library"),
    _Source("cuDNN autotuning", _autotuning, "other code that chooses kernels by timing"),
    _Source("cuBLAS workspace", _workspace, "several CUDA streams at once"),
    _Source("Reduced GPU precision", _reduced_precision, "a library with a switch of its own"),
    _Source(
        "Child processes", _propagation, "a Python of the program's own, without these packages"
    ),
    _Source(
        "Batching of inference",
        _switch("batch_invariance", "ordered", "one fixed shape"),
        "a server of the program's own",
    ),
    _Source(
        "Seeds of requests",
        _switch("request_seeds", "seeded", "one stream per actor and request"),
        "a server of the program's own",
    ),
    _Source(
        "Routing of requests",
        _switch("deterministic_routing", "ordered", "by actor"),
        "a load balancer of the program's own",
    ),
    _Source("Software", _software, "code that is downloaded at run time"),
    _Source("Network", _network, "nothing that the engine permits"),
)
"""Every source, in the order of the rows."""
