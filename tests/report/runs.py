"""Finished runs that nobody ran: directories written by hand, packed as ``capsule run`` does."""

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from capsule.bundle.keys import generate, load_private
from capsule.bundle.packing import FinishedRun, pack_run
from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.contract import Evaluation, EvaluationPoint, Generation
from capsule.experiment.lock import Lock
from capsule.experiment.trace import GENESIS, extend
from capsule.host.spec_file import parse_spec
from capsule.image.cache import Cache
from capsule.image.code import training_code_digest
from capsule.machine.fingerprint import Cpu, Fingerprint, OperatingSystem
from capsule.machine.gpu import Driver, Gpu
from tests.hostile.genuine import write_entropy_report, write_ledger
from tests.locked_images import locked_image

DQN = {
    "name": "small-dqn",
    "environment": {"suite": "gymnasium", "id": "CartPole-v1"},
    "trainer": {"algorithm": "dqn", "network": "mlp", "total_steps": 400},
}
R2D2 = {
    **DQN,
    "name": "small-r2d2",
    "trainer": {"algorithm": "r2d2", "network": "mlp"},
    "evaluation": {"interval": 6400},
    "recording": {"trace_interval": 6400, "tensor_interval": 6400, "checkpoint_interval": 10**10},
}
POPULATION = {
    "name": "small-population",
    "environment": {
        "suite": "atari", "game": "pong", "further_games": ["breakout"], "full_action_set": True,
    },
    "trainer": {"algorithm": "impala", "population": {"members": 2}},
    "evaluation": {"noop_max": 30, "interval": 640},
    "recording": {"trace_interval": 640, "tensor_interval": 640, "checkpoint_interval": 10**10},
}  # fmt: skip
PROGRAM = {"name": "own", "trainer": {"command": ["python", "train.py"]}}
HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\u202ekcab\x1b[31m\"'&"
STEPS = 400
RETURNS = {200: (1.0, 2.0, 4.0, 9.0), 400: (10.0, 20.0, 30.0, 44.0)}
METRICS = [{"step": step, "loss": 1 / step, "return": float(step)} for step in range(1, 40)]

MACHINE = Fingerprint(
    cpu=Cpu(vendor="GenuineIntel", name="Intel(R) Xeon(R)", flags=("avx2", "fma"), logical_cores=2),
    memory_bytes=16 << 30,
    kernel="6.1.0",
    os=OperatingSystem(id="debian", version_id="12"),
    libc="glibc 2.36",
    engine={"name": "process", "version": "1"},
    driver=Driver(nvml="ok", version="580.65", cuda="13.0"),
    gpus=(Gpu(index=0, name="NVIDIA H200", compute_capability="9.0"),),
)


def make_lock(document) -> Lock:
    common = {"seeds": {"root": 7}, "image": {"packages": []}}  # no wheel needs to be invented
    spec = parse_spec(json.dumps({**common, **document}).encode(), "test")
    return Lock(
        spec=spec,
        image=locked_image(training_code_digest()),
    )


def evaluation(returns=RETURNS) -> Evaluation:
    points = tuple(
        EvaluationPoint(
            step=step,
            returns=tuple(value.hex() for value in values),
            lengths=(1,) * len(values),
        )
        for step, values in returns.items()
    )
    return Evaluation(starts=((0,),) * len(points[0].returns), points=points)


GENERATIONS = [
    Generation(
        number=number,
        member=number % 2,
        parent=None if number < 2 else number - 2,
        step=100 * number,
        parent_step=None if number < 2 else 100,
        hyperparameters={"learning_rate": (0.001 * (number + 1)).hex()},
        score=None,
        rival=None,
        rival_score=None,
        copied=number == 2,
    )
    for number in range(3)
]


def pack(folder: Path, document=DQN, *, machine=MACHINE, name=None, **parts) -> Path:
    """Write the bundle of a run of a spec into ``folder``.

    Args:
        folder: Where to.
        document: The spec.
        machine: Where it says that it ran.
        name: File name of the bundle, if it is to have another one.
        parts: ``events``, ``outputs``, ``evaluation``, ``log``, ``flags``: instead of the usual.
    """
    run = finished(folder, document, machine=machine, **parts)
    key = folder / "alice"
    generate(key)
    bundle, _ = pack_run(run, load_private(key), folder, Cache(folder / "cache"), embed_image=False)
    return bundle if name is None else bundle.rename(folder / name)


def finished(folder: Path, document=DQN, *, machine=MACHINE, **parts) -> FinishedRun:
    """Write the directory of a run, which is ``run`` in ``folder``; see :func:`pack`."""
    lock = make_lock(document)
    directory = folder / "run"
    directory.mkdir(parents=True)
    write = _write_program if "command" in document["trainer"] else _write_training
    write(directory, lock, parts)
    runtime = contract.Runtime(
        flags=parts.get("flags", {"environment.PYTHONHASHSEED": "0"}),
        libraries={"python": "3.11.2", "torch": "2.13.0+cpu"},
        device={"kind": "cpu"},
    )
    _write(directory, contract.RUNTIME, runtime)
    write_entropy_report(directory, lock)
    write_ledger(directory, "process", None)
    (directory / contract.LOG).write_text(parts.get("log", "a line\n"))
    events = parts.get("events", _events())
    lines = "".join(
        event if isinstance(event, str) else json.dumps(event) + "\n" for event in events
    )
    (directory / contract.EVENTS).write_text(lines)
    started = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    return FinishedRun(lock, None, machine.engine, machine, started, directory)


def _events():
    return [
        {
            "time": 0.0,
            "kind": "progress",
            "step": step,
            "episode_return": step / 10,
            "loss": 1 / step,
        }
        for step in range(10, STEPS + 1, 10)
    ]


def _write(directory, name, model):
    (directory / name).write_bytes(model.document())


def _write_training(directory, lock, parts):
    population = lock.spec.trainer.algorithm == "impala"
    tensor = np.arange(4, dtype=np.float32)
    total = lock.spec.trainer.total_steps
    name = contract.checkpoint_name(total)
    (directory / contract.CHECKPOINTS).mkdir()
    save_file({"parameters/w": tensor}, directory / contract.CHECKPOINTS / f"{name}.safetensors")
    head, lines = GENESIS, []
    for step in range(100, STEPS + 1, 100):
        record = {"step": step, "loss": "aa"}
        if population and step == 100:
            record["generations"] = {each.name: each.facts() for each in GENERATIONS}
        line = json.dumps(record).encode()
        head = extend(head, line)
        lines.append(line + b"\n")
    (directory / contract.TRACE).write_bytes(b"".join(lines))
    digest = contract.tensor_digest("F32", (4,), tensor.tobytes())
    checkpoint = contract.Checkpoint(
        step=total, tensors={"parameters/w": digest}, trace_head=head.hex()
    )
    _write(
        directory, contract.CHECKPOINT_INDEX, contract.CheckpointIndex(checkpoints=(checkpoint,))
    )
    _write(directory, contract.STREAMS, contract.StreamProfiles(streams=()))
    _write(directory, contract.EVALUATION, parts.get("evaluation", evaluation()))
    if population:
        _write(directory, contract.POPULATION, contract.Ancestry(generations=tuple(GENERATIONS)))
    result = contract.Result(
        complete=True,
        steps=total,
        episodes=12,
        trace_records=len(lines),
        trace_head=head.hex(),
        parameters=sha256_hex(canonical_json({"w": digest})),
        seconds=80.0,
    )
    _write(directory, contract.RESULT, result)


def _write_program(directory, lock, parts):
    metrics = "".join(json.dumps(line) + "\n" for line in METRICS)
    files = parts.get("outputs", {"outputs/metrics.jsonl": metrics, "model.bin": "weights"})
    listed = {}
    for path, content in files.items():
        place = directory / contract.WORKSPACE / path
        place.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode()
        place.write_bytes(data)
        listed[path] = contract.Output(size=len(data), sha256=sha256_hex(data))
    printed = b"done\n"
    (directory / contract.STANDARD_OUTPUT).write_bytes(printed)
    standard = contract.Output(size=len(printed), sha256=sha256_hex(printed))
    outputs = contract.Outputs(files=listed, standard_output=standard)
    _write(directory, contract.OUTPUTS, outputs)
    digest = sha256_hex((directory / contract.OUTPUTS).read_bytes())
    _write(
        directory,
        contract.RESULT,
        contract.ProgramResult(outputs=digest, seconds=3.0),
    )


def hostile_bundle(folder):
    """Pack a run in which every text that its signer chooses is an attack."""
    metrics = [{"step": 1, HOSTILE: 1.0, "inf": 1e308}, {"step": 2, HOSTILE: -1e308, "nan": "nan"}]
    lines = "".join(json.dumps(line) + "\n" for line in metrics)
    return pack(
        folder,
        {"name": "hostile", "trainer": {"command": ["python", HOSTILE]}},
        machine=MACHINE.model_copy(
            update={"cpu": MACHINE.cpu.model_copy(update={"name": HOSTILE}), "kernel": HOSTILE}
        ),
        name="a<b>&'\".capsule.tar",
        outputs={"metrics.jsonl": lines + "not json\n", HOSTILE.replace("/", "|"): "x"},
        log=HOSTILE,
        flags={"environment.PYTHONHASHSEED": HOSTILE},
    )
