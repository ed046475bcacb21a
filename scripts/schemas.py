# ruff: noqa: INP001
"""Write schemas/: a JSON Schema for each document of the format, from the models that read it.

Run this script after every change of such a model; a test compares the files with its output. The
lines of a trace are the exception: no model reads them, so their schema is written in this script.

usage: python scripts/schemas.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from capsule.bundle import claims, envelope, manifest, receipts, tally
from capsule.cli.diagnosis_document import DiagnosisDocument
from capsule.cli.error_document import ErrorDocument
from capsule.entropy.ledger import Ledger
from capsule.entropy.report import EntropyReport
from capsule.experiment import arrival_log, contract, dense, evaluation, mechanisms, states
from capsule.experiment.fields import Model
from capsule.experiment.lock import Lock
from capsule.experiment.schedule_log import Header
from capsule.experiment.spec import Spec
from capsule.experiment.trace import COMPONENTS
from capsule.host.spec_file import close_patterns, schema_document
from capsule.machine.fingerprint import Fingerprint
from capsule.study.directory import Outcome
from capsule.study.lock import StudyLock
from capsule.study.spec import StudySpec
from capsule.study.tables import StudyClaims
from capsule.verification import vary, verdict

FOLDER = Path(__file__).parents[1] / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
IDENTIFIERS = "https://capsule-rl.dev/schemas"  # identifiers; nothing is fetched from there

# Every document by the name of its file. Most state this name as "schema": "capsule/NAME/v1".
MODELS: dict[str, type[Model]] = {
    "spec": Spec,
    "lock": Lock,
    "study": StudySpec,
    "study-lock": StudyLock,
    "study-claims": StudyClaims,
    "member-outcome": Outcome,
    # In a bundle.
    "claims": claims.TrainingClaims,
    "program-claims": claims.ProgramClaims,
    "observations": claims.Observations,
    "fingerprint": Fingerprint,
    "bundle": manifest.Manifest,
    "statement": envelope.BundleStatement,
    "envelope": envelope.SigstoreBundle,
    "job": contract.Job,
    "runtime": contract.Runtime,
    "mechanisms": mechanisms.Mechanisms,
    "data-read": contract.DataRead,
    "event": contract.Event,
    "streams": contract.StreamProfiles,
    "checkpoints": contract.CheckpointIndex,
    "evaluation": contract.Evaluation,
    "population": contract.Ancestry,
    "episode-order": contract.EpisodeOrder,
    "film": contract.Film,
    "result": contract.Result,
    "outputs": contract.Outputs,
    "program-result": contract.ProgramResult,
    "entropy": EntropyReport,
    "ledger": Ledger,
    "arrivals": arrival_log.ArrivalLog,
    "schedule": Header,
    "state": states.StateIndex,
    "resume": states.ResumeState,
    # Beside a bundle, or what a command prints.
    "receipt": receipts.ReceiptStatement,
    "receipts": tally.Receipts,
    "verify-report": verdict.Report,
    "vary-report": vary.VaryReport,
    "divergence": verdict.Divergence,
    "diagnosis": DiagnosisDocument,
    "starts": evaluation.StartSet,
    "dense": dense.DenseHeader,
    "error": ErrorDocument,
}

NAMES = (*MODELS, "trace")

# Components of a trace record that are one digest, and those that have one for each tensor.
FLOWING = ("schedule", "observations", "actions", "rewards", "terminals", "indices", "minibatch")
TENSORS = ("gradient", "parameters", "target", "optimizer")


def _hexadecimal(digits: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^[0-9a-f]{{{digits}}}$"}


def _named(value: dict[str, Any], what: str) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": value, "description": what}


def trace_schema() -> dict[str, Any]:
    """Return the JSON Schema of a line of a trace, which is a record or closes a segment."""
    draws = {"type": "string", "pattern": "^[0-9]+:[0-9a-f]{64}$"}
    streams = _named(
        draws, "Number of draws so far, and head of the chain, of each random stream, by name."
    )
    last = {
        "type": ["string", "null"],
        "description": "A hexadecimal floating-point number of C99; null before the first loss.",
    }
    digest = {"type": "string", "pattern": "^([0-9a-f]{32})?$"}
    loss = {
        "type": "object",
        "properties": {"last": last, "digest": digest},
        "required": ["last", "digest"],
        "additionalProperties": False,
        "description": "The last loss, and the digest of all losses since the record before, "
        "which is empty if there are none.",
    }
    components = {
        **dict.fromkeys(FLOWING, _hexadecimal(32)),
        **dict.fromkeys(TENSORS, _named(_hexadecimal(32), "Digest of each tensor, by name.")),
        "streams": {"anyOf": [_hexadecimal(32), streams]},
        "generations": _named({"$ref": "#/$defs/Generation"}, "Generations that began, by name."),
        "unrolls": _named(_hexadecimal(16), "Digest of each unroll that was trained on."),
        "loss": loss,
    }
    step = {
        "type": "integer",
        "exclusiveMinimum": 0,
        "description": "Number of agent steps of the run so far.",
    }
    record = {
        "type": "object",
        "properties": {"step": step} | {name: components[name] for name in COMPONENTS},
        "required": ["step", "streams", "loss"],
        "not": {"required": ["records"]},
        "description": "A record. A reader accepts further keys, in any form.",
    }
    segment = {
        "type": "object",
        "properties": {
            "head": _hexadecimal(64),
            "records": {"type": "integer", "multipleOf": 1024, "exclusiveMinimum": 0},
        },
        "required": ["head", "records"],
        "additionalProperties": False,
        "description": "A line that closes a segment of 1024 records with the head of their chain.",
    }
    generation = contract.Generation.model_json_schema()
    _spell_out(generation)
    definitions = {"Generation": generation, "Record": record, "Segment": segment}
    alternatives = [{"$ref": "#/$defs/Record"}, {"$ref": "#/$defs/Segment"}]
    return {"$defs": definitions, "title": "Trace line", "oneOf": alternatives}


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a document.

    A spec, a study and an event may omit fields that have a default. Every other document contains
    all its fields, except fields that were added after version 1, which it omits if they have the
    value ``absent``.
    """
    trace = name == "trace"
    schema = trace_schema() if trace else MODELS[name].model_json_schema(by_alias=True)
    if name == "spec":
        schema = schema_document()  # which knows what a spec file names by its path
    close_patterns(schema)
    if name not in ("spec", "study", "event", "trace"):
        for definition in (schema, *schema.get("$defs", {}).values()):
            _spell_out(definition)
    return {"$schema": DIALECT, "$id": f"{IDENTIFIERS}/{name}-v1.json"} | schema


def _spell_out(definition: dict[str, Any]) -> None:
    if properties := definition.get("properties"):
        definition["required"] = [key for key, field in properties.items() if "absent" not in field]
        for field in properties.values():
            if "absent" in field:
                field["not"] = {"const": field["absent"]}


def text_of(name: str) -> str:
    """Return the file of a document's JSON Schema."""
    return json.dumps(schema_of(name), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write every file, and remove those of other names."""
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name in NAMES:
        (FOLDER / f"{name}-v1.json").write_text(text_of(name), encoding="utf-8")
    sys.stdout.write(f"wrote {len(NAMES)} schemas into {FOLDER}\n")


if __name__ == "__main__":
    main()
