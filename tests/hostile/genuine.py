"""Two small runs as Capsule bundles them, without an engine and without training.

Every document is one that the code of Capsule makes and accepts; only the numbers are invented.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from packaging.requirements import Requirement

from capsule.bundle import archive, run_bundle
from capsule.bundle.bundle import Content, open_bundle, pack
from capsule.bundle.claims import Observations, claims_model
from capsule.bundle.derived import derived_members
from capsule.bundle.envelope import BundleStatement, sign
from capsule.bundle.keys import PrivateKey, load_private, load_public
from capsule.bundle.manifest import CHECKSUMS, ENVELOPE, MANIFEST
from capsule.bundle.packing import FinishedRun, pack_run
from capsule.bundle.run_bundle import Kind, members_of
from capsule.entropy import profile
from capsule.entropy.evidence import Evidence
from capsule.entropy.journal import Call, EntropyCall
from capsule.entropy.ledger import compute_ledger
from capsule.entropy.report import EntropyReport
from capsule.experiment import contract, trace
from capsule.experiment.arrival_log import (
    NOTHING,
    ArrivalLog,
    Completions,
    Messages,
    parse_arrivals,
)
from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.fields import Model
from capsule.experiment.lock import (
    Lock,
    LockedCode,
    LockedDebianPackage,
    LockedImage,
    LockedProject,
    LockedWheel,
)
from capsule.experiment.spec import CodeSpec, EntropySpec, GymnasiumEnvironment, ImageSpec, Spec
from capsule.experiment.trainers import CommandTrainer, DqnTrainer
from capsule.image.archives.layers import TarEntry, file_entry, write_tar
from capsule.image.assembly.assemble import Image, image_config
from capsule.image.assembly.making import ASSEMBLER_VERSION, Layer
from capsule.image.cache import Cache
from capsule.image.distribution import DEBIAN_12
from capsule.image.recipe import load_recipe
from capsule.image.resolution.debian import shipped_base
from capsule.image.resolution.project import read_project
from capsule.machine.fingerprint import Cpu, Fingerprint, OperatingSystem
from capsule.machine.gpu import Driver
from tests.entropy.evidence import make_mechanisms, make_report

FINAL = "checkpoints/step-000000000008.safetensors"
INDEX = run_bundle.RUN + contract.CHECKPOINT_INDEX
TRACE = run_bundle.RUN + contract.TRACE
LOG = run_bundle.RUN + contract.LOG
RESULT = run_bundle.RUN + contract.RESULT
EVALUATION = run_bundle.RUN + contract.EVALUATION
PROJECT_LAYER = run_bundle.LAYER.format(name="project")
BASE_LAYER = run_bundle.LAYER.format(name="base")

Files = dict[str, bytes]
Change = Callable[[Files], object]


# With a package beyond Capsule's own list the base layer is one whose digest nobody knows.
EXTRA = LockedDebianPackage(
    name="hello",
    version="2.10-3",
    architecture="amd64",
    pool="pool/main/h/hello/hello_2.10-3_amd64.deb",
    size=1,
    sha256=sha256_hex(b"hello"),
    requested=True,
)
BASE_ENTRIES = [file_entry("etc/os-release", "test", b"ID=debian\n")]
_SIGNING_KEY = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
SIGNER = PrivateKey(_SIGNING_KEY)
STRANGER = PrivateKey(Ed25519PrivateKey.from_private_bytes(bytes([2]) * 32))


@dataclass(frozen=True)
class Run:
    """A bundle in parts.

    Attributes:
        files: Path to content, of what the manifest lists.
        facts: Path to role and media type.
    """

    files: Mapping[str, bytes]
    facts: Mapping[str, tuple[str, str]]


def packed(run: Run, path: Path, change: Change | None = None, key: PrivateKey = SIGNER) -> Path:
    """Write a bundle of a run whose files were changed: whatever it says now, validly signed."""
    files = dict(run.files)
    if change is not None:
        change(files)
    kinds = rederive(files, run.files)
    contents = {
        name: Content(data, *{**run.facts, **kinds}.get(name, ("run", "application/octet-stream")))
        for name, data in files.items()
    }
    return pack(contents, sha256_hex(files[run_bundle.CLAIMS]), key, path)


def documents(manifest: dict, key: PrivateKey = SIGNER, **statement: object) -> Files:
    """Return envelope, manifest and checksums for any manifest, signed as it is."""
    document = canonical_json(manifest)
    sums = {MANIFEST: sha256_hex(document)}
    sums |= {file["path"]: file["sha256"] for file in manifest["files"]}
    checksums = "".join(f"{digest}  {path}\n" for path, digest in sums.items()).encode()
    subjects = ((MANIFEST, document), (CHECKSUMS, checksums))
    fields = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": n, "digest": {"sha256": sha256_hex(data)}} for n, data in subjects],
        "predicateType": "https://capsule-rl.dev/run/v1",
        "predicate": {"schema": "capsule/run/v1", "claimId": manifest["claimId"]},
        **statement,
    }
    signed = sign(BundleStatement.model_validate_json(json.dumps(fields)), key)
    return {ENVELOPE: signed, MANIFEST: document, CHECKSUMS: checksums}


def manifest_of(run: Run) -> dict:
    """Return the manifest of a run's bundle as plain JSON."""
    with (
        TemporaryDirectory() as folder,
        open_bundle(packed(run, Path(folder, "b")), []) as bundle,
    ):
        return json.loads(bundle.manifest.document())


def write_members(path: Path, members: Mapping[str, bytes]) -> Path:
    """Write a canonical archive of any members, in their order."""
    with path.open("wb") as stream:
        archive.write(stream, [(name, len(data), data) for name, data in members.items()])
    return path


def edit_json(files: Files, name: str, edit: Callable[[dict], object]) -> None:
    document = json.loads(files[name])
    edit(document)
    files[name] = canonical_json(document)


def forged(
    bundle: Path, public: Path, key: Path, change: Callable[[Files], object], destination: Path
) -> Path:
    """Repack a bundle with changed files, signed by ``key``: a lie with a valid signature."""
    with open_bundle(bundle, [load_public(public)]) as opened:
        files = {path: staged.read_bytes() for path, staged in opened.files.items()}
        facts = {each.path: (each.role, each.media_type) for each in opened.manifest.files}
    before = dict(files)
    change(files)
    rederive(files, before)
    contents = {path: Content(data, *facts[path]) for path, data in files.items()}
    claim_id = sha256_hex(files[run_bundle.CLAIMS])
    return pack(contents, claim_id, load_private(key), destination)


def relock(files: Files, edit: Callable[[dict], object]) -> None:
    """Change the lock, and with it the job and the claims, so that they agree again."""
    edit_json(files, run_bundle.LOCK, edit)
    spec = json.loads(files[run_bundle.LOCK])["spec"]
    edit_json(files, run_bundle.JOB, lambda job: job.update(spec=spec))
    digest = sha256_hex(files[run_bundle.LOCK])
    edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(lock=digest))


def rederive(files: Files, before: Mapping[str, bytes]) -> Mapping[str, Kind]:
    """Make again what follows from documents that were changed, unless it was changed itself.

    Returns:
        Role and media type of the members that the run has now.
    """
    try:
        lock = Lock.model_validate_json(files[run_bundle.LOCK])
        claims = claims_model(lock).model_validate_json(files[run_bundle.CLAIMS])
        observed = Observations.model_validate_json(files[run_bundle.OBSERVATIONS])
    except ValueError:  # not documents any more, which the reader will notice first
        return {}
    embedded = run_bundle.IMAGE_ARCHIVE in files
    kinds = members_of(lock, claims, embedded=embedded, with_data=False)
    for path, data in derived_members(lock, claims, observed, kinds).items():
        if path in files and files[path] == before.get(path):
            files[path] = data
    return kinds


def reclaim_trace(files: Files) -> None:
    """Claim whatever the trace is now."""
    records = [line for line in files[TRACE].split(b"\n")[:-1] if b'"records"' not in line]
    head = trace.GENESIS
    for line in records:
        head = trace.extend(head, line)
    claim = {"records": len(records), "head": head.hex()}
    edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(trace=claim))
    traced = {"trace_records": claim["records"], "trace_head": claim["head"]}
    edit_json(files, RESULT, lambda result: result.update(traced))


def safetensors(tensors: Mapping[str, tuple[str, list[int], bytes]]) -> bytes:
    """Return a safetensors file: name to dtype, shape and bytes."""
    header, start = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [start, start := start + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    packed_header = json.dumps(header).encode()
    length = len(packed_header).to_bytes(8, "little")
    return length + packed_header + b"".join(data for _, _, data in tensors.values())


# Making the runs


@cache
def training() -> Run:
    """Return a training run of eight steps, in an image."""
    return _bundled(DqnTrainer(algorithm="dqn", network="mlp", total_steps=8), _training_files)


@cache
def program() -> Run:
    """Return the run of a program of the user's own, with its source tree, entropy recorded."""
    trainer = CommandTrainer(command=("python", "train.py"))
    return _bundled(trainer, _program_files, entropy=EntropySpec(mode="recorded"))


@cache
def outside(kind: Literal["training", "program"]) -> Run:
    """Return one of these runs as the plain-process engine makes it, without an image."""
    if kind == "training":
        trainer = DqnTrainer(algorithm="dqn", network="mlp", total_steps=8)
        return _bundled(trainer, _training_files, engine="process")
    trainer = CommandTrainer(command=("python", "train.py"))
    recorded = EntropySpec(mode="recorded")
    return _bundled(trainer, _program_files, engine="process", entropy=recorded)


def _bundled(
    trainer: object,
    write: Callable[[Path, Lock], None],
    engine: str = "docker",
    **settings: object,
) -> Run:
    with TemporaryDirectory() as name:
        folder = Path(name)
        store, run = Cache(folder / "cache"), folder / "run"
        run.mkdir()
        project = None
        if isinstance(trainer, CommandTrainer):
            project = _project(folder, store)
            settings["code"] = CodeSpec()
        else:
            settings["environment"] = GymnasiumEnvironment(suite="gymnasium", id="CartPole-v1")
        lock = Lock(
            spec=Spec(
                name="small",
                trainer=trainer,
                image=ImageSpec(packages=(), debian=(EXTRA.name,)),
                **settings,
            ),
            image=LockedImage(
                assembler=ASSEMBLER_VERSION,
                recipe="cpu",
                recipe_sha256=load_recipe("cpu", "debian-12").digest(),
                debian=(*shipped_base(DEBIAN_12).packages, EXTRA),
                base=_tar_digest(BASE_ENTRIES),
                wheels=_wheels(folder, store),
                code=LockedCode(version="0.1.0", sha256=sha256_hex(b"code")),
            ),
            project=project,
        )
        image = None if engine == "process" else _image(lock, folder, store)
        _write_common(run, lock)
        write(run, lock)
        write_ledger(run, engine, None if image is None else image.config_digest)
        finished = FinishedRun(
            lock=lock,
            image=image,
            engine={"name": engine},
            fingerprint=_FINGERPRINT.model_copy(update={"engine": {"name": engine}}),
            started=datetime(2026, 1, 1, tzinfo=UTC),
            directory=run,
        )
        path, _ = pack_run(finished, SIGNER, folder, store, embed_image=False)
        with open_bundle(path, [SIGNER.public]) as bundle:
            files = {path: bundle.content(path) for path in bundle.files}
            facts = {file.path: (file.role, file.media_type) for file in bundle.manifest.files}
    return Run(files, facts)


_FINGERPRINT = Fingerprint(
    cpu=Cpu(),
    memory_bytes=1 << 34,
    kernel="6.1",
    os=OperatingSystem(),
    driver=Driver(nvml="not found"),
)


def _tar_digest(entries: Iterable[TarEntry]) -> str:
    digest = hashlib.sha256()
    write_tar(entries, digest.update)
    return digest.hexdigest()


def _layer(folder: Path, name: str, entries: Iterable[TarEntry]) -> Layer:
    path = folder / f"{name}.tar"
    with path.open("wb") as stream:
        write_tar(entries, stream.write)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Layer(name, f"sha256:{digest}", path, path.stat().st_size)


def _wheels(folder: Path, store: Cache) -> tuple[LockedWheel, ...]:
    """Make a wheel of metadata alone for each requirement of the recipe."""
    wheels = []
    for requirement in map(Requirement, load_recipe("cpu", "debian-12").packages):
        path = folder / f"{requirement.name}-99-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            name = zipfile.ZipInfo(f"{requirement.name}-99.dist-info/METADATA")
            archive.writestr(name, f"Name: {requirement.name}\nVersion: 99\n")
        digest = sha256_hex(path.read_bytes())
        store.add(path, digest)
        wheels.append(
            LockedWheel(name=requirement.name, version="99", filename=path.name, sha256=digest)
        )
    return tuple(sorted(wheels, key=lambda wheel: wheel.name))


def _project(folder: Path, store: Cache) -> LockedProject:
    layer = _layer(folder, "project", [file_entry("project/train.py", "test", b"print(1)\n")])
    store.trees.add(layer.path, layer.diff_id.removeprefix("sha256:"))
    facts, digest = read_project(layer.path)
    return LockedProject(sha256=digest, size=layer.size, files=facts, git=None)


def _image(lock: Lock, folder: Path, store: Cache) -> Image:
    layers = [
        _layer(folder, "base", BASE_ENTRIES),
        _layer(folder, "code", [file_entry("usr/lib/code.py", "test", b"pass\n")]),
    ]
    if lock.project is not None:
        path = store.trees.path(lock.project.sha256)
        layers.append(Layer("project", f"sha256:{lock.project.sha256}", path, lock.project.size))
    config = image_config(
        lock, load_recipe("cpu", "debian-12"), [(la.name, la.diff_id) for la in layers]
    )
    return Image(config, tuple(layers), "localhost/test")


def _write(run: Path, name: str, document: Model) -> None:
    (run / name).write_bytes(document.document())


def _write_common(run: Path, lock: Lock) -> None:
    runtime = contract.Runtime(flags={"threads": "1"}, libraries={"torch": "2"}, device={})
    _write(run, contract.RUNTIME, runtime)
    (run / contract.EVENTS).write_bytes(b"")
    (run / contract.LOG).write_bytes(b"started\n")
    write_entropy_report(run, lock)


def write_entropy_report(run: Path, lock: Lock) -> None:
    """Write the account of a run that asked for no entropy."""
    _write(
        run,
        contract.ENTROPY_REPORT,
        make_report(
            mode="record" if lock.spec.entropy.mode == "recorded" else "virtual",
            programs=(),
            uses=(),
        ),
    )


def write_ledger(run: Path, engine: str, image: str | None) -> None:
    """Write the ledger that follows from the documents of a run directory."""
    runtime = contract.Runtime.model_validate_json((run / contract.RUNTIME).read_bytes())
    report = EntropyReport.model_validate_json((run / contract.ENTROPY_REPORT).read_bytes())
    streams = None
    if (run / contract.STREAMS).exists():
        streams = contract.StreamProfiles.model_validate_json((run / contract.STREAMS).read_bytes())
    mechanisms = make_mechanisms(program=streams is None)
    _write(run, contract.MECHANISMS, mechanisms)
    arrivals = run / contract.ARRIVALS
    evidence = Evidence(
        runtime=runtime,
        mechanisms=mechanisms,
        report=report,
        streams=streams,
        arrivals=parse_arrivals(arrivals.read_bytes()) if arrivals.exists() else None,
        engine={"name": engine},
        image=image,
    )
    (run / contract.LEDGER).write_bytes(compute_ledger(evidence).document())


def _training_files(run: Path, _lock: Lock) -> None:
    weights = bytes(range(16))
    lines = [
        json.dumps({"step": step, "streams": f"{step:032x}"}, separators=(",", ":")).encode()
        for step in (4, 8)
    ]
    (run / contract.TRACE).write_bytes(b"".join(line + b"\n" for line in lines))
    traced = trace.trace_heads(run / contract.TRACE)
    (run / contract.CHECKPOINTS).mkdir()
    (run / FINAL).write_bytes(safetensors({"parameters/weight": ("F32", [2, 2], weights)}))
    digest = contract.tensor_digest("F32", (2, 2), weights)
    tensors = {"parameters/weight": digest}
    checkpoint = contract.Checkpoint(step=8, tensors=tensors, trace_head=traced.last)
    _write(run, contract.CHECKPOINT_INDEX, contract.CheckpointIndex(checkpoints=(checkpoint,)))
    point = contract.EvaluationPoint(step=8, returns=((9.0).hex(),), lengths=(9,))
    _write(run, contract.EVALUATION, contract.Evaluation(starts=((0,),), points=(point,)))
    stream = contract.StreamProfile(name="no-op", seed=1, key="0", draws=0, digest="0" * 64)
    _write(run, contract.STREAMS, contract.StreamProfiles(streams=(stream,)))
    result = contract.Result(
        complete=True,
        steps=8,
        episodes=1,
        trace_records=traced.records,
        trace_head=traced.last,
        parameters=sha256_hex(canonical_json({"weight": digest})),
        seconds=1.0,
    )
    _write(run, contract.RESULT, result)


def _program_files(run: Path, _lock: Lock) -> None:
    (run / contract.WORKSPACE).mkdir()
    written = {"score.txt": b"9\n", "runs/model.npz": b"numbers"}
    for name, data in written.items():
        (run / contract.WORKSPACE / name).parent.mkdir(exist_ok=True)
        (run / contract.WORKSPACE / name).write_bytes(data)
    (run / contract.STANDARD_OUTPUT).write_bytes(b"1\n")
    outputs = contract.Outputs(
        files={name: _output(data) for name, data in written.items()},
        standard_output=_output(b"1\n"),
    )
    _write(run, contract.OUTPUTS, outputs)
    digest = sha256_hex((run / contract.OUTPUTS).read_bytes())
    _write(run, contract.RESULT, contract.ProgramResult(outputs=digest, seconds=1.0))
    call = Call(EntropyCall.GETRANDOM, "libc.so.6", 4, b"abcd")
    threads = (profile.ThreadProfile("0", "0", (call,)),)
    document = profile.serialize(profile.Profile(profile.X86_64, threads))
    (run / contract.ENTROPY_PROFILE).write_bytes(document)
    waits = {
        "0.1x/0~1": Completions(tasks=3, order=(1, 0, 2)),
        "mail~1": Messages(sources=("a", "b"), order=(0, NOTHING, 1)),
    }
    (run / contract.ARRIVALS).write_bytes(ArrivalLog(waits=waits).document())


def _output(data: bytes) -> contract.Output:
    return contract.Output(size=len(data), sha256=sha256_hex(data))
