"""Image documents, outputs and traces that say what no run can have left (cases 33, 35, 38, 40)."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import zstandard

from capsule.bundle import run_bundle
from capsule.bundle.sbom import image_sbom
from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.lock import Lock
from capsule.image.archives.layers import file_entry, write_tar
from tests.hostile.document_cases import described
from tests.hostile.genuine import (
    FINAL,
    INDEX,
    PROJECT_LAYER,
    TRACE,
    Change,
    Files,
    edit_json,
    program,
    reclaim_trace,
    relock,
    safetensors,
)
from tests.hostile.presenting import changed

CONFIG, MANIFEST = run_bundle.IMAGE_CONFIG, run_bundle.IMAGE_MANIFEST


def configured(edit: Callable[[dict], object]) -> Change:
    """Change the image's configuration, and let manifest and claims agree with it."""

    def change(files: Files) -> None:
        edit_json(files, CONFIG, edit)
        digest = f"sha256:{sha256_hex(files[CONFIG])}"
        layers = json.loads(files[CONFIG])["rootfs"]["diff_ids"]
        size = len(files[CONFIG])
        edit_json(
            files, MANIFEST, lambda manifest: manifest["config"].update(digest=digest, size=size)
        )
        claim = {"config": digest, "layers": layers}
        edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(image=claim))

    return change


def running(**fields: object) -> Change:
    return configured(lambda config: config["config"].update(fields))


def variable(text: str) -> Change:
    return configured(lambda config: config["config"]["Env"].append(text))


def layer(**fields: object) -> Change:
    def change(files: Files) -> None:
        edit_json(files, MANIFEST, lambda manifest: manifest["layers"][0].update(fields))

    return change


def renamed_layer(digest: str) -> Change:
    """Call a layer by what is no digest, in every document."""

    def change(files: Files) -> None:
        configured(lambda config: config["rootfs"]["diff_ids"].__setitem__(1, digest))(files)
        edit_json(files, MANIFEST, lambda manifest: manifest["layers"][1].update(digest=digest))

    return change


def source_tree_outside(files: Files) -> None:
    """Have the source tree bring a file over one of the training code, consistently."""
    layer, before = io.BytesIO(), sha256_hex(files[CONFIG]).encode()
    paths = "project/train.py", "usr/lib/code.py"
    facts = write_tar([file_entry(path, "test", b"evil\n") for path in paths], layer.write)
    size, digest = layer.tell(), sha256_hex(layer.getvalue())
    listed = {p.removeprefix("project/"): fact for p, fact in facts.items() if fact != "directory"}
    relock(
        files,
        lambda lock: lock["project"].update(sha256=digest, size=size, files=listed),
    )
    name = f"sha256:{digest}"
    edit_json(files, MANIFEST, lambda m: m["layers"][-1].update(digest=name, size=size))
    configured(lambda config: config["rootfs"]["diff_ids"].__setitem__(-1, name))(files)
    files[PROJECT_LAYER] = zstandard.compress(layer.getvalue())
    lock, image = Lock.model_validate_json(files[run_bundle.LOCK]), sha256_hex(files[CONFIG])
    files[run_bundle.IMAGE_SBOM] = image_sbom(lock, f"sha256:{image}", {})
    for path in files:
        if path.startswith(("run/", "profiles/")):  # which name the image that ran
            files[path] = files[path].replace(before, image.encode())


def index_of_platforms(files: Files) -> None:
    manifest = json.loads(files[MANIFEST])
    files[MANIFEST] = canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [{**manifest["config"], "platform": {"architecture": "arm64"}}],
        }
    )


IMAGES: dict[str, tuple[int, Change]] = {
    "configuration-of-another-digest": (
        33,
        lambda files: edit_json(files, CONFIG, lambda config: config.update(os="windows")),
    ),
    "layer-of-another-digest": (33, layer(digest="sha256:" + "0" * 64)),
    "layer-from-elsewhere": (33, layer(urls=["https://example.org/layer"])),
    "layer-of-another-kind": (33, layer(mediaType="application/vnd.oci.image.layer.v1.tar+gzip")),
    "layer-of-negative-size": (33, layer(size=-1)),
    "one-layer-more": (
        33,
        lambda files: edit_json(
            files, MANIFEST, lambda manifest: manifest["layers"].append(manifest["layers"][0])
        ),
    ),
    "index-of-platforms": (33, index_of_platforms),
    "annotation": (
        33,
        lambda files: edit_json(files, MANIFEST, lambda m: m.update(annotations={"a": "b"})),
    ),
    "layers-in-another-order": (
        33,
        configured(lambda config: config["rootfs"]["diff_ids"].reverse()),
    ),
    "variable-ld-preload": (35, variable("LD_PRELOAD=/tmp/evil.so")),
    "variable-of-nvidia": (35, variable("NVIDIA_VISIBLE_DEVICES=all")),
    "variable-of-python": (35, variable("PYTHONPATH=/out")),
    "variable-of-cuda": (35, variable("CUDA_INJECTION64_PATH=/out/x.so")),
    "health-check": (35, running(Healthcheck={"Test": ["CMD-SHELL", "id"]})),
    "volume": (35, running(Volumes={"/var/run/docker.sock": {}})),
    "trigger": (35, running(OnBuild=["RUN id"])),
    "signal-to-stop": (35, running(StopSignal="SIGCONT")),
    "root": (35, running(User="0:0")),
    "entry-point": (35, running(Entrypoint=["/bin/sh", "-c"])),
    "command": (35, running(Cmd=["id"])),
    "working-folder": (35, running(WorkingDir="/proc/self/cwd")),
    "open-port": (35, running(ExposedPorts={"22/tcp": {}})),
    "other-architecture": (35, configured(lambda config: config.update(architecture="arm64"))),
}


def output(path: str) -> Change:
    """Claim an output under another name, consistently."""

    def change(files: Files) -> None:
        def move(document: dict, field: str) -> None:
            document[field][path] = document[field].pop("score.txt")

        listing = run_bundle.RUN + contract.OUTPUTS
        edit_json(files, listing, lambda outputs: move(outputs, "files"))
        edit_json(files, run_bundle.CLAIMS, lambda claims: move(claims, "outputs"))
        data = files.pop("workspace/score.txt")
        moved = run_bundle.output_members(
            (name, entry["sha256"]) for name, entry in json.loads(files[listing])["files"].items()
        )
        files[moved[path]] = data

    return change


OUTPUTS = {
    "output-in-the-parent-folder": "../../etc/passwd",
    "output-at-the-root": "/etc/passwd",
    "output-in-an-empty-folder": "a//b",
    "output-with-a-dot": "./score.txt",
    "output-with-nul": "score\0.txt",
    "output-without-a-name": "",
}


def deleted(path: str) -> Change:
    """Claim a deletion, consistently."""

    def change(files: Files) -> None:
        for name in (run_bundle.RUN + contract.OUTPUTS, run_bundle.CLAIMS):
            edit_json(files, name, lambda document: document.update(deleted=[path]))

    return change


def emptied(path: str) -> Change:
    """Claim an empty folder, consistently."""

    def change(files: Files) -> None:
        for name in (run_bundle.RUN + contract.OUTPUTS, run_bundle.CLAIMS):
            edit_json(files, name, lambda document: document.update(empty_folders=[path]))

    return change


CLAIMED_TWICE = {
    "output-that-is-deleted-too": deleted("score.txt"),
    "output-that-is-an-empty-folder-too": emptied("score.txt"),
}


def checkpoint(data: bytes) -> Change:
    return lambda files: files.update({FINAL: data})


def overlapping(files: Files) -> None:
    """Name the same bytes by two tensors, and claim both digests."""
    weights = files[FINAL][-16:]
    names = ("parameters/w", "parameters/weight")
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    header = dict.fromkeys(names, entry)
    data = json.dumps(header).encode()
    files[FINAL] = len(data).to_bytes(8, "little") + data + weights
    digest = contract.tensor_digest("F32", (2, 2), weights)
    tensors = dict.fromkeys(names, digest)
    edit_json(files, INDEX, lambda index: index["checkpoints"][0].update(tensors=tensors))
    document = contract.CheckpointIndex.model_validate_json(files[INDEX])
    claim = [{"step": 8, "digest": document.checkpoints[0].digest()}]
    edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(checkpoints=claim))


TENSORS: dict[str, tuple[str, Change]] = {
    "checkpoint-of-pickled-objects": ("CAP-V011", checkpoint(b"\x80\x05cos\nsystem\n.")),
    "checkpoint-with-a-header-of-exabytes": ("CAP-V011", checkpoint(b"\xff" * 7 + b"\x0f{}")),
    "checkpoint-of-objects": (
        "CAP-V011",
        checkpoint(safetensors({"weight": ("O", [2], bytes(16))})),
    ),
    "checkpoint-with-tensors-upon-each-other": ("CAP-V011", overlapping),
    "checkpoint-with-another-tensor": (
        "CAP-V010",
        checkpoint(safetensors({"bias": ("F32", [4], bytes(16))})),
    ),
    "checkpoint-with-a-name-that-moves-the-cursor": (
        "CAP-V010",
        checkpoint(safetensors({"\x1b[2K\u202ew": ("F32", [4], bytes(16))})),
    ),
}


def traced(line: bytes) -> Change:
    """Let the trace end with a line, and claim it."""

    def change(files: Files) -> None:
        files[TRACE] += line
        reclaim_trace(files)

    return change


TRACES = {
    "trace-with-a-line-of-five-megabytes": b'{"step":9,"streams":"' + b"0" * (5 << 20) + b'"}\n',
    "trace-that-goes-back": b'{"step":8,"streams":"0"}\n',
    "trace-without-a-step": b'{"streams":"0"}\n',
    "trace-with-a-false-segment": b'{"head":"00","records":2}\n',
    "trace-nested-a-hundred-thousand-times": b'{"step":9,"loss":' + b"[" * 100_000 + b"\n",
    "trace-with-a-step-of-a-million-digits": b'{"step":' + b"9" * 1_000_000 + b"}\n",
    "trace-cut-off": b'{"step":9}',
}

ARRIVALS = {
    "arrivals-of-a-task-that-is-not-there": [3, 0, 1],
    "arrivals-of-a-task-that-ends-twice": [0, 0, 1],
    "arrivals-before-the-first-task": [-1, 0, 1],
}


def arrived(order: list[int]) -> Change:
    """Change the arrival log, and let the claims agree with it."""

    def change(files: Files) -> None:
        edit_json(
            files, run_bundle.ARRIVALS, lambda log: log["waits"]["0.1x/0~1"].update(order=order)
        )
        digest = sha256_hex(files[run_bundle.ARRIVALS])
        edit_json(files, run_bundle.CLAIMS, lambda claims: claims.update(arrivals=digest))

    return change


# --image embedded writes a layer into a file that is called by its digest.
RENAMED = {
    "layer-that-names-an-absolute-path": "sha256:/home/victim/.profile",
    "layer-that-names-a-parent-folder": "sha256:../../home/victim/.profile",
    "layer-with-a-digest-of-another-kind": "sha512:" + "0" * 128,
}

CASES = [
    *(changed(number, name, "CAP-V040", change) for name, (number, change) in IMAGES.items()),
    *(changed(33, name, "CAP-B144", renamed_layer(digest)) for name, digest in RENAMED.items()),
    *(changed(38, name, "CAP-V044", output(path), program) for name, path in OUTPUTS.items()),
    *(changed(38, name, "CAP-V044", change, program) for name, change in CLAIMED_TWICE.items()),
    changed(38, "deletion-in-the-parent-folder", "CAP-V044", deleted("../../etc/passwd"), program),
    changed(
        38,
        "deletion-in-the-claims-alone",
        "CAP-V010",
        lambda files: edit_json(
            files, run_bundle.CLAIMS, lambda claims: claims.update(deleted=["train.py"])
        ),
        program,
    ),
    changed(
        38,
        "another-source-tree-in-the-job",
        "CAP-V046",
        lambda files: edit_json(files, run_bundle.JOB, lambda job: job.update(tree={})),
        program,
    ),
    *(changed(38, name, code, change) for name, (code, change) in TENSORS.items()),
    *(changed(38, name, "CAP-T141", traced(line)) for name, line in TRACES.items()),
    *(changed(38, name, "CAP-T385", arrived(order), program) for name, order in ARRIVALS.items()),
    changed(
        38,
        "arrivals-of-another-order-than-claimed",
        "CAP-V010",
        lambda files: edit_json(
            files,
            run_bundle.ARRIVALS,
            lambda log: log["waits"]["0.1x/0~1"].update(order=[2, 1, 0]),
        ),
        program,
    ),
    changed(
        38,
        "arrivals-that-nothing-claims",
        "CAP-V045",
        lambda files: edit_json(
            files, run_bundle.CLAIMS, lambda claims: claims.update(arrivals=None)
        ),
        program,
    ),
    changed(33, "source-tree-over-the-training-code", "CAP-V004", source_tree_outside, program),
    changed(
        38,
        "profile-that-is-none",
        "CAP-V010",
        lambda files: files.update({run_bundle.ENTROPY_PROFILE: b"CAPSPROF"}),
        program,
    ),
    described(
        lambda manifest: manifest["files"][0].update(mediaType="text/\x1b[31mred"),
        40,
        "media-type-that-colours-the-terminal",
        "CAP-B111",
    ),
    changed(
        40,
        "returns-that-colour-the-terminal",
        "CAP-B144",
        lambda files: edit_json(
            files,
            "run/evaluation.json",
            lambda e: e["points"][0].update(returns=["\x1b[2K\x1b[32mreproduced\u202e"]),
        ),
    ),
    changed(
        40,
        "flags-with-markup",
        "CAP-V010",
        lambda files: edit_json(
            files,
            "run/runtime.json",
            lambda r: r["flags"].update({"<script>alert(1)</script>": "[bold]x[/bold]"}),
        ),
    ),
]
