"""A study's lock shows every difference between its members: what no setting gives is equal."""

import json
from pathlib import Path
from typing import Annotated, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from capsule.experiment.canonical import canonical_json
from capsule.experiment.lock import Lock
from capsule.experiment.spec import Spec
from capsule.image.cache import Cache
from capsule.study.lock import StudyLock, lock_study
from capsule.study.study_file import StudyFile
from capsule.study.unset_fields import KINDS, check_unset_fields
from tests.study.small_studies import STUDY, locked, write
from tests.study.test_study_file import STARTS

STUDIES = Path(__file__).parents[2] / "specs" / "studies"
PROGRAM = "{command: [python, main.py]}"
SECTION = (
    "{interval: 1_024, starts: 2, candidates: 2, shortlist: 2, min_actions: 0, max_actions: 0}"
)
GROUPS = (
    STUDY
    + f"""\
  discount: {{set: {{trainer.discount: 0.5}}, vary: [root]}}
  impala: {{set: {{trainer: {{algorithm: impala, network: mlp, total_steps: 12_800}},
                 evaluation.interval: 6_400, recording.trace_interval: 6_400,
                 recording.tensor_interval: 6_400, recording.checkpoint_interval: 6_400}}}}
  layers: {{set: {{trainer.network: {{dense: [8]}}}}}}
  module: {{set: {{trainer.network: {{module: 'nets:make'}}, code: {{path: nets}},
                 accelerator: {{numerics: native}}}}}}
  grid: {{grid: {{trainer.discount: [0.5, 0.6], trainer.network: [{{dense: [8, 8]}}, mlp]}}}}
  settings: {{settings: [{{seeds.streams.minibatch: 3}}, {{seeds: {{root: 9}}}}, {{}}]}}
  drawn: {{sample: {{count: 2, fields: {{trainer.learning_rate: {{uniform: [0.1, 1]}}}}}}}}
  ubuntu: {{set: {{image.base: ubuntu-24.04}}}}
  strict: {{set: {{accelerator.numerics: portable-v3-strict}}}}
  starts: {{set: {{evaluation.start_set: own.json}}}}
  section: {{set: {{evaluation: {SECTION}}}}}
  no-starts: {{set: {{evaluation.start_set: null}}}}
set: {{limits.memory_mb: 512}}
"""
)
PROGRAMS = f"""\
  program: {{set: {{trainer: {PROGRAM}, code: {{}}, environment: null, evaluation: {{}}}}}}
  other-program: {{set: {{trainer: {PROGRAM}, code.path: nets, environment: null, evaluation: {{}},
                        data: {{digits: {{path: own.json}}}}}}}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, resolutions):
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "s"
    (place / "nets").mkdir(parents=True)
    (place / "nets" / "nets.py").write_text("")
    (place / "own.json").write_bytes(canonical_json(STARTS.model_dump(mode="json", by_alias=True)))
    return place


def forged(lock, edit, **study):
    """Return the lock of a study after an edit, with the digests that this gives its members."""
    document = json.loads(lock.document())
    document["study"].update(study)
    edit(document)
    for member in document["members"]:
        own = {"spec": document["specs"][member["spec"]], **document["pins"][member["pins"]]}
        made = Lock.parse(canonical_json({"schema": "capsule/lock/v1", **own}))
        member["lock"] = made.digest()
    return canonical_json(document)


def member_of(document, name):
    return next(member for member in document["members"] if member["name"] == name)


def change_spec(name, edit):
    """Return an edit that gives one member a spec of its own."""

    def change(document):
        member = member_of(document, name)
        spec = json.loads(json.dumps(document["specs"][member["spec"]]))
        edit(spec)
        member["spec"] = len(document["specs"])
        document["specs"].append(spec)

    return change


def change_group(group, edit):
    def change(document):
        for member in document["members"]:
            if member["name"].startswith(f"{group}."):
                change_spec(member["name"], edit)(document)

    return change


def other_pins(document):
    pins = json.loads(json.dumps(document["pins"][0]))
    pins["image"]["code"]["sha256"] = "ab" * 32
    document["pins"].append(pins)
    member_of(document, "exploration.2")["pins"] = len(document["pins"]) - 1


FORGED = [
    (
        "another hyper-parameter of a group",
        change_group("exploration", lambda spec: spec["trainer"].update(learning_rate=0.01)),
        "exploration.1 has trainer.learning_rate 0.01, and deterministic.1 0.00025, which no",
    ),
    (
        "a chosen seed of a stream",
        change_spec("exploration.1", lambda spec: spec["seeds"]["streams"].update(minibatch=42)),
        "exploration.1 has seeds.streams.minibatch 42, and deterministic.1 None",
    ),
    (
        "a chosen root seed",
        change_spec("exploration.2", lambda spec: spec["seeds"].update(root=17)),
        "exploration.2 has seeds.root 17, and deterministic.1 0",
    ),
    (
        "another seed where none varies",
        change_spec("deterministic.2", lambda spec: spec["seeds"].update(root=5)),
        "deterministic.2 has seeds.root 5, and deterministic.1 0",
    ),
    (
        "another kind of section",
        change_group("exploration", lambda spec: spec["trainer"].update(network={**LAYERS})),
        "exploration.1 has trainer.network {}, and deterministic.1 'mlp'",
    ),
    ("other pins", other_pins, "exploration.2 has other pins than deterministic.1"),
    (
        "another default of a section that two groups give",
        change_spec("twice.2", lambda spec: spec["limits"].update(processes=9)),
        "twice.2 has limits.processes 9, and twice.1 256",
    ),
    (
        "another file of start sequences",
        change_spec("starts.2", lambda spec: spec["evaluation"]["start_set"].update(run="1" * 64)),
        f"starts.2 has evaluation.start_set.run '{'1' * 64}', and starts.1 '{'0' * 64}'",
    ),
]
LAYERS = {"convolutions": [], "dense": [8], "activation": "relu", "scaled": True}


@pytest.mark.parametrize(
    ("edit", "message"), [each[1:] for each in FORGED], ids=[each[0] for each in FORGED]
)
def test_a_difference_that_no_setting_gives_is_rejected(folder, edit, message):
    study = STUDY + "  twice: {set: {limits: {memory_mb: 512}}}\n"
    lock = locked(write(folder, study + "  starts: {set: {evaluation.start_set: own.json}}\n"))
    with pytest.raises(ValueError, match="members: ") as caught:
        StudyLock.parse(forged(lock, edit))
    assert message in str(caught.value)


@pytest.mark.parametrize("chosen", [("exploration.1",), ("exploration.1", "deterministic.1")])
def test_members_without_the_ranked_start_sequences_are_rejected(folder, chosen):
    file = StudyFile.load(write(folder, STUDY + "starts: {set: {seeds.root: 1000}}\n"))
    lock = lock_study(file, STARTS, None, Cache(), lambda _: None)
    assert StudyLock.parse(forged(lock, lambda _: None)) == lock

    def edit(document):
        for name in chosen:
            change_spec(name, lambda spec: spec["evaluation"].update(start_set=None))(document)

    with pytest.raises(ValueError, match="members: ") as caught:
        StudyLock.parse(forged(lock, edit))
    assert "evaluation.start_set" in str(caught.value)


@pytest.mark.parametrize(
    ("study", "starts"),
    [(GROUPS + "starts: {}\n", STARTS), (STUDY + PROGRAMS, None)],
    ids=["trainers", "programs"],
)
def test_groups_may_differ_in_anything_that_the_study_sets(folder, study, starts):
    file = StudyFile.load(write(folder, study))
    lock = lock_study(file, starts, None, Cache(), lambda _: None)
    assert len(lock.pins) > 2
    assert StudyLock.parse(lock.document()).document() == lock.document()


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_studies_are_accepted(path):
    members, specs = zip(*StudyFile.load(path).member_specs(None), strict=True)
    chosen = ((member, number, 0) for number, member in enumerate(members))
    check_unset_fields(chosen, specs, ranked=False)


def kinds_of(model, prefix=""):
    """Yield the sections of a spec that may have one of several models."""
    for name, field in model.model_fields.items():
        models = list(models_in(field.annotation))
        if len(models) > 1:
            yield prefix + name
        for each in models:
            yield from kinds_of(each, f"{prefix}{name}.")


def models_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is Annotated or get_origin(annotation) in UNIONS:
        for each in get_args(annotation):
            yield from models_in(each)


UNIONS = (Union, type(int | str))


def test_every_section_of_several_kinds_is_known():
    assert {*kinds_of(Spec)} == KINDS.keys()
