"""A start of a run: its folder, its arguments, what is checked, and what is kept of it."""

import json

import pytest

from capsule.entropy.attempt import Attempt, clear, is_complete
from capsule.entropy.journal import MAX_COUNTS
from capsule.entropy.launch import REPLAYED, launch_arguments
from capsule.entropy.profile import merge, parse, serialize
from capsule.entropy.report import FAILURE, REPORT, EntropyReport
from capsule.experiment.canonical import count_values
from capsule.experiment.contract import (
    ENTROPY_PROFILE,
    ENTROPY_REPORT,
    ENTROPY_STARTS,
    FIRST_PROCESS,
)
from capsule.experiment.errors import CapsuleError
from tests.entropy.journals import (
    THREAD,
    counter_record,
    mismatch_record,
    recorded_run,
    thread_record,
    told_record,
    write_journal,
    write_launch_report,
)
from tests.experiment.specs import make_spec

VIRTUAL = make_spec()
RECORDED = make_spec(entropy={"mode": "recorded"})
LENIENT = make_spec(entropy={"mode": "recorded", "on_exhaustion": "virtual"})


@pytest.fixture
def directory(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def profile(tmp_path):
    """Write a profile of one thread with one call."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    path = tmp_path / "entropy.profile"
    path.write_bytes(merge(recorded_run(folder)))
    return path


def start(directory, spec=VIRTUAL, *, replay=None, ended=False):
    return Attempt(directory, spec, replay=replay, ended=ended)


def folder_of(directory, number=1):
    return directory / ENTROPY_STARTS / f"start-{number:04}"


def code_of(function, *arguments, **options):
    with pytest.raises(CapsuleError) as caught:
        function(*arguments, **options)
    return caught.value.code


def kept(directory):
    return {path.name for path in directory.iterdir()}


# ---- before ----


def test_every_start_has_a_folder_of_its_own_whose_name_is_as_long(directory):
    for number in (1, 2, 3):
        start(directory)
        assert folder_of(directory, number).is_dir()
    names = {path.name for path in (directory / ENTROPY_STARTS).iterdir()}
    assert {len(name) for name in names} == {len("start-0001")}


def test_the_arguments_are_those_of_the_launcher_for_the_folder_that_the_program_sees(directory):
    start(directory)
    found = start(directory).arguments(native="/native", run_directory="/out", seconds=90)
    assert found == launch_arguments(
        VIRTUAL, native="/native", directory="/out/entropy/start-0002", replay=False, seconds=90
    )


def test_a_profile_lies_in_the_folder_of_the_start_that_replays_it(directory, profile):
    attempt = start(directory, RECORDED, replay=profile)
    assert (folder_of(directory) / REPLAYED).read_bytes() == profile.read_bytes()
    words = attempt.arguments(native="/n", run_directory="/out", seconds=1)
    assert words[words.index("--entropy") + 1] == "replay"


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda _: b"", lambda data: data * 2])
def test_a_damaged_profile_is_rejected_before_anything_is_executed(directory, profile, damage):
    profile.write_bytes(damage(profile.read_bytes()))
    code = code_of(start, directory, RECORDED, replay=profile)
    assert code in ("CAP-R211", "CAP-R214")
    assert kept(directory) == set()


def test_a_run_that_records_is_not_resumed(directory):
    start(directory, RECORDED)
    with pytest.raises(CapsuleError) as caught:
        start(directory, RECORDED)
    assert caught.value.code == "CAP-R301"
    assert str(directory) in caught.value.message
    assert "entropy.mode: virtual" in caught.value.fix
    assert not folder_of(directory, 2).exists()


def test_the_last_start_of_a_program_that_has_ended_is_taken_up(directory):
    for spec in (VIRTUAL, RECORDED):
        start(directory / spec.entropy.mode, spec)
        attempt = start(directory / spec.entropy.mode, spec, ended=True)
        assert attempt.arguments(native="/n", run_directory="/out", seconds=1) == []
        assert [path.name for path in (directory / spec.entropy.mode).rglob("start-*")] == [
            "start-0001"
        ]


# ---- after ----


def test_a_start_that_went_well_passes(directory):
    attempt = start(directory)
    attempt.check()
    write_journal(folder_of(directory))
    attempt.check()


def test_a_failure_of_the_launcher_is_raised_whatever_the_program_said(directory):
    attempt = start(directory)
    facts = {"schema": "capsule/launch-failure/v1", "code": "CAP-R106", "message": "no such file"}
    (folder_of(directory) / FAILURE).write_text(json.dumps(facts))
    for step in (attempt.check, lambda: attempt.finish(prefix=False)):
        with pytest.raises(CapsuleError, match="no such file") as caught:
            step()
        assert caught.value.code == "CAP-R106"
    assert kept(directory) == {ENTROPY_STARTS}


def test_a_recorded_run_whose_journal_is_full_is_named_so(directory):
    attempt = start(directory, RECORDED)
    attempt.check()  # the launcher may have been killed before it made a journal
    recorded_run(folder_of(directory))
    attempt.check()
    recorded_run(folder_of(directory), failed=2)
    assert code_of(attempt.check) == "CAP-R203"


def test_a_replay_that_asked_for_something_else_is_named_so(directory, profile):
    attempt = start(directory, RECORDED, replay=profile)
    write_journal(folder_of(directory), mismatch_record(3, (5, 4)), failed=1)
    assert code_of(attempt.check) == "CAP-R221"


def test_a_replay_may_have_used_a_part_when_it_is_checked(directory, profile):
    attempt = start(directory, RECORDED, replay=profile)
    write_journal(folder_of(directory))
    attempt.check()


def test_a_run_leaves_its_report_and_nothing_else(directory):
    start(directory)
    attempt = start(directory)
    write_journal(folder_of(directory, 2))
    write_launch_report(folder_of(directory, 2), clock="fixed", processes=7)
    report = attempt.finish(prefix=False)
    clear(directory)
    assert (report.starts, report.clock, report.processes) == (2, "fixed", 7)
    assert kept(directory) == {ENTROPY_REPORT}
    assert EntropyReport.parse((directory / ENTROPY_REPORT).read_bytes()) == report


@pytest.mark.parametrize("count", [MAX_COUNTS + 1, 1 << 53, 1 << 64])
def test_a_count_that_a_document_cannot_contain_is_named_with_its_file(directory, count):
    attempt = start(directory)
    write_journal(folder_of(directory))
    write_launch_report(folder_of(directory), processes=count)
    with pytest.raises(CapsuleError) as caught:
        attempt.finish(prefix=False)
    assert caught.value.code == "CAP-R113"
    said = f"{folder_of(directory) / REPORT} has an impossible count: {count:,}"
    assert caught.value.message == said


def test_the_largest_counts_of_journal_and_launch_report_are_written(directory):
    attempt = start(directory)
    use = counter_record(THREAD, calls=1, size=MAX_COUNTS - 1)
    write_journal(folder_of(directory), thread_record(), use)
    others = MAX_COUNTS - FIRST_PROCESS
    write_launch_report(folder_of(directory), processes=others)
    report = attempt.finish(prefix=False)
    assert EntropyReport.parse((directory / ENTROPY_REPORT).read_bytes()) == report


@pytest.mark.parametrize("limit", ["MAX_DOCUMENT_BYTES", "MAX_VALUES"])
def test_a_report_that_no_reader_accepts_is_an_error(directory, monkeypatch, limit):
    attempt = start(directory)
    write_launch_report(folder_of(directory))
    told = [told_record(process=b"0.1x.%d" % number) for number in range(100)]
    write_journal(folder_of(directory), *told)
    document = attempt.finish(prefix=False).document()
    (directory / ENTROPY_REPORT).unlink()
    size = {"MAX_DOCUMENT_BYTES": len(document), "MAX_VALUES": count_values(document)}[limit]
    monkeypatch.setattr(f"capsule.entropy.report.{limit}", size)
    attempt.finish(prefix=False)
    (directory / ENTROPY_REPORT).unlink()
    monkeypatch.setattr(f"capsule.entropy.report.{limit}", size - 1)
    with pytest.raises(CapsuleError, match=f"{size:,} (bytes|values)") as caught:
        attempt.finish(prefix=False)
    assert caught.value.code == "CAP-R115"
    assert "Start fewer" in caught.value.fix
    assert kept(directory) == {ENTROPY_STARTS}


def test_a_recorded_run_leaves_its_profile(directory):
    attempt = start(directory, RECORDED)
    recorded_run(folder_of(directory))
    write_launch_report(folder_of(directory), mode="record")
    attempt.finish(prefix=False)
    clear(directory)
    assert kept(directory) == {ENTROPY_REPORT, ENTROPY_PROFILE}
    (thread,) = parse((directory / ENTROPY_PROFILE).read_bytes()).threads
    assert [call.kept for call in thread.calls] == [b"12345678"]


def finished(directory, profile, *records, spec=RECORDED, prefix=False):
    """Finish a replay that wrote these records down."""
    attempt = start(directory, spec, replay=profile)
    write_journal(folder_of(directory), *records)
    write_launch_report(folder_of(directory), mode="replay")
    return attempt.finish(prefix=prefix)


def test_a_replay_leaves_the_profile_that_it_was_served_from(directory, profile):
    served = profile.read_bytes()
    attempt = start(directory, RECORDED, replay=profile)
    profile.write_bytes(serialize(parse(served))[:-1])  # changed while it runs
    write_journal(folder_of(directory), thread_record())
    write_launch_report(folder_of(directory), mode="replay")
    attempt.finish(prefix=False)
    assert (directory / ENTROPY_PROFILE).read_bytes() == served


def test_a_replay_that_used_less_is_complete_only_as_a_prefix(directory, profile):
    assert code_of(finished, directory, profile) == "CAP-R222"
    assert (directory / ENTROPY_STARTS).exists()  # so that finishing it can be repeated
    other = directory / "prefix"
    finished(other, profile, prefix=True)
    assert (other / ENTROPY_PROFILE).read_bytes() == profile.read_bytes()


def test_a_replay_that_got_derived_bytes_has_no_profile(directory, profile):
    more = thread_record(calls=3, derived=2)
    finished(directory, profile, more, spec=LENIENT)
    clear(directory)
    assert kept(directory) == {ENTROPY_REPORT}


def test_without_the_launchers_report_nothing_is_finished(directory):
    attempt = start(directory)
    write_journal(folder_of(directory))
    assert code_of(attempt.finish, prefix=False) == "CAP-R113"
    assert kept(directory) == {ENTROPY_STARTS}


def test_a_start_whose_launcher_failed_is_not_complete(directory):
    start(directory)
    write_launch_report(folder_of(directory))
    assert is_complete(directory)
    (folder_of(directory) / FAILURE).touch()
    assert not is_complete(directory)
    start(directory)
    write_launch_report(folder_of(directory, 2))
    assert is_complete(directory)  # only the last start counts


def test_a_finish_is_repeated_until_the_folders_are_cleared(directory):
    attempt = start(directory, RECORDED)
    recorded_run(folder_of(directory))
    assert not is_complete(directory)
    write_launch_report(folder_of(directory), mode="record")
    attempt.finish(prefix=False)
    assert is_complete(directory)
    first = [(directory / name).read_bytes() for name in (ENTROPY_REPORT, ENTROPY_PROFILE)]
    start(directory, RECORDED, ended=True).finish(prefix=False)
    assert [(directory / name).read_bytes() for name in (ENTROPY_REPORT, ENTROPY_PROFILE)] == first
    for _ in range(2):
        clear(directory)
        assert kept(directory) == {ENTROPY_REPORT, ENTROPY_PROFILE}
    assert not is_complete(directory)
