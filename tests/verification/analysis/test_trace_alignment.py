"""Two traces are aligned record by record, whatever their intervals are."""

import json
from itertools import groupby

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import RecordingSpec
from capsule.experiment.trace import Record
from capsule.verification.analysis.trace_alignment import align_traces, record_names

EVERY = RecordingSpec(trace_interval=4, tensor_interval=8)


def write(path, records):
    path.write_text("".join(json.dumps(each, separators=(",", ":")) + "\n" for each in records))
    return path


def record(step, **changes):
    tensors = {"parameters": {"w": "p"}} if step % 8 == 0 else {}
    loss = {"last": (0.5).hex(), "digest": "l"}
    return {"step": step, "actions": "a", "loss": loss, **tensors, **changes}


@pytest.fixture
def aligned(tmp_path):
    """Align two traces, given as changes of the second one's records by their steps."""

    def alignment(changes=None, steps=24, recordings=(EVERY, EVERY), prefix=False):
        left = [record(step) for step in range(4, 25, 4)]
        right = [record(step, **(changes or {}).get(step, {})) for step in range(4, steps + 1, 4)]
        paths = write(tmp_path / "a", left), write(tmp_path / "b", right)
        return align_traces(*paths, recordings, prefix=prefix)

    return alignment


def test_equal_traces(aligned):
    alignment = aligned()
    assert (alignment.first, alignment.last_equal, alignment.records, alignment.reconverged) == (
        None,
        24,
        6,
        False,
    )
    assert alignment.equal_until == {"actions": 24, "loss": 24, "parameters": 24}
    assert alignment.map().components == {"actions": (), "loss": (), "parameters": ()}


def test_intervals_losses_and_what_was_equal(aligned):
    other = {"loss": {"last": (0.75).hex(), "digest": "m"}}
    alignment = aligned({8: other, 12: other, 20: {"actions": "b"}})
    assert (alignment.first.step, alignment.first.component, alignment.last_equal) == (8, "loss", 4)
    assert alignment.losses == (8, 0.5, 0.75)
    assert alignment.map().components == {
        "loss": ((8, 12),),
        "actions": ((20, 20),),
        "parameters": (),
    }
    assert alignment.equal_until == {"loss": 4, "actions": 16, "parameters": 24}
    assert alignment.differing == 3
    assert alignment.reconverged  # by the record of step 24, which has tensors


def test_a_difference_in_the_last_record_is_not_healed(aligned):
    assert not aligned({24: {"actions": "b"}}).reconverged
    assert not aligned({20: {"actions": "b"}}, steps=20).reconverged


def test_only_a_prefix_may_end_early(aligned):
    assert aligned(steps=16).first.component == "end"
    assert aligned(steps=16, prefix=True).first is None


def test_other_intervals_leave_the_tensors_to_compare(aligned):
    coarse = RecordingSpec(trace_interval=8, tensor_interval=8)
    alignment = aligned({16: {"actions": "b"}}, recordings=(EVERY, coarse))
    assert alignment.first is None
    assert alignment.equal_until == {"parameters": 24}
    alignment = aligned({16: {"parameters": {"w": "q"}}}, recordings=(EVERY, coarse))
    assert (alignment.first.component, alignment.first.name) == ("parameters", "w")


def test_records_in_which_nothing_can_be_compared_do_not_count_as_equal(aligned):
    coarse = RecordingSpec(trace_interval=8, tensor_interval=8)
    alignment = aligned(steps=20, recordings=(EVERY, coarse))
    assert (alignment.first, alignment.records, alignment.last_equal) == (None, 2, 16)


def test_a_loss_that_is_none_is_not_measured(aligned):
    assert aligned({8: {"loss": {"last": "0xnone"}}}).losses is None


STEPS = range(4, 25, 4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.sets(st.sampled_from(STEPS)))
def test_intervals_are_the_runs_of_differing_records(aligned, differing):
    alignment = aligned({step: {"actions": "b"} for step in differing})
    grouped = [(key, list(group)) for key, group in groupby(STEPS, lambda step: step in differing)]
    runs = tuple((group[0], group[-1]) for key, group in grouped if key)
    assert alignment.map().components["actions"] == runs
    assert alignment.map().steps == 24
    assert (alignment.records, alignment.differing) == (6, len(differing))
    first = min(differing, default=None)
    assert (alignment.first and alignment.first.step) == first
    assert alignment.last_equal == (24 if first is None else first - 4)
    assert alignment.at_once == (first == 4)
    # Records of steps that are multiples of 8 have tensors, and only these show that states agree.
    healed = first is not None and any(step % 8 == 0 for step in STEPS if step > max(differing))
    assert alignment.reconverged == healed


def test_a_component_that_differs_from_the_first_record_on_was_never_equal(aligned):
    alignment = aligned({step: {"actions": "b"} for step in STEPS})
    assert alignment.equal_until == {"actions": None, "loss": 24, "parameters": 24}


def test_the_first_difference_has_all_components_of_its_record(aligned):
    alignment = aligned({8: {"parameters": {"w": "q"}, "actions": "b"}, 12: {"loss": None}})
    first = alignment.first
    assert (first.step, first.component, first.also) == (8, "actions", ("parameters",))
    assert (first.a, first.b) == ("a", "b")


def test_another_step_ends_the_alignment(tmp_path):
    left = write(tmp_path / "a", [record(4), record(8), record(12)])
    right = write(tmp_path / "b", [record(4), record(9), record(12)])
    alignment = align_traces(left, right, (EVERY, EVERY), prefix=True)
    first = alignment.first
    assert (first.component, first.step, first.a, first.b) == ("step", 8, "8", "9")
    assert alignment.records == 1


def test_the_trace_that_goes_on_is_named(aligned, tmp_path):
    alignment = aligned(steps=16)
    assert (alignment.first.step, alignment.first.a, alignment.first.b) == (20, "more", None)
    turned = align_traces(tmp_path / "b", tmp_path / "a", (EVERY, EVERY), prefix=False)
    assert (turned.first.step, turned.first.a, turned.first.b) == (20, None, "more")
    assert turned.last_equal == 16


def test_an_earlier_difference_is_not_replaced_by_the_end(aligned):
    assert aligned({8: {"actions": "b"}}, steps=16).first.component == "actions"


def test_a_record_that_is_written_otherwise_is_a_difference_of_the_format(tmp_path):
    left = write(tmp_path / "a", [record(4), record(8)])
    right = tmp_path / "b"
    right.write_text(left.read_text().replace('"step":8,', '"step": 8,'))
    alignment = align_traces(left, right, (EVERY, EVERY), prefix=False)
    assert (alignment.first.step, alignment.first.component) == (8, "format")
    assert alignment.differing == 0


def test_streams_that_one_trace_names_and_the_other_folds_are_not_compared(tmp_path):
    names = write(tmp_path / "a", [record(4, streams={"no-op": "x"})])
    folded = write(tmp_path / "b", [record(4, streams="y")])
    sparse = RecordingSpec(trace_interval=4, tensor_interval=16)
    alignment = align_traces(names, folded, (EVERY, sparse), prefix=False)
    assert alignment.first is None
    assert set(alignment.equal_until) == {"actions", "loss"}
    # With one interval, both would be of one form.
    alike = align_traces(names, folded, (EVERY, EVERY), prefix=False)
    assert alike.first.component == "streams"


def test_records_of_other_intervals_are_paired_by_their_steps(tmp_path):
    fine = write(tmp_path / "a", [record(step) for step in STEPS])
    changed = {"parameters": {"w": "q"}}
    coarse = [record(8), record(16, **changed), record(24, **changed)]
    recordings = EVERY, RecordingSpec(trace_interval=8, tensor_interval=8)
    pair = fine, write(tmp_path / "b", coarse)
    for paths, sides in ((pair, recordings), (pair[::-1], recordings[::-1])):
        alignment = align_traces(*paths, sides, prefix=False)
        assert alignment.map().components == {"parameters": ((16, 24),)}
        assert (alignment.records, alignment.last_equal, alignment.steps) == (3, 8, 24)


@pytest.mark.parametrize(
    "loss", [None, {}, {"last": 0.75}, {"last": "0x1p+99999"}, {"last": (0.5).hex()}, "0x1p+0"]
)
def test_a_loss_that_is_no_other_number_is_not_measured(aligned, loss):
    assert aligned({8: {"loss": loss}}).losses is None


def test_the_first_losses_that_can_be_measured_are_kept(aligned):
    losses = {8: {"last": "broken"}, 12: {"last": (0.25).hex()}, 16: {"last": (0.125).hex()}}
    alignment = aligned({step: {"loss": loss} for step, loss in losses.items()})
    assert alignment.losses == (12, 0.5, 0.25)


def test_two_empty_traces_are_equal(tmp_path):
    paths = write(tmp_path / "a", []), write(tmp_path / "b", [])
    alignment = align_traces(*paths, (EVERY, EVERY), prefix=False)
    assert (alignment.first, alignment.records, alignment.at_once) == (None, 0, False)
    assert alignment.map().components == {}


def test_a_malformed_trace_is_rejected_with_its_line(tmp_path):
    paths = write(tmp_path / "a", [record(4), record(8)]), tmp_path / "b"
    paths[1].write_text(paths[0].read_text().splitlines(keepends=True)[0] + "{broken\n")
    with pytest.raises(CapsuleError, match="b line 2 is not JSON") as caught:
        align_traces(*paths, (EVERY, EVERY), prefix=False)
    assert caught.value.code == "CAP-T141"


def test_components_are_in_the_order_of_the_data_flow_and_unknown_ones_last():
    left = Record(0, 4, {"zeta": 1, "loss": 1, "streams": 1}, "")
    right = Record(0, 4, {"actions": 1, "alpha": 1, "loss": 1}, "")
    assert record_names(left, right) == ["streams", "actions", "loss", "alpha", "zeta"]
    assert record_names(right, left) == record_names(left, right)
