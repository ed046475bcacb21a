"""Verification reports on a terminal."""

import io
from typing import get_args

import pytest
from rich.console import Console

from capsule.bundle.trust import Signer
from capsule.entropy.ledger import Ledger, LedgerRow, compare_ledgers
from capsule.machine.compare import FactComparison
from capsule.report.terminal import place_of, show_report
from capsule.verification.content.parts import Comparison, Part
from capsule.verification.verdict import (
    Cause,
    Challenge,
    ComponentDifference,
    Divergence,
    Explanation,
    FreshSeed,
    Grade,
    OutputComparison,
    OutputDifference,
    ReexecutedSegment,
    Report,
    TraceDifference,
)
from tests.report.conftest import different, read
from tests.report.terminals import printed

MAX_LINES = 30


def shown(report):
    return printed(show_report, report, width=120)


def ledger(**treatments):
    rows = [
        LedgerRow(source=source, treatment=treatment, evidence="seen", weakened_by="luck")
        for source, treatment in treatments.items()
    ]
    return Ledger(rows=tuple(rows))


def verified(**facts):
    return Report(
        bundle="run.capsule.tar",
        mode="full",
        verdict="reproduced-bitwise",
        summary="the re-execution reproduced every claim",
        **facts,
    )


def test_the_ledger_of_the_re_execution_is_shown_and_what_the_recorded_one_says_otherwise():
    recorded = ledger(Clocks="eliminated", Software="eliminated", Scheduling="ordered")
    here = ledger(Clocks="eliminated", Software="assumed", Network="assumed")
    text = shown(
        verified(
            recorded_ledger=recorded,
            ledger=here,
            ledger_differences=compare_ledgers(recorded, here),
        )
    )
    assert "Software (assumed), Network (assumed)\n" in text
    assert "ledger differs   Software: recorded eliminated, here assumed" in text
    assert "Scheduling: recorded ordered, here no such row" in text
    assert "and 1 more source in the report" in text


def test_a_ledger_that_was_not_computed_here_is_said_to_be_the_signers():
    text = shown(verified(recorded_ledger=ledger(Clocks="assumed")))
    assert "Clocks (assumed), as the signer recorded" in text


def test_a_difference_is_told_with_step_component_and_both_values():
    report = Report(
        bundle="run.capsule.tar",
        mode="full",
        verdict="not-reproduced",
        summary="the runs first differ at step 8, in the loss",
        integrity=True,
        authentic=True,
        signer="SHA256:abc",
        first_difference=TraceDifference(
            step=8, component="parameters", name="[bold]fc1.weight", claimed="aa", found="bb"
        ),
        differences=(ComponentDifference(component="trace.head", claimed="1", found="2"),),
    )
    text = shown(report)
    assert "step 8, parameters, [bold]fc1.weight" in text
    assert "claimed aa" in text
    assert "found   bb" in text
    assert "trace.head" in text
    assert text.rstrip().splitlines()[-1].startswith("not-reproduced")


def test_a_narrow_terminal_cuts_values_and_no_names():
    row = FactComparison(
        field="cpu.usable_cores", recorded="x" * 40, here="y", effect="recorded-only", reason="r"
    )
    stream = io.StringIO()
    show_report(verified(environment=(row,)), Console(file=stream, width=60))
    line = next(each for each in stream.getvalue().splitlines() if each.startswith("cpu"))
    assert line.split()[::3] == ["cpu.usable_cores", "recorded-only"]


def test_the_output_of_a_failed_program_takes_its_own_lines():
    error = {"code": "CAP-T302", "message": "m", "fix": "Look there."}
    summary = "the program ended with status 1: python x\n  Traceback\nreproduced-bitwise  \x1b"
    failed = verified().model_copy(update={"summary": summary, "error": error})
    last = shown(failed.model_copy(update={"verdict": "inconclusive"})).rstrip().splitlines()[-4:]
    assert last == [
        "inconclusive  CAP-T302: the program ended with status 1: python x",
        "  Traceback",
        "  reproduced-bitwise  \N{REPLACEMENT CHARACTER}",
        "fix: Look there.",
    ]


def test_every_signer_is_named_and_why_one_does_not_count():
    signers = (
        Signer(kind="dsse", key="SHA256:abc", identity="alice@lab"),
        Signer(kind="sshsig", key="SHA256:def", rejection_reason="is revoked"),
    )
    report = Report(
        bundle="run.capsule.tar",
        mode="integrity",
        verdict="intact",
        summary="",
        integrity=True,
        authentic=True,
        signer="SHA256:abc",
        signers=signers,
    )
    text = shown(report)
    assert "signed by a trusted key: SHA256:abc (alice@lab)" in text
    assert "not counted: SHA256:def is revoked" in text


@pytest.mark.parametrize("authentic", [False, True])
def test_integrity_and_authenticity_are_told_apart(authentic):
    text = shown(
        Report(
            bundle="b.tar",
            mode="integrity",
            verdict="intact",
            summary="s",
            integrity=True,
            authentic=authentic,
            signer="SHA256:abc",
        )
    )
    assert ("unchanged since it was signed" in text) == authentic
    assert ("the files are those that the bundle lists" in text) == (not authentic)
    assert ("NOT trusted: SHA256:abc" in text) == (not authentic)


def test_a_trusted_key_that_is_not_enough_is_not_said_to_be_untrusted():
    report = Report(
        bundle="b.tar",
        mode="integrity",
        verdict="untrusted",
        summary="s",
        integrity=True,
        authentic=False,
        signer="SHA256:abc",
        signers=(Signer(kind="dsse", key="SHA256:abc"),),
    )
    text = shown(report)
    assert "NOT enough trusted keys: SHA256:abc\n" in text
    assert "NOT trusted" not in text


def test_a_verdict_stays_within_thirty_lines_whatever_differs():
    rows = tuple(
        FactComparison(field=f"gpu.{n}", recorded="x" * 900, here="y", effect=effect, reason="r")
        for n in range(40)
        for effect in ("none", "recorded-only", "gate", "may differ")
    )
    differences = tuple(
        ComponentDifference(component=f"c{n}", claimed="a", found="b") for n in range(40)
    )
    report = Report(
        bundle="b.tar", mode="full", verdict="not-reproduced", summary="s", claim_id="c",
        integrity=True, authentic=True, signer="k", expected="e", environment=rows,
        image_rebuilt=True, differences=differences, relaxations=("r",), reexecuted_steps=1,
        error={"code": "CAP-X001", "message": "m", "fix": "f"},
    )  # fmt: skip
    text = shown(report)
    assert len(text.splitlines()) <= MAX_LINES
    assert "gate" in text
    assert "recorded-only" not in text  # the least grave of so many
    assert "40 facts of the machine are equal" in text
    assert "and 38 more differences" in text


def test_an_analysis_stays_within_thirty_lines_and_keeps_where_and_why(bundles):
    report = different(read(bundles["dqn"])).model_copy(
        update={
            "divergence": Divergence(
                a="a",
                b="b",
                equal=False,
                first=TraceDifference(step=8, component="loss", claimed="1", found="2"),
                causes=(Cause(name="arithmetic", certainty="likely", evidence=("e",) * 14),),
                explanations=tuple(
                    Explanation(what=f"w{n}", a="a", b="b", why="y") for n in range(40)
                ),
                differences=tuple(
                    ComponentDifference(component=f"c{n}", claimed="a", found="b")
                    for n in range(40)
                ),
            )
        }
    )
    text = shown(report)
    assert len(text.splitlines()) <= MAX_LINES
    assert "step 8, loss" in text
    assert "arithmetic (likely)" in text
    assert "more lines in the report" in text


# --- one fact, one line -------------------------------------------------------------------------

FACTS = {
    "expected": ({"expected": "bitwise"}, "expected         bitwise"),
    "claim id": ({"claim_id": "ab12"}, "claim id         ab12"),
    "not intact": ({"integrity": False}, "integrity        NOT intact"),
    "own code": ({"own_code": True}, "training code    Capsule's"),
    "other code": ({"own_code": False}, "training code    NOT Capsule's"),
    "not checked": ({"unchecked": ("a", "b")}, "not checked      a, b"),
    "many not checked": (
        {"unchecked": ("a", "b", "c", "d", "e")},
        "not checked      a, b, c and 2 more",
    ),
    "claims": ({"claimed": "2 files"}, "claims           2 files"),
    "relaxations": ({"relaxations": ("x=1", "y")}, "relaxations      x=1, y"),
    "steps": ({"reexecuted_steps": 12_000}, "re-executed      12,000 steps"),
    "no image": ({"image_rebuilt": False}, "image            none"),
    "rebuilt": (
        {"image_rebuilt": True, "image_source": "rebuilt"},
        "image            rebuilt from the lock, with the same identity",
    ),
    "embedded": (
        {"image_rebuilt": False, "image_source": "embedded"},
        "image            the signer's, from the bundle; NOT rebuilt from the lock",
    ),
    "registry": (
        {"image_source": "registry"},
        "image            the claimed one, from a registry; NOT rebuilt from the lock",
    ),
    "supplied base": (
        {"image_rebuilt": True, "image_source": "supplied-base"},
        "image            rebuilt from the lock except for the base layer, which is the SIGNER'S",
    ),
    "tree of a trainer": (
        {"source_tree": "2 files, ab"},
        "source tree      the SIGNER'S code, executed in the trainer's process: 2 files, ab",
    ),
    "data": (
        {"data": ("digits: 4 files, 8 bytes, SHA-256 ab",)},
        "data             digits: 4 files, 8 bytes, SHA-256 ab",
    ),
    "records": (
        {"records": ("the schedule", "the order")},
        "records          followed as the SIGNER wrote them: the schedule, the order",
    ),
    "packages": (
        {"besides": ("numpy 2", "torch 2")},
        "packages         added to Capsule's recipe: numpy 2, torch 2",
    ),
    "startup": (
        {"besides": (), "startup": ("a.pth",)},
        "packages         executed at every start of Python: a.pth",
    ),
}


@pytest.mark.parametrize(("facts", "line"), FACTS.values(), ids=FACTS)
def test_a_fact_has_a_line_and_an_unknown_one_has_none(facts, line):
    lines = shown(verified(**facts)).splitlines()
    assert line in lines
    assert len(lines) == 1 + 1 + 2  # the bundle, the fact, a blank line, the verdict


def test_many_packages_are_counted():
    packages = tuple(f"package-{number} 1.0.{'0' * 30}" for number in range(15))
    lines = shown(verified(besides=packages, startup=("a 1: a.pth",))).splitlines()
    (line,) = (line for line in lines if line.startswith("packages"))
    assert "package-4 1.0" in line
    assert line.endswith(" and 9 more, which the report lists")
    # However many there are, what every start of Python executes is named.
    assert f"{' ' * 17}executed at every start of Python: a 1: a.pth" in lines


def test_many_data_sets_are_counted():
    lines = shown(verified(data=tuple(f"d{number}: 1 file" for number in range(5)))).splitlines()
    assert "data             d0: 1 file" in lines
    assert f"{' ' * 17}d2: 1 file" in lines
    assert f"{' ' * 17}and 2 more, which the report lists" in lines


def test_a_pattern_of_the_signer_hides_no_other_relaxation():
    patterns = (f"trainer.outputs=!{'0' * 500}", "trainer.outputs=!score.json")
    given_up = ("determinism.cores=None", *patterns, "trainer.standard_output=False")
    (line,) = (
        line
        for line in shown(verified(relaxations=given_up)).splitlines()
        if line.startswith("relaxations")
    )
    assert line.endswith(f"!{'0' * 53}…, trainer.outputs=!score.json")
    assert "determinism.cores=None, trainer.standard_output=False, " in line
    many = tuple(f"trainer.outputs=!{number:050}" for number in range(30))
    assert " and 26 more, which the report lists" in shown(verified(relaxations=many))


def test_the_end_of_a_long_verdict_is_shown():
    """Segments, a fresh seed and the signer's own image take more than 400 characters."""
    end = "; the training code was the signer's own and not this Capsule's"
    report = verified().model_copy(update={"summary": f"{'x' * 400}{end}"})
    assert shown(report).rstrip().endswith(end)


def test_a_key_that_signed_twice_is_named_once():
    signers = tuple(Signer(kind=kind, key="SHA256:abc") for kind in ("dsse", "sshsig"))
    text = shown(verified(authentic=True, signer="SHA256:abc", signers=signers))
    assert "authenticity     signed by a trusted key: SHA256:abc\n" in text


# --- the verdict --------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", get_args(Grade))
def test_every_verdict_ends_the_report_with_its_summary(verdict):
    report = verified().model_copy(update={"verdict": verdict, "summary": "a [bold]reason"})
    assert shown(report).splitlines()[-2:] == ["", f"{verdict}  a [bold]reason"]


def test_an_error_is_shown_with_its_code_and_its_remedy_below_the_verdict():
    error = {"code": "CAP-V009", "message": "m", "fix": "Use --engine docker."}
    lines = shown(verified(error=error)).splitlines()
    assert lines[-2:] == [
        "reproduced-bitwise  CAP-V009: the re-execution reproduced every claim",
        "fix: Use --engine docker.",
    ]


def test_an_untrusted_text_is_neither_markup_nor_steers_the_terminal():
    evil = "[link=x]\x1b[31m\u202e"
    error = {"code": "CAP-V009", "message": evil, "fix": evil}
    text = shown(
        verified(expected=evil, unchecked=(evil,), error=error).model_copy(update={"summary": evil})
    )
    assert text.count("[link=x]") == 4
    assert not {"\x1b", "\u202e"} & set(text)


# --- segments and fresh seeds -------------------------------------------------------------------


def test_chosen_segments_are_shown_with_the_chance_to_miss_a_false_one():
    segments = (
        ReexecutedSegment(begins=0, ends=1000, equal=True),
        ReexecutedSegment(begins=9000, ends=10_000, equal=False),
    )
    challenge = Challenge(chosen="at random", of=10, segments=segments, undetected=0.8)
    text = shown(verified(challenge=challenge))
    assert (
        "segments         2 of 10, at random; a single false segment would be missed with "
        "probability 0.8\n"
        "                 steps 0 to 1,000: the same\n"
        "                 steps 9,000 to 10,000: DIFFERENT\n"
    ) in text


def test_a_fresh_seed_is_shown_with_its_contradictions():
    fresh = FreshSeed(
        seed=77, steps=2000, keys=5, contradictions=("equal losses",), unrepeated=("equal actions",)
    )
    assert (
        "fresh seed       77, 2,000 steps, executed twice\n"
        "                 equal losses\n"
        "                 equal actions\n"
    ) in shown(verified(fresh_seed=fresh))


# --- outputs of programs ------------------------------------------------------------------------


def content(*parts, nature="content", count=None, equal=()):
    listed = tuple(Part(where=where, claimed="1", found="2") for where in parts)
    count = len(parts) if count is None else count
    return Comparison(format="zip", equal=equal, parts=listed, count=count, nature=nature)


def output(path="model.zip", *, found_path=None, nature="content", **facts):
    return OutputDifference(
        path=path, found_path=found_path, claimed="aa", found="bb", nature=nature, **facts
    )


OUTPUTS = {
    "kind of file": (output(), ["output           model.zip: aa / bb"]),
    "parts": (
        output(content=content("a", "", "c", count=1200, equal=("x", "y"))),
        [
            "output           model.zip (zip): 1,200 parts differ; equal: x, y",
            "                 a (content): 1 / 2",
            "                 file (content): 1 / 2",
            "                 and 1,198 more parts",
        ],
    ),
    "dates": (
        output(nature="date", content=content("a", nature="date")),
        [
            "output           model.zip (zip): only dates differ",
            "                 a (content): 1 / 2",
        ],
    ),
    "packaging": (
        output(nature="packaging", content=content(nature="packaging")),
        ["output           model.zip (zip): only its packaging differs"],
    ),
    "another name": (
        output(found_path="best.zip", content=content()),
        ["output           model.zip / best.zip (zip): 0 parts differ"],
    ),
}


@pytest.mark.parametrize(("file", "expected"), OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_is_shown_with_the_parts_that_differ(file, expected):
    outputs = OutputComparison(count=1, nature=file.nature, files=(file,))
    assert shown(verified(outputs=outputs)).splitlines()[1:-2] == expected


def test_many_outputs_are_counted():
    files = tuple(output(f"f{number}") for number in range(5))
    outputs = OutputComparison(count=1005, nature="content", files=files)
    lines = shown(verified(outputs=outputs)).splitlines()
    assert lines[4] == "                 and 1,002 more outputs differ"


# --- places, and the analysis -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (TraceDifference(step=8, component="loss", claimed="1", found="2"), "step 8, loss"),
        (
            TraceDifference(step=8, component="parameters", name="w", claimed="1", found="2"),
            "step 8, parameters, w",
        ),
        (output(), "model.zip"),
        (output(content=content("member a", "b")), "model.zip, member a"),
        (output(content=content("")), "model.zip"),
    ],
)
def test_the_place_of_a_difference_is_as_exact_as_it_is_known(first, expected):
    assert place_of(first) == expected


def test_an_analysis_shows_the_first_difference_and_the_results_in_the_place_of_both():
    first = TraceDifference(step=8, component="loss", claimed="1", found="2")
    difference = ComponentDifference(component="trace.head", claimed="1", found="2")
    facts = {"first_difference": first, "differences": (difference,)}
    plain = shown(verified(**facts))
    assert "first difference step 8, loss\n                 claimed 1\n" in plain
    assert "differs          trace.head\n                 claimed 1\n" in plain
    analysis = Divergence(a="a", b="b", equal=False, first=first)
    analysed = shown(verified(**facts, divergence=analysis))
    assert analysed.count("first difference") == 1
    assert "first difference step 8, loss\n                 1 / 2\n" in analysed
    assert "trace.head" not in analysed


# --- machines -----------------------------------------------------------------------------------


def fact(name, effect):
    equal = effect == "none"
    return FactComparison(
        field=name, recorded="r", here="r" if equal else "h", effect=effect, reason=""
    )


def test_the_gravest_differences_of_the_machines_come_first_and_equal_facts_are_counted():
    effects = {
        "libc": "recorded-only",
        "os": "none",
        "id": "none",
        "cpu": "may differ",
        "gpu": "gate",
    }
    environment = tuple(fact(name, effect) for name, effect in effects.items())
    lines = shown(verified(environment=environment)).splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["machine", "recorded", "here", "effect"],
        ["gpu", "r", "h", "gate"],
        ["cpu", "r", "h", "may", "differ"],
        ["libc", "r", "h", "recorded-only"],
    ]
    assert lines[4:6] == ["2 facts of the machine are equal", ""]


def test_one_thing_is_written_in_the_singular():
    part = Part(where="x", nature="content", claimed="1", found="2")
    outputs = OutputComparison(
        nature="content",
        count=4,
        files=tuple(
            OutputDifference(
                path=f"f{n}",
                claimed="1",
                found="2",
                content=Comparison(format="json", nature="content", count=count, parts=(part,)),
            )
            for n, count in enumerate((1, 3, 3))
        ),
    )
    text = shown(verified(environment=(fact("os", "none"),), outputs=outputs, reexecuted_steps=1))
    assert text.startswith("1 fact of the machine is equal\n")
    assert "re-executed      1 step\n" in text
    assert "f0 (json): 1 part differs\n" in text
    assert "and 1 more part\n" in text
    assert "and 1 more output differs\n" in text
    differences = tuple(
        ComponentDifference(component=f"c{n}", claimed="a", found="b") for n in range(3)
    )
    assert "… and 1 more difference in the report" in shown(verified(differences=differences))


def test_equal_machines_have_no_table():
    lines = shown(verified(environment=(fact("os", "none"), fact("cpu", "none")))).splitlines()
    assert lines[:2] == ["2 facts of the machine are equal", ""]


@pytest.mark.parametrize(("analysed", "most"), [(False, 7), (True, 3)])
def test_an_analysis_leaves_less_room_for_the_machines(analysed, most):
    environment = tuple(fact(f"f{number}", "gate") for number in range(10))
    divergence = Divergence(a="a", b="b", equal=False) if analysed else None
    text = shown(verified(environment=environment, divergence=divergence))
    assert sum(line.rstrip().endswith("gate") for line in text.splitlines()) == most
    assert f"… and {10 - most} more differing facts in the report" in text


def test_the_verdict_is_one_line_however_narrow_the_terminal():
    error = {"code": "CAP-V009", "message": "m", "fix": "pass --engine process " * 5}
    report = verified().model_copy(update={"summary": "a long sentence " * 9, "error": error})
    *_, verdict, fix = printed(show_report, report, width=80).splitlines()
    assert verdict.startswith("reproduced-bitwise  CAP-V009: a long")
    assert fix.startswith("fix: pass")
