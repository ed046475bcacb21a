"""Bundles and run directories to export, and what is in them, read without Capsule."""

import json
import secrets
import tarfile
from pathlib import Path

import pytest

CORPUS = Path(__file__).parents[1] / "corpus"
TRAINING = CORPUS / "dqn.capsule.tar"
PROGRAM = CORPUS / "program.capsule.tar"
STUDY = CORPUS / "study.capsule-study.tar"


def content(bundle, member):
    with tarfile.open(bundle) as archive:
        return archive.extractfile(member).read()


def logged(name):
    """Return the values of an event's field by step, as the training of the corpus logged them."""
    events = map(json.loads, content(TRAINING, "run/events.jsonl").splitlines())
    return {event["step"]: event[name] for event in events if name in event}


def returns():
    """Return the returns of the evaluated networks by step, as the training claims them."""
    claims = json.loads(content(TRAINING, "claims.json"))
    return {
        point["step"]: [float.fromhex(value) for value in point["returns"]]
        for point in claims["evaluation"]["points"]
    }


@pytest.fixture
def tmp_path(tmp_path):
    """Return a folder whose path no other test has.

    MLflow keeps what it knows of a folder, and pytest removes the folder of a test that passed and
    gives its name to another.
    """
    folder = tmp_path / secrets.token_hex(8)
    folder.mkdir()
    return folder


@pytest.fixture
def program_directory(tmp_path):
    """Make the run directory of a program that wrote metrics by the recorder."""
    outputs = tmp_path / "runs" / "own" / "work" / "workspace" / "outputs"
    outputs.mkdir(parents=True)
    (tmp_path / "runs" / "own" / "lock.json").write_bytes(content(PROGRAM, "spec/lock.json"))
    lines = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": "nan", "note": "text"}, {"loss": 1}]
    (outputs / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (outputs / "evaluation.jsonl").write_text('{"step": 2, "returns": [1.0, 4.0]}\n')
    return tmp_path / "runs" / "own"
