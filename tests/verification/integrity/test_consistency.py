"""The documents of a bundle must say the same: contradictions are tampering, and are named."""

import pytest

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.crate import CRATE
from capsule.bundle.run_bundle import RecordedRun
from capsule.experiment import contract
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.verification.integrity import consistency
from capsule.verification.integrity.consistency import check_consistency
from tests.hostile.genuine import (
    EVALUATION,
    INDEX,
    RESULT,
    TRACE,
    edit_json,
    outside,
    packed,
    reclaim_trace,
)

ZERO = "0" * 64
RUNTIME, OUTPUTS, EVENTS = (
    run_bundle.RUN + name for name in (contract.RUNTIME, contract.OUTPUTS, contract.EVENTS)
)


@pytest.fixture
def check(tmp_path):
    """A function that checks the bundle of a run, whose files may be changed before."""

    def check(run, *changes):
        def change(files):
            for each in changes:
                each(files)

        with open_bundle(packed(run, tmp_path / "bundle", change), []) as bundle:
            return check_consistency(RecordedRun.read(bundle))

    return check


def edited(name, *path, **fields):
    """Return a change of fields of a document, or of a part of it."""

    def edit(document):
        for step in path:
            document = document[step]
        document.update(fields)

    return lambda files: edit_json(files, name, edit)


@pytest.mark.parametrize(
    "run",
    ["training", "program"],
)
def test_a_bundle_as_capsule_packs_it_agrees_with_itself(check, run):
    assert check(outside(run)) == ()


# The members of a bundle by another Capsule are not compared, but all its documents are.
OTHER_CAPSULE = edited(run_bundle.OBSERVATIONS, capsule_sha256=ZERO)
CLAIMED_STEPS = edited(run_bundle.CLAIMS, steps=4), edited(RESULT, steps=4)


@pytest.mark.parametrize(
    ("changes", "what", "where"),
    [
        ([edited(RESULT, trace_records=9)], "the trace", RESULT),
        (CLAIMED_STEPS, "the number of steps", run_bundle.LOCK),
        ([OTHER_CAPSULE, edited(run_bundle.CLAIMS, schedule=ZERO)],
         "whether the schedule was recorded", run_bundle.LOCK),
        ([edited(run_bundle.STREAMS, "streams", 0, seed=2)], "the stream profiles",
         run_bundle.STREAMS),
        ([edited(EVALUATION, "points", 0, lengths=[8])], "the returns", EVALUATION),
        ([edited(INDEX, "checkpoints", 0, trace_head=ZERO)], "the checkpoint digests", INDEX),
        ([edited(RUNTIME, libraries={"torch": "3"})], "the libraries", RUNTIME),
        ([edited(run_bundle.CLAIMS, relaxations=["x"])], "the relaxations", run_bundle.LOCK),
        ([edited(run_bundle.CLAIMS, data={"digits": ZERO})], "the data sets", run_bundle.LOCK),
        ([OTHER_CAPSULE, edited(run_bundle.CLAIMS, entropy_profile=ZERO)],
         "whether randomness was recorded", run_bundle.LOCK),
    ],
)  # fmt: skip
def test_a_training_that_contradicts_itself_is_rejected(check, changes, what, where):
    with pytest.raises(CapsuleError) as caught:
        check(outside("training"), *changes)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V010", ExitCode.TAMPERED)
    assert f"contradicts itself: {what} in {where} is not what claims.json says" in (
        caught.value.message
    )
    assert "Do not trust this bundle" in caught.value.fix


def test_a_value_that_is_absent_is_called_so(check):
    with pytest.raises(CapsuleError, match=r"the data sets in .*, found absent\)"):
        check(outside("training"), edited(run_bundle.CLAIMS, data={"digits": ZERO}))


def replaced(name, data):
    return lambda files: files.update({name: data})


@pytest.mark.parametrize(
    ("change", "what", "where"),
    [
        (edited(OUTPUTS, deleted=["x"]), "the deleted files", OUTPUTS),
        (edited(OUTPUTS, empty_folders=["x"]), "the empty folders", OUTPUTS),
        (edited(OUTPUTS, standard_output=None), "the standard output", OUTPUTS),
        (replaced("workspace/score.txt", b"8\n"), "its digest", "score.txt"),
        (replaced(run_bundle.STANDARD_OUTPUT, b"2\n"), "its digest", run_bundle.STANDARD_OUTPUT),
        (edited(run_bundle.CLAIMS, arrivals=ZERO), "its digest", run_bundle.ARRIVALS),
        (edited(run_bundle.CLAIMS, entropy_profile=ZERO), "its digest",
         run_bundle.ENTROPY_PROFILE),
    ],
)  # fmt: skip
def test_a_program_that_contradicts_itself_is_rejected(check, change, what, where):
    with pytest.raises(CapsuleError) as caught:
        check(outside("program"), change)
    assert caught.value.code == "CAP-V010"
    assert f"{what} in {where} is not what" in caught.value.message


def claimed(**fields):
    """Return a change of what a program claims, by the names of the claims."""

    def change(files):
        edited(run_bundle.CLAIMS, **fields)(files)
        listed = {"outputs": "files", "standard_output": "standard_output"}
        edited(OUTPUTS, **{listed[name]: value for name, value in fields.items()})(files)
        edited(RESULT, outputs=sha256_hex(files[OUTPUTS]))(files)

    return change


def output(data=b"9\n", **fields):
    facts = {"size": len(data), "sha256": sha256_hex(data), "target": None, "executable": False}
    return facts | fields


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (claimed(outputs={"score.txt": output(size=5)}), "its size in score.txt"),
        (claimed(outputs={"link": output(b"a", size=3, target="a")}), "of a link in link"),
        (claimed(outputs={"link": output(b"a", sha256=ZERO, target="a")}), "of a link in link"),
        (claimed(outputs={"link": output(b"a", executable=True, target="a")}), "of a link in link"),
        (claimed(standard_output=output(b"1\n", size=999)), "its size in run/stdout.txt"),
        (claimed(standard_output=output(b"1\n", target="x")), "its kind in run/stdout.txt"),
        (claimed(standard_output=output(b"1\n", executable=True)), "its kind in run/stdout.txt"),
    ],
)
def test_false_facts_of_a_file_are_a_contradiction(check, change, what):
    with pytest.raises(CapsuleError, match=what) as caught:
        check(outside("program"), OTHER_CAPSULE, change)
    assert caught.value.code == "CAP-V010"


def test_true_facts_of_a_link_are_none(check):
    files = {"score.txt": output(), "link": output(b"\xc3\xa4", target="\xe4")}
    check(outside("program"), OTHER_CAPSULE, claimed(outputs=files))


@pytest.mark.parametrize(
    "fields", [{"returns": []}, {"returns": ["0x1p+0"] * 2}, {"lengths": [8, 8]}]
)
def test_an_evaluation_has_one_return_and_one_length_for_each_start(check, fields):
    changes = (
        edited(EVALUATION, "points", 0, **fields),
        edited(run_bundle.CLAIMS, "evaluation", "points", 0, **fields),
    )
    with pytest.raises(CapsuleError, match="one for each start") as caught:
        check(outside("training"), *changes)
    assert caught.value.code == "CAP-V010"


def test_both_statements_are_shown_in_ascii_up_to_a_bound(check):
    evil = {"threads": "\x1b[2Jé" + "x" * 200}
    with pytest.raises(CapsuleError) as caught:
        check(outside("training"), edited(RUNTIME, flags=evil))
    message = caught.value.message
    assert '(claimed {"threads": "1"}, found {"threads": ' in message
    assert message.isascii()
    assert message.isprintable()
    assert "x" * 101 not in message


def test_a_longer_trace_is_a_contradiction_of_the_claims(check):
    def longer(files):
        files[TRACE] += b'{"step":12,"streams":"0"}\n'

    with pytest.raises(CapsuleError, match="the number of records"):
        check(outside("training"), longer)


def test_a_claimed_trace_that_goes_on_after_the_run_is_a_contradiction(check):
    def longer(files):
        files[TRACE] += b'{"step":12,"streams":"0"}\n'
        reclaim_trace(files)

    with pytest.raises(CapsuleError, match="whether it ends with the run"):
        check(outside("training"), longer)


def test_a_checkpoint_that_names_another_trace_head_is_a_contradiction(check):
    def other_head(files):
        edited(INDEX, "checkpoints", 0, trace_head="1" * 64)(files)
        index = contract.CheckpointIndex.model_validate_json(files[INDEX])
        claimed = [{"step": each.step, "digest": each.digest()} for each in index.checkpoints]
        edited(run_bundle.CLAIMS, checkpoints=claimed)(files)

    with pytest.raises(CapsuleError, match=r"the trace heads in run/checkpoints\.json"):
        check(outside("training"), other_head)


def test_the_number_of_events_is_bounded(check, monkeypatch):
    line = b'{"kind":"start","step":0,"time":1}\n'
    monkeypatch.setattr(consistency, "MAX_EVENTS", 2)
    with pytest.raises(CapsuleError, match=f"{EVENTS} has more than 2 lines") as caught:
        check(outside("training"), replaced(EVENTS, line * 3))
    assert caught.value.code == "CAP-V047"
    with pytest.raises(CapsuleError, match=f"line 2 of {EVENTS} is not an event"):
        check(outside("training"), replaced(EVENTS, line + b"{}\n"))
    assert check(outside("training"), replaced(EVENTS, line * 2)) == ()


def test_what_another_capsule_derived_or_added_is_not_judged(check):
    run = outside("training")
    changes = replaced("extra.txt", b""), replaced(run_bundle.GUIDE, b"x")
    unchecked = check(run, OTHER_CAPSULE, *changes)
    assert "extra.txt" in unchecked
    assert {run_bundle.GUIDE, CRATE, run_bundle.LEDGER} <= set(unchecked)
    assert list(unchecked) == sorted(unchecked)
    # All other contradictions count for it, too.
    with pytest.raises(CapsuleError, match="the libraries"):
        check(run, OTHER_CAPSULE, edited(RUNTIME, libraries={"torch": "3"}))
