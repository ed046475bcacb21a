"""What a program wrote in two runs: which files differ, and in what."""

import pickle
import shutil

import pytest

from capsule.bundle.claims import ProgramClaims
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.contract import OUTPUTS, WORKSPACE, Output, Outputs
from capsule.report.text import printable
from capsule.verification.analysis.causes import Facts, explain
from capsule.verification.analysis.comparison import compare_claims
from capsule.verification.analysis.outputs import (
    STANDARD_OUTPUT,
    ProgramOutputs,
    compare_outputs,
    outputs_in,
)
from capsule.verification.analysis.pin_differences import Change
from capsule.verification.content.times import Span

ZERO = "0" * 64
CLAIMED, FOUND = 1_732_262_000, 1_763_798_000


def make_claims(outputs, standard_output=None, **others):
    return ProgramClaims(
        lock=ZERO,
        image=None,
        relaxations=(),
        flags={},
        libraries={},
        outputs=outputs,
        standard_output=standard_output,
        **others,
    )


def make_output(folder, path, data, **facts):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(data)
    return Output(size=len(data), sha256=sha256_hex(data), **facts)


@pytest.fixture
def two_runs(tmp_path):
    """Compare a recorded run with another, both given as files and standard output."""

    def compare(recorded_files, found_files, printed=(b"", b""), claimed=None, found=None):
        recorded, directory = tmp_path / "recorded", tmp_path / "again"
        sides = []
        for files, text, folder, output, others in (
            (recorded_files, printed[0], recorded, "stdout.txt", claimed),
            (found_files, printed[1], directory / WORKSPACE, "../stdout.txt", found),
        ):
            outputs = {
                path: data if isinstance(data, Output) else make_output(folder, path, data)
                for path, data in files.items()
            }
            sides.append(make_claims(outputs, make_output(folder, output, text), **(others or {})))
        return compare_files(*sides, recorded, directory), compare_claims(*sides)

    return compare


def listing_of(claims):
    return Outputs(
        files=claims.outputs,
        deleted=claims.deleted,
        empty_folders=claims.empty_folders,
        standard_output=claims.standard_output,
    )


def compare_files(claimed, found, recorded, directory):
    """Compare the outputs that are in a folder with those that are in a run directory."""

    def open_recorded(path):
        return (recorded / ("stdout.txt" if path == STANDARD_OUTPUT else path)).open("rb")

    (directory / OUTPUTS).write_bytes(listing_of(found).document())
    return compare_outputs(
        ProgramOutputs(listing_of(claimed), open_recorded, Span(CLAIMED, CLAIMED + 600)),
        outputs_in(directory, Span(FOUND, FOUND + 600)),
    )


def test_equal_outputs_do_not_differ(two_runs):
    assert two_runs({"a": b"1"}, {"a": b"1"}) == (None, ())


def test_every_file_that_differs_is_compared_in_order_of_paths(two_runs):
    found, all_of_them = two_runs(
        {"b.jsonl": b'{"x":1}\n{"x":2}\n', "c": b"x", "a": b"="},
        {"b.jsonl": b'{"x":1}\n{"x":3}\n', "c": b"y", "a": b"="},
        printed=(b"1\nlast\n", b"1\nend\n"),
    )
    assert [(each.path, each.where) for each in found.files] == [
        ("b.jsonl", "line 2: x"),
        ("c", "line 1"),
        (STANDARD_OUTPUT, "line 2"),
    ]
    assert (found.files[0].claimed, found.files[0].found) == ("2", "3")
    assert (found.count, found.nature) == (3, "content")
    assert [item.component for item in all_of_them] == [
        "outputs.b.jsonl.sha256",
        "outputs.c.sha256",
        "standard_output.sha256",
        "standard_output.size",
    ]


def test_a_shorter_text_differs_where_it_ends(two_runs):
    found, _ = two_runs({"a": b"1\n2\n"}, {"a": b"1\n"})
    first = found.files[0]
    assert (first.where, first.claimed, first.found) == ("line 2", "2", "end of file")


def test_a_missing_and_an_additional_file_are_named(two_runs):
    found, _ = two_runs({"a": b"", "b": b""}, {"b": b""})
    assert (found.files[0].path, found.files[0].found) == ("a", "no output")
    found, _ = two_runs({"b": b""}, {"a": b"", "b": b""})
    assert (found.files[0].path, found.files[0].claimed) == ("a", "no output")


def test_deletions_and_empty_folders_are_compared(two_runs):
    found, _ = two_runs({}, {}, claimed={"deleted": ("a",)}, found={"empty_folders": ("b",)})
    assert [(each.path, each.claimed, each.found) for each in found.files] == [
        ("a", "deleted", "no output"),
        ("b", "no output", "an empty folder"),
    ]
    assert found.nature == "content"


def test_a_file_called_like_the_standard_output_is_not_taken_for_it(two_runs):
    """No name of a file may hide it behind the standard output, which is equal here."""
    for name in ("standard output", "dev/stdout", STANDARD_OUTPUT.lstrip("/")):
        found, _ = two_runs({name: b"score 500\n"}, {name: b"score 3\n"}, printed=(b"1", b"1"))
        assert [(each.path, each.nature) for each in found.files] == [(name, "content")]


def test_the_executable_bit_is_content(tmp_path):
    output = make_output(tmp_path / WORKSPACE, "a", b"1")
    left = make_claims({"a": output})
    right = make_claims({"a": output.model_copy(update={"executable": True})})
    found = compare_files(left, right, tmp_path / WORKSPACE, tmp_path)
    assert (found.nature, found.files[0].content) == ("content", None)
    assert "executable" in found.files[0].found


def causes(found, differences=()):
    facts = Facts(None, tuple(differences), (), outputs=found)
    return [(cause.name, cause.certainty) for cause in explain(facts)]


def test_equal_content_under_another_name_is_recognised(two_runs):
    found, differences = two_runs({"model-81": b"1", "z": b"="}, {"model-97": b"1", "z": b"="})
    file = found.files[0]
    assert (found.count, file.path, file.found_path) == (1, "model-81", "model-97")
    assert found.nature == "content"
    assert causes(found, differences) == [("other-names", "shown")]


def test_a_name_that_differs_in_a_date_only_is_that_of_the_same_file(two_runs):
    names = f"events.{CLAIMED + 5}.host", f"events.{FOUND + 9}.host"
    found, differences = two_runs({names[0]: b"1"}, {names[1]: b"1"})
    assert (found.count, found.nature, found.files[0].found_path) == (1, "date", names[1])
    assert causes(found, differences) == [("clock", "shown")]
    found, _ = two_runs({names[0]: b"score 1\n"}, {names[1]: b"score 2\n"})
    assert (found.nature, found.files[0].where) == ("content", "line 1")


def test_a_link_to_a_file_with_a_date_in_its_name_is_a_date(two_runs):
    def link(target):
        return {"log": Output(size=1, sha256=sha256_hex(target.encode()), target=target)}

    names = f"{CLAIMED + 5}.log", f"{FOUND + 9}.log"
    found, differences = two_runs(link(names[0]), link(names[1]))
    assert (found.nature, found.files[0].found) == ("date", f"link to {names[1]}")
    assert causes(found, differences) == [("clock", "shown")]
    found, _ = two_runs(link(names[0]), link("other.log"))
    assert found.nature == "content"


def test_only_dates_is_said_only_if_every_output_differs_in_dates_only(two_runs):
    dates = b"start %d\n" % (CLAIMED + 1), b"start %d\n" % (FOUND + 1)
    found, differences = two_runs({"a": dates[0]}, {"a": dates[1]}, printed=dates)
    assert (found.count, found.nature) == (2, "date")
    assert causes(found, differences) == [("clock", "shown")]
    found, differences = two_runs({"a": dates[0], "b": b"1"}, {"a": dates[1], "b": b"2"})
    assert found.nature == "content"
    assert causes(found, differences) == [("clock", "likely")]


@pytest.mark.parametrize(
    ("clock", "advised", "not_advised"),
    [
        ("system", "Set entropy.clock: virtual", "fixed"),
        ("virtual", "set entropy.clock: fixed", "Set entropy.clock: virtual"),
        ("fixed", "Exclude the file", "Set entropy.clock"),
    ],
)
def test_the_remedy_for_dates_is_not_the_clock_that_the_program_read(
    two_runs, clock, advised, not_advised
):
    found, _ = two_runs({"a": b"start %d\n" % (CLAIMED + 1)}, {"a": b"start %d\n" % (FOUND + 1)})
    (cause,) = explain(Facts(None, (), (), outputs=found, clock=clock))
    assert advised in cause.fix
    assert not_advised not in cause.fix
    assert printable(cause.fix) == cause.fix  # reports cut what is longer


@pytest.mark.parametrize("clock", ["virtual", "fixed"])
def test_a_clock_that_starts_alike_in_every_run_is_a_sign_of_another_path(two_runs, clock):
    dates = b"start %d\n" % (CLAIMED + 1), b"start %d\n" % (FOUND + 1)
    found, _ = two_runs({"a": dates[0], "b": b"1"}, {"a": dates[1], "b": b"2"})
    (cause,) = explain(Facts(None, (), (), outputs=found, clock=clock))
    assert (cause.name, cause.certainty) == ("clock", "possible")
    assert "threads or processes of the program race" in cause.fix
    assert "trainer.outputs" in cause.fix


def test_the_order_of_lines_is_a_cause_of_its_own(two_runs):
    found, differences = two_runs({}, {}, printed=(b"1\n2\n", b"2\n1\n"))
    assert found.nature == "order"
    assert causes(found, differences) == [("order-of-lines", "shown")]


# A pickle, with the first two bytes of a number, whose name is long.
TIMER = pickle.dumps({f"env_runners--{'connector--' * 5}timer": 1.0}).replace(b"?\xf0", b"%s")


@pytest.mark.parametrize(
    ("claimed", "again", "expected"),
    [
        (b"SPS: 812\nreturn 9\n", b"SPS: 79\nreturn 9\n", [("durations", "likely")]),
        (b'{"fps": 812, "steps": 9}', b'{"fps": 79, "steps": 9}', [("durations", "likely")]),
        (b"train/time_elapsed 8.5\n", b"train/time_elapsed 1e-05\n", [("durations", "likely")]),
        (b'{"wall_time": 8.5, "x": 9}', b'{"wall_time": 1e-05, "x": 9}', [("durations", "likely")]),
        (TIMER % b"?\x80", TIMER % b"@\x00", [("durations", "likely")]),
        (b"SPS: 812\nreturn 9\n", b"SPS: 79\nreturn 7\n", [("durations", "possible")]),
        (b"return 9, 8.5 it/s\n", b"return 9, 8.7 it/s\n", [("durations", "likely")]),
        # The number that differs has another name.
        (b"SPS: 812, return 9\n", b"SPS: 812, return 7\n", [("unexplained", None)]),
        (b"return 9 SPS 812\n", b"return 7 SPS 812\n", [("unexplained", None)]),
        (b"time: 1-2\n", b"time: 1\n", [("unexplained", None)]),
        (b"total_timesteps 812\n", b"total_timesteps 79\n", [("unexplained", None)]),
        (b"time to first goal: 3\n", b"no time left: 3\n", [("unexplained", None)]),
        # Only the first parts that differ are kept, and others may be results.
        (b"SPS: 1\n" * 30, b"SPS: 2\n" * 30, [("durations", "possible")]),
    ],
)
def test_numbers_that_are_named_like_durations_are_a_cause(two_runs, claimed, again, expected):
    found, differences = two_runs({"log": claimed}, {"log": again})
    assert found.nature == "content"
    assert causes(found, differences) == expected


BAR = "{}: {}%|▋   | {}/200 [00:{}<00:01, 219.57it/s, loss={}]\r100%|████| 200/200"


@pytest.mark.parametrize(
    ("claimed", "again", "expected"),
    [
        (("loss 5", 7, 14, 20, 5), ("loss 5", 9, 18, 17, 5), [("durations", "likely")]),
        (("loss 5", 7, 14, 20, 5), ("loss 5", 7, 15, 20, 5), [("durations", "likely")]),
        (("loss 5", 7, 14, 20, 5), ("loss 5", 7, 14, 29, 5), [("durations", "likely")]),
        (("loss 5", 7, 14, 20, 5), ("loss 5", 7, 14, 20, 6), [("unexplained", None)]),
        (("loss 5", 7, 14, 20, 5), ("loss 6", 9, 18, 17, 6), [("unexplained", None)]),
    ],
)
def test_progress_bars_of_tqdm_that_were_drawn_at_other_moments_are_a_cause(
    two_runs, claimed, again, expected
):
    printed = tuple(BAR.format(*values).encode() for values in (claimed, again))
    found, differences = two_runs({}, {}, printed=printed)
    assert causes(found, differences) == expected


@pytest.mark.parametrize(
    ("claimed", "again", "expected"),
    [
        (b"<f at 0x7fffb06f4f40>\n", b"<f at 0x7fffb8700f40>\n", [("addresses", "shown")]),
        (b'{"f": "<f at 0xa5d2c0>"}', b'{"f": "<f at 0xa5d2d0>"}', [("addresses", "shown")]),
        (b"<f at 0xa5d2c0>\n1\n", b"<f at 0xa5d2d0>\n2\n", [("addresses", "possible")]),
        (b"<f at 0xa5d2c0>, 1\n", b"<f at 0xa5d2d0>, 2\n", [("unexplained", None)]),
        (b"digest 0xa5d2c0\n", b"digest 0xa5d2d0\n", [("unexplained", None)]),
    ],
)
def test_addresses_of_objects_are_a_cause(two_runs, claimed, again, expected):
    found, differences = two_runs({"log": claimed}, {"log": again})
    assert found.nature == ("address" if expected == [("addresses", "shown")] else "content")
    assert causes(found, differences) == expected


def test_a_text_with_an_address_and_a_date_differs_in_an_address(two_runs):
    texts = [b"%d <f at 0x%x>\n" % (time + 1, time) for time in (CLAIMED, FOUND)]
    found, _ = two_runs({"log": texts[0]}, {"log": texts[1]})
    assert found.nature == "address"


def test_where_no_cause_is_known_none_is_called_possible(two_runs):
    found, differences = two_runs({"a": b"1"}, {"a": b"2"})
    assert causes(found, differences) == [("unexplained", None)]


def test_an_unexplained_difference_of_a_program_has_the_remedy_for_races(two_runs):
    found, differences = two_runs({"a": b"1"}, {"a": b"2"})
    (cause,) = explain(Facts(None, tuple(differences), (), outputs=found))
    assert "capsule.training.arrivals" in cause.fix
    (changed,) = explain(Facts(None, tuple(differences), (Change("code", "a", "1", "2"),)))
    assert changed.fix is None


@pytest.mark.parametrize("link", ["a", "folder"])
def test_a_file_of_the_machine_never_ends_up_in_a_report(two_runs, tmp_path, link):
    """A program says that it wrote a file, and leaves a link to one that only the machine has."""
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine/a").write_text("secret")
    path = "a" if link == "a" else "folder/a"
    two_runs({path: b"claimed"}, {path: b"secret"})
    workspace = tmp_path / "again" / WORKSPACE
    if link == "a":
        (workspace / "a").unlink()
        (workspace / "a").symlink_to(tmp_path / "machine/a")
    else:
        shutil.rmtree(workspace / "folder")
        (workspace / "folder").symlink_to(tmp_path / "machine")
    left, right = (
        make_claims({path: Output(size=len(data), sha256=sha256_hex(data))})
        for data in (b"claimed", b"secret")
    )
    found = compare_files(left, right, tmp_path / "recorded", tmp_path / "again")
    assert (found.files[0].path, found.files[0].content) == (path, None)
    assert "secret" not in found.files[0].found


def test_claims_say_in_words_what_they_are(tmp_path):
    printed = make_output(tmp_path, "stdout", b"12")
    assert make_claims({"a": printed}, printed, deleted=("b", "c")).described == (
        "1 file, 2 deleted files, 2 bytes of standard output"
    )
    nothing = make_claims({}, make_output(tmp_path, "stdout", b""))
    assert nothing.nothing
    assert nothing.described.startswith("NOTHING")
    assert not make_claims({}, None, empty_folders=("a",)).nothing
