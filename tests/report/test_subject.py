"""Reading the subject of a report: a bundle, and the reports and receipts on it."""

import io
import json
import tarfile
from fractions import Fraction
from math import inf, isnan, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.bundle.bundle import open_bundle
from capsule.bundle.crate import CRATE
from capsule.bundle.keys import load_public
from capsule.experiment.canonical import canonical_json
from capsule.experiment.contract import Evaluation, EvaluationPoint
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.report.subject import (
    MAX_NAMES,
    JsonLines,
    NetworkReturns,
    claimed_points,
    crate_of,
    drawable,
    evaluation_points,
    evaluations_of,
    first_named,
    read_inventory,
    read_report,
    recorded_lines,
)
from tests.report import runs
from tests.report.conftest import different, make_report, read


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
    ids=["empty", "no fields", "no text", "too deep", "too few fields", "too large"],
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
        (("replica", "evaluation", "points", 0, "returns"), ["0x1p+99999"]),
        (("unknown",), 1),
    ],
    ids=["steps", "a word", "an overflow", "an unknown field"],
)
def test_a_report_with_impossible_values_is_refused(bundles, subjects, tmp_path, path, value):
    document = json.loads(make_report(subjects["dqn"]).model_dump_json(by_alias=True))
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


def test_a_report_on_another_run_is_refused(bundles, subjects, saved):
    with pytest.raises(CapsuleError) as caught:
        read(bundles["dqn"], *saved(make_report(subjects["r2d2"])))
    assert caught.value.code == "CAP-P102"


def test_a_report_of_a_verification_that_read_no_claims_is_refused(bundles, subjects, saved):
    with pytest.raises(CapsuleError) as caught:
        read(bundles["dqn"], *saved(make_report(subjects["dqn"], "tampered", claim_id=None)))
    assert caught.value.code == "CAP-P102"
    assert "with the verdict tampered" in caught.value.message
    assert "None" not in caught.value.message


def test_a_claimed_return_that_is_no_number_is_refused(tmp_path):
    points = runs.evaluation().points
    bad = points[0].model_copy(update={"returns": ("0x1p+99999",) * 4})
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


def test_the_crate_follows_from_the_run(bundles, subjects):
    with open_bundle(bundles["dqn"], []) as opened:
        stored = json.loads(opened.member(CRATE).read_bytes())
    assert json.loads(crate_of(subjects["dqn"])) == stored


def test_an_image_is_named_by_its_digest(subjects):
    subject = subjects["dqn"]
    from dataclasses import replace

    from capsule.bundle.claims import ImageClaim

    image = ImageClaim(config=f"sha256:{'a' * 64}", layers=())
    made = replace(subject, claims=subject.claims.model_copy(update={"image": image}))
    graph = {each["@id"]: each for each in json.loads(crate_of(made))["@graph"]}
    assert graph["#run"]["containerImage"] == {"@id": "#image"}
    assert graph["#image"]["sha256"] == "a" * 64
    assert graph["#image"]["@type"] == "ContainerImage"


# --- what is read of a bundle -------------------------------------------------------------------


def test_a_subject_has_the_signer_the_files_and_the_documents_of_the_bundle(bundles):
    bundle = bundles["dqn"]
    subject = read(bundle)
    fingerprint = load_public(bundle.parent / "alice.pub").fingerprint
    assert (subject.bundle, subject.fingerprint) == (bundle.name, fingerprint)
    assert subject.signers == (fingerprint,)
    with tarfile.open(bundle) as archive:
        sizes = {member.name: member.size for member in archive if member.isfile()}
        claims = json.loads(archive.extractfile("claims.json").read())
    listed = {file.path: file.size for file in subject.files}
    assert listed.items() <= sizes.items()
    assert json.loads(subject.claims.document()) == claims
    assert (subject.ancestry, subject.reports, subject.unread) == (None, (), 0)


def test_without_a_key_the_signer_is_stated_and_not_trusted(bundles):
    subject = read(bundles["dqn"], trusted=False)
    assert subject.signers == ()
    assert subject.fingerprint.startswith("SHA256:")


def test_a_population_has_its_generations_and_a_program_has_no_evaluation(subjects):
    assert subjects["impala"].ancestry.generations == tuple(runs.GENERATIONS)
    own = subjects["own"]
    assert (own.ancestry, own.evaluation) == (None, ())


def test_a_training_has_its_claimed_evaluations_and_its_logged_quantities(subjects):
    subject = subjects["dqn"]
    assert subject.evaluation == tuple(
        NetworkReturns(step, returns) for step, returns in runs.RETURNS.items()
    )
    steps = range(10, 401, 10)
    assert {each.name: each.points for each in subject.series} == {
        "episode_return": tuple((step, step / 10) for step in steps),
        "loss": tuple((step, 1 / step) for step in steps),
    }


def test_a_program_has_the_evaluations_that_it_recorded_the_last_ones_counting(tmp_path):
    lines = [
        {"step": 20, "returns": [3, 4.5]},
        {"step": 10, "returns": [1.0]},
        {"step": 20, "returns": [5]},
        {"step": 30, "returns": []},
        {"step": 40, "returns": "12"},
        {"step": 50, "returns": [None]},
        {"step": 60, "returns": [10**400]},
        {"step": 70},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    outputs = {"logs/evaluation.jsonl": text, "z/evaluation.jsonl": "not json\n"}
    subject = read(runs.pack(tmp_path, runs.PROGRAM, outputs=outputs))
    assert subject.evaluation == (NetworkReturns(10, (1.0,)), NetworkReturns(20, (5.0,)))
    assert subject.unread == 5


def test_the_first_quantities_of_a_program_are_kept_in_the_order_of_their_names(tmp_path):
    names = [f"q{number}" for number in range(11)]
    lines = [dict.fromkeys(reversed(names), 1.5) | {"step": 1}]
    metrics = "".join(json.dumps(line) + "\n" for line in lines)
    subject = read(runs.pack(tmp_path, runs.PROGRAM, outputs={"metrics.jsonl": metrics}))
    assert [each.name for each in subject.series] == sorted(names)[:8]


def test_numbers_that_cannot_be_plotted_are_left_out(tmp_path):
    lines = ['{"step":3,"loss":1}\n', '{"step":1,"loss":Infinity}\n', '{"step":2,"loss":NaN}\n']
    lines += ['{"step":4,"loss":-1e91}\n', '{"step":5,"loss":1e90}\n']
    subject = read(runs.pack(tmp_path, runs.PROGRAM, outputs={"metrics.jsonl": "".join(lines)}))
    assert [each.points for each in subject.series] == [((3, 1.0), (5, 1e90))]


# --- reports on it ------------------------------------------------------------------------------


def test_reports_keep_their_order_and_their_file_names(bundles, subjects, saved):
    verdicts = ("reproduced-bitwise", "not-reproduced", "intact")
    paths = saved(*(make_report(subjects["dqn"], verdict) for verdict in verdicts))
    subject = read(bundles["dqn"], *reversed(paths))
    assert [name for name, _ in subject.reports] == ["3.json", "2.json", "1.json"]
    assert [report.verdict for _, report in subject.reports] == list(reversed(verdicts))


def test_a_receipt_is_no_report(bundles, subjects, receipt, saved):
    path, bob = receipt("bob")
    (report,) = saved(make_report(subjects["dqn"]))
    subject = read(bundles["dqn"], path, report, others=[bob])
    assert [name for name, _ in subject.reports] == [report.name]
    assert [each.file for each in subject.receipts.receipts] == [path.name]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"ssh-ed25519 AAAA", "it is not JSON; the first mistake is in line 1, column 1"),
        (b'{"a": 1,\n b}', "it is not JSON; the first mistake is in line 2, column 2"),
        (b'{"a": "\xff"}', "it is not text in UTF-8; the first mistake is in byte 8"),
        (b"[" * 100_000, "its lists are nested too deeply"),
        (b"[]", "it is not a JSON object"),
        (b"{}", "the field bundle is missing"),
    ],
    ids=["empty", "a key", "not JSON", "not UTF-8", "too deep", "a list", "an empty object"],
)
def test_the_reason_why_a_file_is_no_report_is_in_plain_words(subjects, tmp_path, data, reason):
    (tmp_path / "bad.json").write_bytes(data)
    with pytest.raises(CapsuleError) as caught:
        read_report(tmp_path / "bad.json", subjects["dqn"].claims)
    what = "bad.json is neither a report nor a receipt of capsule verify"
    assert caught.value.message == f"{what}: {reason}"


def test_a_file_that_is_no_report_is_named_with_the_reason_and_a_remedy(subjects, tmp_path):
    claims = subjects["dqn"].claims
    (tmp_path / "bad.json").write_text("[1,")
    with pytest.raises(CapsuleError) as caught:
        read_report(tmp_path / "bad.json", claims)
    assert caught.value.code == "CAP-P101"
    assert caught.value.message.startswith("bad.json is neither a report nor a receipt of capsule")
    assert "line 1, column 4" in caught.value.message
    assert "capsule verify --report FILE" in caught.value.fix
    with pytest.raises(CapsuleError, match=r"CAP-P101 .*not a regular file"):
        read_report(tmp_path, claims)


def test_a_report_on_another_run_is_named_with_both_claim_ids(subjects, saved):
    own, other = (subjects[kind].claims.claim_id() for kind in ("dqn", "r2d2"))
    (path,) = saved(make_report(subjects["r2d2"]))
    with pytest.raises(CapsuleError) as caught:
        read_report(path, subjects["dqn"].claims)
    assert caught.value.message == f"1.json is about claim id {other}, not {own}"
    assert caught.value.fix == "Give reports on this bundle only."


def test_a_report_is_read_back_as_it_was_written(subjects, saved):
    report = different(subjects["dqn"])
    (path,) = saved(report)
    assert read_report(path, subjects["dqn"].claims) == report


# --- returns ------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=20))
def test_the_mean_is_that_of_the_returns(returns):
    mean = float(sum(map(Fraction, returns)) / len(returns))
    assert NetworkReturns(1, tuple(returns)).mean == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("returns", [(), (inf, -inf), (1.7e308, 1.7e308)])
def test_returns_without_a_mean_have_nan(returns):
    assert isnan(NetworkReturns(1, returns).mean)


def evaluation(*returns):
    points = tuple(
        EvaluationPoint(step=step, returns=row, lengths=(1,) * len(row))
        for step, row in enumerate(returns)
    )
    return Evaluation(starts=((0,),), points=points)


@settings(max_examples=30)
@given(st.lists(st.floats(allow_nan=False), max_size=5))
def test_claimed_returns_are_read_without_rounding(returns):
    (point,) = evaluation_points(evaluation(tuple(value.hex() for value in returns)))
    assert point == NetworkReturns(0, tuple(returns))


def test_a_return_beyond_double_precision_is_refused(subjects):
    text = "0x1p+99999"
    bad = evaluation(("0x1p+0",), (text,))
    with pytest.raises(ValueError, match="hexadecimal"):
        evaluation_points(bad)
    claims = subjects["dqn"].claims.model_copy(update={"evaluation": bad})
    with pytest.raises(CapsuleError) as caught:
        claimed_points(claims)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-P103", ExitCode.TAMPERED)
    assert caught.value.message == (
        f"the evaluation in claims.json is malformed: step 1 has the return {text!r}, which is not "
        "a C99 hexadecimal float of double precision"
    )


@pytest.mark.parametrize("value", [0.0, -1.0, 1e90, -1e90])
def test_finite_numbers_of_a_sensible_size_are_drawable(value):
    assert drawable(value)


@pytest.mark.parametrize("value", [nan, inf, -inf, 1e91, -1e91])
def test_other_numbers_are_not_drawable(value):
    assert not drawable(value)


# --- lines of untrusted files -------------------------------------------------------------------


def lines_of(data):
    lines = JsonLines(lambda: io.BytesIO(data))
    return list(lines), lines.unread


def test_lines_that_are_no_objects_with_a_step_are_counted():
    good = b'{"step":0}\n{"step":9007199254740991,"x":[1]}'
    bad = (
        b'\n{}\n[]\n7\n{"step":true}\n{"step":-1}\n{"step":9007199254740992}\n{"step":1.0}\n\xff\n'
    )
    deep = b"[" * 50_000
    documents, unread = lines_of(good + bad + deep)
    assert [document["step"] for document in documents] == [0, 2**53 - 1]
    assert unread == 9


def test_a_line_that_is_too_long_is_never_held_at_once():
    long = b'{"step":1,"x":"' + b"y" * (3 << 16) + b'"}\n'
    documents, unread = lines_of(long + b'{"step":2}\n')
    assert [document["step"] for document in documents] == [2]
    assert unread == 4  # in pieces of 64 KiB


def test_a_program_has_room_for_so_many_names_and_values(monkeypatch):
    named = JsonLines(lambda: io.BytesIO(b"".join(b'{"step":1,"%d":1}\n' % n for n in range(2000))))
    assert (len(list(named.bounded())), named.unread) == (MAX_NAMES, 2000 - MAX_NAMES)
    monkeypatch.setattr("capsule.report.subject.MAX_VALUES", 10)
    lines = b'{"step":1,"returns":[1,2,3,4]}\n{"step":2,"returns":[1,2,3,4]}\n'
    returns = JsonLines(lambda: io.BytesIO(2 * lines + b'{"step":3,"returns":[5]}\n'))
    assert [point.step for point in evaluations_of(returns)] == [1, 2, 3]
    assert returns.unread == 2


def test_a_file_that_does_not_exist_has_no_lines():
    lines = JsonLines(None)
    assert (list(lines), lines.unread) == ([], 0)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2**53 - 1), max_size=10))
def test_objects_are_read_back_in_their_order(steps):
    documents = [{"step": step, "value": number} for number, step in enumerate(steps)]
    data = "".join(json.dumps(document) + "\n" for document in documents)
    assert lines_of(data.encode()) == (documents, 0)


def test_the_first_file_of_a_name_is_found_in_any_folder(bundles):
    paths = ["z/metrics.jsonl", "b/metrics.jsonl", "a/metrics.jsonl.old", "a/xmetrics.jsonl"]
    assert first_named(paths, "metrics.jsonl") == "b/metrics.jsonl"
    assert first_named(paths, "evaluation.jsonl") is None
    own = bundles["own"]
    with open_bundle(own, []) as opened:
        claims = read(own).claims
        assert list(recorded_lines(opened, claims, "metrics.jsonl")) == runs.METRICS
        assert list(recorded_lines(opened, claims, "evaluation.jsonl")) == []


# --- the image's SBOM ---------------------------------------------------------------------------


def component(name, **facts):
    return {"type": "library", "name": name, "version": "1", **facts}


def inventory(*components, **image):
    lock = runs.make_lock({**runs.PROGRAM, "image": image})
    return read_inventory(canonical_json({"components": list(components)}), lock)


def test_components_are_counted_by_kind():
    found = inventory(
        component("numpy", purl="pkg:pypi/numpy@2"),
        component("torch", purl="pkg:pypi/torch@2"),
        component("libc6", purl="pkg:deb/debian/libc6@2.36"),
        component("debian", type="operating-system"),
    )
    assert found.kinds == {"Python package": 2, "Debian package": 1, "operating system": 1}


@pytest.mark.parametrize(
    ("licenses", "expected"),
    [
        (None, "not asserted"),
        ([], "not asserted"),
        ([{"license": {"id": "MIT"}}], "MIT"),
        ([{"expression": "MIT OR Apache-2.0"}], "MIT OR Apache-2.0"),
        ([{"license": {"name": "A licence"}}, {"license": {"id": "MIT"}}], "A licence, MIT"),
        ([{"license": {}}], "not asserted"),
    ],
)
def test_a_component_has_the_licence_of_any_form_of_cyclonedx(licenses, expected):
    facts = {} if licenses is None else {"licenses": licenses}
    assert inventory(component("x", **facts)).licences == {expected: 1}


def test_the_main_packages_are_what_the_spec_asks_for_and_what_every_program_uses():
    found = inventory(
        component("importlib-metadata"),
        component("numpy", licenses=[{"license": {"id": "BSD-3-Clause"}}]),
        component("ffmpeg"),
        component("libc6"),
        component("libpython3.11-stdlib"),
        component("libpython3.12-stdlib"),
        component("driver", group="NVIDIA"),
        component("left-pad", group="Others"),
        packages=["NumPy==2.4.6", "importlib_metadata>=1"],
        debian=["ffmpeg"],
    )
    assert [name for name, _, _ in found.packages] == [
        "importlib-metadata",
        "numpy",
        "ffmpeg",
        "libc6",
        "libpython3.11-stdlib",
        "driver",
    ]
    assert found.packages[1] == ("numpy", "1", "BSD-3-Clause")


def test_a_component_without_a_version_has_an_empty_one():
    assert inventory({"type": "library", "name": "libc6"}).packages == (
        ("libc6", "", "not asserted"),
    )
