"""Reading the subject of a report: a bundle, and the reports and receipts on it."""

import json

import pytest

from capsule.bundle.bundle import open_bundle
from capsule.bundle.crate import CRATE
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.report.subject import crate_of
from tests.report import runs
from tests.report.conftest import make_report, read


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"schema":"capsule/verify-report/v1"}',
        b" " * (16 << 20) + b"{}",
    ],
)
@pytest.mark.slow
def test_what_is_no_report_is_refused(bundles, tmp_path, data):
    (tmp_path / "bad.json").write_bytes(data)
    with pytest.raises(CapsuleError) as caught:
        read(bundles["dqn"], tmp_path / "bad.json")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-P101", ExitCode.USAGE)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("replica", "divergence", "steps"), 10**400),
        (("replica", "evaluation", "points", 0, "returns"), ["not a number"]),
        (("replica", "evaluation", "points", 0, "returns"), ["0x1p99999"]),
        (("unknown",), 1),
    ],
)
def test_a_report_with_impossible_values_is_refused(bundles, tmp_path, path, value):
    document = json.loads(make_report(read(bundles["dqn"])).model_dump_json(by_alias=True))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(CapsuleError) as caught:
        read(bundles["dqn"], tmp_path / "bad.json")
    assert caught.value.code == "CAP-P101"


def test_a_missing_report_is_refused(bundles, tmp_path):
    with pytest.raises(CapsuleError, match="No such file") as caught:
        read(bundles["dqn"], tmp_path / "none.json")
    assert caught.value.code == "CAP-P101"


def test_a_report_on_another_run_is_refused(bundles, saved):
    with pytest.raises(CapsuleError) as caught:
        read(bundles["dqn"], *saved(make_report(read(bundles["r2d2"]))))
    assert caught.value.code == "CAP-P102"


def test_a_claimed_return_that_is_no_number_is_refused(tmp_path):
    points = runs.evaluation().points
    bad = points[0].model_copy(update={"returns": ("one",) * 4})
    evaluation = runs.evaluation().model_copy(update={"points": (bad,)})
    with pytest.raises(CapsuleError) as caught:
        read(runs.pack(tmp_path, evaluation=evaluation))
    assert (caught.value.code, caught.value.exit_code) == ("CAP-P103", ExitCode.TAMPERED)


def test_a_bundle_holds_events_only(tmp_path):
    told = {"time": 0.0, "kind": "progress", "step": 1}
    events = [
        told | {"loss": 2.0}, {"step": 1, "loss": 3.0}, "not json\n", [1], told | {"step": "one"},
        told | {"loss": "nan"}, told | {"loss": True}, told | {"loss": 1.0},
    ]  # fmt: skip
    subject = read(runs.pack(tmp_path, events=events))
    assert subject.unread == 0
    assert [series.points for series in subject.series] == [((1, 1.0),)]


def test_lines_of_metrics_that_are_none_are_counted(tmp_path):
    lines = [
        {"step": 1, "loss": 2.0}, {"step": "one"}, {"step": 1 << 60}, [1],
        {"step": 2, "loss": "nan"}, {"step": 3, "loss": True}, {"step": 1, "loss": 1.0},
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines) + "not json\n"
    subject = read(runs.pack(tmp_path, runs.PROGRAM, outputs={"metrics.jsonl": text}))
    assert subject.unread == 4
    assert [series.points for series in subject.series] == [((1, 1.0),)]


def test_the_crate_follows_from_the_run(bundles):
    with open_bundle(bundles["dqn"], []) as opened:
        stored = json.loads(opened.member(CRATE).read_bytes())
    assert json.loads(crate_of(read(bundles["dqn"]))) == stored


def test_an_image_is_named_by_its_digest(bundles):
    subject = read(bundles["dqn"])
    from dataclasses import replace

    from capsule.bundle.claims import ImageClaim

    image = ImageClaim(config=f"sha256:{'a' * 64}", layers=())
    made = replace(subject, claims=subject.claims.model_copy(update={"image": image}))
    graph = {each["@id"]: each for each in json.loads(crate_of(made))["@graph"]}
    assert graph["#run"]["containerImage"] == {"@id": "#image"}
    assert graph["#image"]["sha256"] == "a" * 64
    assert graph["#image"]["@type"] == "ContainerImage"
