# ruff: noqa: INP001
"""Build, run and verify on a GPU, and pack the results: see scripts/gpu-acceptance.sh.

The report contains the command, status, time and output of every step, whether or not the step
succeeds. A step that fails does not prevent the others.

usage: python scripts/gpu_acceptance.py cuda|cpu FOLDER
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from capsule.bundle.keys import load_private
from capsule.bundle.sshsig import sign
from capsule.experiment import contract
from capsule.host.errors import CapsuleError
from capsule.machine.devices import read_devices, visible_devices
from capsule.machine.gpu import load_nvml

ROOT = Path(__file__).resolve().parents[1]
CAPSULE = (sys.executable, "-m", "capsule")
# Settings in addition to a spec, by the kind of accelerator. A context of CUDA needs more memory.
ACCELERATORS: dict[str, tuple[str, ...]] = {
    "cuda": (
        "accelerator={kind: cuda, cuda: '13.0', cudnn: '>=9.10', driver: '>=580.65'}",
        "limits.memory_mb=16384",
    ),
    "cpu": ("accelerator={kind: cpu, numerics: native}",),
}
# Specs of a minute or two on a CPU, all on Breakout, and further settings. IMPALA's actors play in
# lockstep, because the bits of an asynchronous run depend on the order of arrival.
TRAINERS: dict[str, tuple[str, ...]] = {
    "dqn": (),
    "r2d2": (),
    "impala": ("trainer.schedule={mode: lockstep, policy_lag: 2}",),
}
# Settings with which a GPU's results vary (Nagarajan et al. 2019, arXiv:1809.05676, section 4,
# group GPU). TF32 gives different bits at a different speed, but the same bits each time, so it is
# tested separately.
LOOSE = ("determinism.algorithms=off", "determinism.cudnn_benchmark=true")
TF32 = ("determinism.tf32=true",)
GRAPHS = ("accelerator.cuda_graphs=true",)  # changes no bit; supported by these trainers:
WITH_GRAPHS = ("dqn", "r2d2")
# Facts about the machine, and the commands that print them. Each is a step, so that a command that
# fails does not hide the others.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "the driver": ("nvidia-smi", "-q"),
    "the container toolkit": ("nvidia-ctk", "--version"),
    "its CDI devices": ("nvidia-ctk", "cdi", "list"),
    **{
        f"docker's {field}": ("docker", "info", "--format", f"{{{{json .{field}}}}}")
        for field in ("ServerVersion", "Runtimes", "CDISpecDirs", "DiscoveredDevices")
    },
    "the architectures of torch": (
        *(sys.executable, "-c"),
        "import torch; print(torch.__version__, torch.cuda.get_arch_list())",
    ),
}
BENCHMARKS = {
    "dqn": ("dqn.py", "--gpu", "--rounds", "3"),
    "r2d2": ("r2d2.py", "--gpu", "--only", "learner", "--rounds", "2"),
}
READ_BACK = (contract.RUNTIME, contract.FAILURE)
LOG_BYTES = 64 << 10  # of the log of a failed run, from its end
# The maximum size of a member of a bundle in the report. Networks and layers are larger, and GitHub
# accepts attachments of up to 25 MB.
MEMBER_BYTES = 2 << 20
KEY = "key"
NAMESPACE = "capsule-gpu-acceptance"  # of the report's signature
LONGEST = 3_600  # seconds of one step


@dataclass(frozen=True)
class Step:
    """One command of the acceptance.

    Attributes:
        name: Purpose of the command.
        command: The command and its arguments.
        status: Exit status; None if it took too long.
        seconds: Wall-clock time in seconds.
        output: Standard output.
        errors: Standard error.
    """

    name: str
    command: Sequence[str]
    status: int | None
    seconds: float
    output: str
    errors: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON object that the command printed; empty if it printed none."""
        try:
            return dict(json.loads(self.output))
        except ValueError:
            return {}

    @property
    def summary(self) -> str:
        """The status of the command, and the last line that it wrote for readers."""
        text = self.errors if self.document else self.output.strip() or self.errors
        last = (text.strip() or "no output").splitlines()[-1]
        return f"- {self.name}: status {self.status} after {self.seconds:.0f} s: {last[:200]}"


@dataclass
class Acceptance:
    """The steps so far, and the folder to which they write."""

    kind: str
    folder: Path
    steps: list[Step] = field(default_factory=list)

    def do(self, name: str, *words: object) -> Step:
        """Execute a command in the folder, and keep its output."""
        command = list(map(str, words))
        note(f"== {name}")
        begun = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LONGEST,
                check=False,
            )
            status, output, errors = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            status, output, errors = None, "", f"stopped after {LONGEST:,} seconds"
        except OSError as error:
            status, output, errors = 127, "", str(error)
        step = Step(name, command, status, time.monotonic() - begun, output, errors)
        self.steps.append(step)
        note(f"   status {status} after {step.seconds:.0f} s")
        return step

    def spec(self, name: str, *settings: str) -> list[object]:
        """Return the arguments that name a trainer's spec with settings."""
        changes = (*ACCELERATORS[self.kind], *TRAINERS[name], *settings)
        words = [word for each in changes for word in ("--set", each)]
        return [ROOT / "specs" / f"{name}-breakout-small.yaml", *words]

    def build(self, name: str) -> Step:
        """Build the image of a trainer's spec."""
        return self.do(f"{name}: build", *CAPSULE, "build", *self.spec(name), "--json")

    def train(self, name: str, title: str, *settings: str, options: Sequence[str] = ()) -> Step:
        """Run a trainer's spec, and write a bundle."""
        words = (*self.spec(name, *settings), *options, "--key", KEY, "--json")
        return self.do(f"{name}: {title}", *CAPSULE, "run", *words)

    def verify(self, name: str, run: Step) -> str:
        """Execute the run of a bundle again, and return the verdict."""
        if (bundle := run.document.get("bundle")) is None:
            return "no bundle"
        report = f"{Path(bundle).stem}.report.json"
        words = (bundle, "--key", f"{KEY}.pub", "--report", report, "--json")
        done = self.do(f"{name}: verify", *CAPSULE, "verify", *words)
        return str(done.document.get("verdict", "no verdict"))

    def shown(self, run: Step) -> tuple[str, float] | None:
        """Return the digest of the final network and the agent steps per second of a run."""
        if (bundle := run.document.get("bundle")) is None:
            return None
        found = self.do(f"show {Path(bundle).name}", *CAPSULE, "show", bundle, "--json").document
        if not found:
            return None
        return found["claims"]["parameters"], found["observations"]["steps_per_second"]


def accept(acceptance: Acceptance) -> Iterator[str]:
    """Execute every step, and yield the lines of the summary."""
    acceptance.do("a key for this report", *CAPSULE, "keygen", KEY)
    on_gpu = acceptance.kind == "cuda"
    if on_gpu:
        for name, question in QUESTIONS.items():
            acceptance.do(name, *question)
        yield acceptance.do("the machine", *CAPSULE, "doctor", "--gpu").summary
        tests = (sys.executable, "-m", "pytest", ROOT / "tests", "--rootdir", ROOT)
        options = ("-c", ROOT / "pyproject.toml", "-m", "gpu", "-q", "-n", "0")
        yield acceptance.do("the tests that need a GPU", *tests, *options).summary
    runs = {}
    for name in TRAINERS:
        yield acceptance.build(name).summary
        runs[name] = run = acceptance.train(name, "run")
        yield run.summary
        yield f"- **{name}: {acceptance.verify(name, run)}**"
        yield _twice(acceptance, name, run, "without flags", LOOSE)
    if on_gpu:
        yield _twice(acceptance, "dqn", runs["dqn"], "with TF32", TF32)
        for name in WITH_GRAPHS:
            graphs = acceptance.train(name, "run with CUDA graphs", *GRAPHS)
            yield _compared(acceptance, f"{name} with CUDA graphs", runs[name], graphs)
        plain = ("--engine", "process")
        yield acceptance.train("dqn", "run as a plain process", options=plain).summary
        for name, (script, *words) in BENCHMARKS.items():
            program = (sys.executable, ROOT / "benchmarks" / script)
            yield acceptance.do(f"{name}: benchmark", *program, *words).summary
        yield from _several(acceptance, runs["impala"])


def _twice(
    acceptance: Acceptance, name: str, run: Step, title: str, settings: Sequence[str]
) -> str:
    """Run twice with settings that differ from those of a run, and compare results and speeds."""
    others = [acceptance.train(name, f"run {which} {title}", *settings) for which in (1, 2)]
    usual, *found = (acceptance.shown(each) for each in (run, *others))
    first, second = found
    if usual is None or first is None or second is None:
        return f"- {name} {title}: a run failed"
    same = "the same network twice" if first[0] == second[0] else "another network each time"
    speeds = f"{usual[1]:,.0f} agent steps/s in the first run, {first[1]:,.0f} {title}"
    return f"- {name} {title}: {same}; {speeds}"


def _several(acceptance: Acceptance, alone: Step) -> Iterator[str]:
    """Share IMPALA's gradient between two GPUs, if there are two."""
    gpus = len(visible_devices(read_devices(load_nvml()), os.environ))
    if gpus < 2:
        yield f"- impala with two learners: not tested, because visible GPUs: {gpus}"
        return
    both = acceptance.train("impala", "run with two learners", options=("--learners", "2"))
    yield _compared(acceptance, "impala with two learners", alone, both)


def _compared(acceptance: Acceptance, title: str, usual: Step, other: Step) -> str:
    """Compare a run with the first one, which must have the same network."""
    before, after = (acceptance.shown(each) for each in (usual, other))
    if before is None or after is None:
        return f"- {title}: a run failed"
    same = "the same network" if before[0] == after[0] else "**another network**"
    speeds = f"{before[1]:,.0f} agent steps/s in the first run, {after[1]:,.0f} in this one"
    return f"- {title}: {same}; {speeds}"


def pack(acceptance: Acceptance, summary: Sequence[str]) -> Path:
    """Write the report and the documents on which it is based into one archive."""
    folder = acceptance.folder
    described = acceptance.do("the commit", "git", "-C", ROOT, "describe", "--always", "--dirty")
    commit = described.output.strip() or "an unknown commit"
    head = f"# Acceptance on {platform.node()}: {acceptance.kind}\n\nCapsule at {commit}\n\n"
    (folder / "report.md").write_text(head + "\n".join(summary) + "\n")
    document = {
        "schema": "capsule/gpu-acceptance/v1",
        "commit": commit,
        "kind": acceptance.kind,
        "summary": list(summary),
        "steps": [asdict(step) for step in acceptance.steps],
    }
    (folder / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    archive = folder.with_name(f"{folder.name}.tar.gz")
    names = ("report.md", "report.json", f"{KEY}.pub", "*.report.json")
    paths = {path for name in names for path in folder.glob(name)} | set(_of_failed(folder))
    with tarfile.open(archive, "w:gz") as stream:
        for path in sorted(paths):
            stream.add(path, arcname=f"{folder.name}/{path.relative_to(folder)}")
        for bundle in sorted(folder.glob("runs/*/*.capsule.tar")):
            _add_small_members(bundle, stream, f"{folder.name}/{bundle.relative_to(folder)}")
    return archive


def _add_small_members(bundle: Path, stream: tarfile.TarFile, place: str) -> None:
    """Add a bundle's claims, trace and other small files below ``place``."""
    with tarfile.open(bundle) as opened:
        for member in opened:
            if member.size <= MEMBER_BYTES:
                content = opened.extractfile(member)
                member.name = f"{place}/{member.name}"
                stream.addfile(member, content)


def _of_failed(folder: Path) -> Iterator[Path]:
    """Yield the files that explain runs without a bundle: flags, failure and the end of the log."""
    for directory in folder.glob("runs/*"):
        if any(directory.glob("*.capsule.tar")):
            continue
        yield from (path for name in READ_BACK if (path := directory / "work" / name).is_file())
        if (log := directory / "work" / contract.LOG).is_file():
            end = directory / "end-of-output.log"
            end.write_bytes(log.read_bytes()[-LOG_BYTES:])
            yield end


def signed(archive: Path, key: Path) -> str:
    """Sign an archive as ssh-keygen does; return the path of the signature, or the error.

    ssh-keygen itself is not used, because OpenSSH reads private keys in PKCS#8 only since 9.6.
    """
    path = archive.with_name(f"{archive.name}.sig")
    try:
        path.write_bytes(sign(archive.read_bytes(), load_private(key), NAMESPACE))
    except (CapsuleError, OSError) as error:
        return f"none: {error}"
    return str(path)


def note(line: str) -> None:
    """Write a line without buffering."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main(kind: str, folder: Path) -> int:
    """Test the GPU; return 0 if the run of every trainer was reproduced bit for bit, or else 1."""
    folder.mkdir(parents=True)
    acceptance = Acceptance(kind, folder.resolve())
    summary: list[str] = []
    try:
        for line in accept(acceptance):
            summary.append(line)
            note(line)
    except Exception:  # noqa: BLE001 - what was found until then is packed all the same
        summary.append(f"- **stopped by an error**\n\n```\n{traceback.format_exc()}```")
        note(summary[-1])
    archive = pack(acceptance, summary)
    signature = signed(archive, acceptance.folder / KEY)
    note(f"report     {folder / 'report.md'}\nattach     {archive}\nsignature  {signature}")
    reproduced = {f"- **{name}: reproduced-bitwise**" for name in TRAINERS}
    return int(not reproduced <= set(summary))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
