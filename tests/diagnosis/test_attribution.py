"""Findings from what the instruments of two runs saw: which line, and why."""

import pytest

from capsule.diagnosis.attribution import asked_findings, line_findings, operator_findings
from capsule.training.instruments.report import (
    InstrumentReport,
    Location,
    OperatorDifference,
    OperatorUse,
    SourceUse,
    TorchWarning,
    Variable,
)
from tests.diagnosis.conftest import PROGRAM, SYSTEM_CLOCK, parsed


def reported(run, **digests):
    """Return a report with the variable x of the first line of two modules of one name."""
    variables = []
    for module, digest in digests.items():
        where = Location(
            file=f"/runs/{run}/workspace/{module}/__init__.py", line=1, function="<module>"
        )
        facts = dict.fromkeys(("digest", "unordered", "elements"), digest)
        variables.append(
            Variable(where=where, name="x", values=1, kind="int", shown=(digest,), **facts)
        )
    return InstrumentReport.model_construct(
        variables=tuple(variables), sources=(), operators=(), text={}
    )


def test_variables_of_modules_of_one_name_are_told_apart():
    first, second = reported("run-1", a="1", b="2"), reported("run-2", a="3", b="2")
    (item,) = line_findings(first, second, parsed(PROGRAM))
    assert (item.code, item.where.file) == ("CAP-D109", "a/__init__.py")
    assert "(1 and 3)" in item.message


# --- reports that no instruments wrote ----------------------------------------------------------


def at(line, run="run-1"):
    return Location(file=f"/runs/{run}/workspace/train.py", line=line, function="<module>")


def variable(line, digest, *, name="x", values=1, kind="int", order="", shown=(), **digests):
    """Return a variable; values with an equal ``order`` are the same in another order."""
    return {
        "line": line,
        "name": name,
        "values": values,
        "kind": kind,
        "shown": shown,
        "digest": digest,
        "unordered": order or digest,
        "elements": digest,
        **digests,
    }


def asked(source, function, line=2):
    return SourceUse(source=source, function=function, calls=1, where=at(line))


def used(operator="aten::x", line=2, *, status="deterministic", **facts):
    usual = {"device": "cpu", "documented": "an entry", "calls": 5, "repeated": 5, "differing": 0}
    stack = (at(line),)
    return OperatorUse(
        **{**usual, "first_difference": None, **facts},
        operator=operator,
        status=status,
        stack=stack,
    )


def seen(*variables, run="run-1", text=None, algorithms="error", threads=4, **parts):
    """Return the report of a process of a run; ``text`` is that of its lines by their numbers."""
    found = [{**each, "where": at(each["line"], run)} for each in variables]
    for each in found:
        del each["line"]
    return InstrumentReport(
        algorithms=algorithms,
        threads=threads,
        operator_calls=0,
        operators=tuple(parts.get("operators", ())),
        warnings=parts.get("warnings", ()),
        sources=tuple(parts.get("sources", ())),
        variables=tuple(Variable(**each) for each in found),
        truncated=False,
        text={str(at(line, run)): words for line, words in (text or {}).items()},
    )


def explained(first, second=(), *, text=None, sources=(), operators=(), spec=None):
    """Explain two runs by the variables of both; what the first one asked explains it."""
    before = seen(*first, text=text, sources=sources, operators=operators)
    after = seen(*(second or first), run="run-2")
    return line_findings(before, after, spec or parsed(PROGRAM))


def places(findings):
    return [(item.code, item.where.line) for item in findings]


SYSTEM = {"entropy": {"mode": "system"}}
SALTED = {"determinism": {"hash_seed": None}}
UNSORTED = {"determinism": {"sorted_listings": False}}
MOVED = {"entropy": {"address_randomization": True}}

# --- lines whose values differ ------------------------------------------------------------------


def test_equal_values_need_no_explanation():
    assert explained([variable(2, "a"), variable(3, "b")]) == []


VALUES = {
    "hash": ("x = hash('a') % 7", (), SALTED, "CAP-D105"),
    "hash with a fixed seed": ("x = hash('a') % 7", (), {}, "CAP-D109"),
    "address": ("x = id(y) % 7", [asked("address", "id")], {}, "CAP-D104"),
    "process": ("x = os.getpid()", [asked("process", "os.getpid")], {}, "CAP-D107"),
    "folder": ("x = f(d)", [asked("directory", "os.listdir")], {}, "CAP-D106"),
    "entropy": ("x = os.urandom(8)", [asked("entropy", "os.urandom")], SYSTEM, "CAP-D103"),
    "derived entropy": ("x = os.urandom(8)", [asked("entropy", "os.urandom")], {}, "CAP-D111"),
    "clock": ("x = time.time()", [asked("clock", "time.time")], SYSTEM_CLOCK, "CAP-D108"),
    "virtual clock": ("x = time.time()", [asked("clock", "time.time")], {}, "CAP-D109"),
    "monotonic": ("x = time.monotonic()", [asked("clock", "time.monotonic")], {}, "CAP-D108"),
    "unknown": ("x = f()", (), {}, "CAP-D109"),
    "named as random": ("x = f.random()", (), SYSTEM, "CAP-D103"),
    "source of another line": ("x = y", [asked("process", "os.getpid", line=9)], {}, "CAP-D109"),
}


@pytest.mark.parametrize(("text", "sources", "sections", "code"), VALUES.values(), ids=VALUES)
def test_another_value_is_explained_by_what_its_line_asks(text, sources, sections, code):
    found = explained(
        [variable(2, "a")],
        [variable(2, "b")],
        text={2: text},
        sources=sources,
        spec=parsed(PROGRAM, **sections),
    )
    assert places(found) == [(code, 2)]
    assert found[0].text == text
    assert "variable 'x' differs" in found[0].message


ORDERS = {
    "race": ("x = list(y)", "list of int", {}, "CAP-D111"),
    "hash": ("x = list(y)", "list of str", SALTED, "CAP-D105"),
    "hash of bytes": ("x = list(y)", "bytes", SALTED, "CAP-D105"),
    "numbers are not salted": ("x = list(y)", "list of int", SALTED, "CAP-D111"),
    "moved addresses": ("x = list(y)", "list of Node", MOVED, "CAP-D104"),
    "addresses by name": ("x = sorted(y, key=id)", "list of Node", {}, "CAP-D104"),
    "folder": ("x = list(p.glob('*'))", "list of str", UNSORTED, "CAP-D106"),
    "sorted folder": ("x = list(p.glob('*'))", "list of str", {}, "CAP-D111"),
    "shuffle": ("random.shuffle(x)", "list of int", SYSTEM, "CAP-D103"),
}


@pytest.mark.parametrize(("text", "kind", "sections", "code"), ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("whole", [True, False], ids=["values", "elements"])
def test_another_order_is_explained_by_what_may_reorder(text, kind, sections, code, whole):
    same = {"values": 3, "order": "same"} if whole else {"elements": "same"}
    found = explained(
        *([variable(2, digest, kind=kind, **same)] for digest in "ab"),
        text={2: text},
        spec=parsed(PROGRAM, **sections),
    )
    assert places(found) == [(code, 2)]


def test_one_value_has_no_order():
    found = explained(
        *([variable(2, digest, order="same")] for digest in "ab"), text={2: "x = f()"}
    )
    assert places(found) == [("CAP-D109", 2)]


def test_the_first_values_that_differ_are_shown():
    left, right = (variable(2, d, shown=("0", shown)) for d, shown in (("a", "1"), ("b", "2")))
    assert "variable 'x' differs (1 and 2): " in explained([left], [right])[0].message
    (item,) = explained([left], [variable(7, "c")])
    assert "variable 'x' differs (the second run never sets it): " in item.message


def test_a_line_that_repeats_an_explained_difference_is_no_finding():
    first, second = ([variable(line, digest) for line in (2, 3)] for digest in "ab")
    texts = {2: "x = os.getpid()", 3: "y = x"}
    found = explained(first, second, text=texts, sources=[asked("process", "os.getpid")])
    assert places(found) == [("CAP-D107", 2)]
    assert places(explained(first, second, text=texts)) == [("CAP-D109", 2)]


def test_a_line_with_a_cause_of_its_own_is_a_finding_after_another():
    first, second = ([variable(line, digest) for line in (2, 3)] for digest in "ab")
    sources = [asked("process", "os.getpid"), asked("address", "id", line=3)]
    assert places(explained(first, second, sources=sources)) == [("CAP-D107", 2), ("CAP-D104", 3)]


def test_an_order_that_stays_as_it_is_is_no_race_of_its_own():
    first, second = (
        [variable(2, digest), variable(3, digest, values=3, order="same")] for digest in "ab"
    )
    found = explained(first, second, sources=[asked("process", "os.getpid")])
    assert places(found) == [("CAP-D107", 2)]


def test_a_value_that_follows_from_a_time_is_no_unknown_difference():
    first, second = (
        [variable(2, digest, name="now"), variable(3, digest, name="age")] for digest in "ab"
    )
    clock = [asked("clock", "time.monotonic")]
    texts = {2: "now = time.monotonic()", 3: "age = now - start"}
    assert places(explained(first, second, text=texts, sources=clock)) == [("CAP-D108", 2)]
    texts[3] = "age = f()"
    found = explained(first, second, text=texts, sources=clock)
    assert places(found) == [("CAP-D108", 2), ("CAP-D109", 3)]


def test_a_monotonic_time_has_no_setting_that_helps():
    monotonic, calendar = (
        explained(
            *([variable(2, digest)] for digest in "ab"),
            sources=[asked("clock", name)],
            spec=parsed(PROGRAM, **SYSTEM_CLOCK),
        )[0]
        for name in ("time.perf_counter_ns", "time.time_ns")
    )
    assert monotonic.patch == {}
    assert calendar.patch == {"entropy.clock": "virtual"}


# --- seeds --------------------------------------------------------------------------------------


def test_a_seed_that_comes_from_the_clock_names_the_line_that_uses_it():
    found = explained(
        *([variable(2, digest, name="start")] for digest in "ab"),
        text={2: "start = time.time_ns()", 8: "rng = default_rng(start)"},
        sources=[asked("clock", "time.time_ns")],
        spec=parsed(PROGRAM, **SYSTEM_CLOCK),
    )
    assert places(found) == [("CAP-D102", 2)]
    assert "a generator is seeded at train.py:8" in found[0].message


@pytest.mark.parametrize(
    ("source", "function", "sections", "code"),
    [
        ("clock", "time.time_ns", SYSTEM_CLOCK, "CAP-D102"),
        ("entropy", "os.urandom", SYSTEM, "CAP-D103"),
    ],
)
def test_a_generator_that_is_seeded_from_a_source_is_a_finding(source, function, sections, code):
    asks = {"text": {2: f"random.seed({function}(8))"}, "sources": [asked(source, function)]}
    (item,) = explained([], spec=parsed(PROGRAM, **sections), **asks)
    assert (item.code, item.where.line) == (code, 2)
    assert item.message == f"a generator is seeded from {function}"
    assert item.patch
    assert explained([], **asks) == []  # the answers are the same in every run


GLOBAL = {
    "unseeded": ("x = random.random()", "", SYSTEM, "CAP-D103"),
    "unseeded and derived": ("x = random.random()", "", {}, "CAP-D111"),
    "seeded": ("x = draw()", "random.seed(1)", {}, "CAP-D109"),
    "seeded with all": ("x = draw()", "seed_everything(1)", {}, "CAP-D109"),
}


@pytest.mark.parametrize(("text", "seeding", "sections", "code"), GLOBAL.values(), ids=GLOBAL)
def test_a_draw_from_the_global_generator_is_judged_by_whether_it_was_seeded(
    text, seeding, sections, code
):
    found = explained(
        *([variable(2, digest)] for digest in "ab"),
        text={1: seeding, 2: text},
        sources=[asked("entropy", "random.random")],
        spec=parsed(PROGRAM, **sections),
    )
    assert places(found) == [(code, 2)]


@pytest.mark.parametrize(
    ("seeding", "code"), [("", "CAP-D103"), ("torch.manual_seed(1)", "CAP-D109")]
)
def test_an_operator_that_draws_is_judged_by_whether_torch_was_seeded(seeding, code):
    found = explained(
        *([variable(2, digest)] for digest in "ab"),
        text={1: seeding, 2: "x = torch.randn(2)"},
        operators=[used("aten::randn", status="seeded")],
        spec=parsed(PROGRAM, **SYSTEM),
    )
    assert places(found) == [(code, 2)]


# --- sources without a difference ---------------------------------------------------------------

OPEN = {
    "clock": ("clock", "time.time", SYSTEM_CLOCK, "CAP-D108"),
    "monotonic": ("clock", "time.monotonic_ns", {}, "CAP-D108"),
    "entropy": ("entropy", "os.urandom", SYSTEM, "CAP-D103"),
    "folder": ("directory", "os.listdir", UNSORTED, "CAP-D106"),
    "address": ("address", "id", {}, "CAP-D104"),
    "process": ("process", "os.getpid", {}, "CAP-D107"),
}


def candidates(source, function, sections, *, times=1, numbers_pinned=False):
    report = seen(text={2: "a line"}, sources=[asked(source, function)] * times)
    return asked_findings(
        [report] * times, parsed(PROGRAM, **sections), numbers_pinned=numbers_pinned
    )


@pytest.mark.parametrize(("source", "function", "sections", "code"), OPEN.values(), ids=OPEN)
def test_a_source_that_nothing_controls_is_a_candidate_once(source, function, sections, code):
    (item,) = candidates(source, function, sections, times=2)
    assert (item.code, item.level, item.where.line) == (code, "warning", 2)
    assert item.message.startswith(f"{function} is called here")
    assert item.text == "a line"


@pytest.mark.parametrize(
    ("source", "function"),
    [("clock", "time.time"), ("entropy", "os.urandom"), ("directory", "os.listdir")],
)
def test_a_source_that_the_spec_controls_is_no_candidate(source, function):
    assert candidates(source, function, {}) == []


def test_process_numbers_are_no_candidate_where_they_are_pinned():
    assert candidates("process", "os.getpid", {}, numbers_pinned=True) == []
    assert len(candidates("address", "id", {}, numbers_pinned=True)) == 1


# --- operators ----------------------------------------------------------------------------------


def judged(use, *, failed=False, **report):
    found = operator_findings([seen(operators=(use,), **report)], failed=failed)
    return [(item.code, item.level) for item in found]


def test_an_operator_that_gave_other_bits_is_described_by_what_was_seen():
    first = OperatorDifference(index=1234, elements=10, differing=3)
    use = used("aten::mm", status="with-flag", repeated=5, differing=2, first_difference=first)
    report = seen(operators=(use,), algorithms="off", text={2: "y = a @ b"})
    (item,) = operator_findings([report])
    assert (item.code, item.level) == ("CAP-D201", "error")
    assert (item.operator, item.text, item.where.line) == ("aten::mm", "y = a @ b", 2)
    assert item.message == (
        "aten::mm on cpu gave other bits in 2 of 5 repetitions, first at operator call 1,234 in "
        "3 of 10 elements, with 4 threads"
    )


@pytest.mark.parametrize(("threads", "said"), [(1, ", with 1 thread"), (None, "")])
def test_one_element_of_one_repetition_is_written_in_the_singular(threads, said):
    first = OperatorDifference(index=1, elements=1, differing=1)
    use = used("aten::mm", repeated=1, differing=1, first_difference=first)
    (item,) = operator_findings([seen(operators=(use,), threads=threads)])
    assert item.message == (
        "aten::mm on cpu gave other bits in 1 of 1 repetition, first at operator call 1 in 1 of 1 "
        f"element{said}"
    )


def test_an_operator_that_was_called_once_is_described():
    report = seen(operators=(used(status="unknown", calls=1),))
    (item,) = operator_findings([report])
    assert item.message == "aten::x on cpu was called 1 time and gave the same bits"


@pytest.mark.parametrize(
    ("status", "algorithms", "failed", "expected"),
    [
        ("deterministic", "off", False, []),
        ("seeded", "off", False, []),
        ("with-flag", "off", False, [("CAP-D202", "warning")]),
        ("with-flag", "warn", False, []),
        ("with-flag", "error", False, []),
        ("raises", "off", False, [("CAP-D203", "warning")]),
        ("raises", "warn", False, [("CAP-D203", "warning")]),
        ("raises", "error", False, []),
        ("raises", "error", True, [("CAP-D203", "warning")]),
        ("unknown", "error", False, [("CAP-D204", "note")]),
    ],
)
def test_an_operator_is_judged_by_its_status_and_the_flag(status, algorithms, failed, expected):
    assert judged(used(status=status), algorithms=algorithms, failed=failed) == expected


def test_a_warning_of_torch_is_a_finding_unless_the_census_names_its_line():
    warning = TorchWarning(message="no implementation of x", stack=(at(2),))
    (item,) = operator_findings([seen(warnings=(warning,), text={2: "x = f(y)"})])
    assert (item.code, item.message, item.text) == ("CAP-D203", warning.message, "x = f(y)")
    raising = used("aten::put_", status="raises", line=2)
    both = seen(operators=(raising,), warnings=(warning,), algorithms="warn")
    assert [item.operator for item in operator_findings([both])] == ["aten::put_"]


def test_what_several_processes_saw_on_one_line_is_one_finding():
    report = seen(operators=(used("a::x", status="unknown"), used("a::y", status="unknown")))
    assert [item.operator for item in operator_findings([report, report])] == ["a::x", "a::y"]
