"""The verdict on a re-execution follows from bits, content, returns and what the machines allow."""

from types import SimpleNamespace

import pytest

from capsule.bundle.claims import NO_NAMESPACES, ImageClaim
from capsule.experiment import contract
from capsule.experiment.contract import StreamProfile
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.evaluation import ToleranceSpec
from capsule.experiment.spec import CpuAccelerator
from capsule.verification.analysis.comparison import PROCESSOR_FLAGS, compare_claims
from capsule.verification.content.parts import Comparison, Part
from capsule.verification.execution.grading import (
    beyond_arithmetic,
    bitwise,
    grade_replica,
    inconsistent,
    judge,
    judge_program,
    judge_training,
)
from capsule.verification.findings import AnalysisFinding, ComparisonFinding
from capsule.verification.request import Mode
from capsule.verification.verdict import (
    ComponentDifference,
    OutputComparison,
    OutputDifference,
    TraceDifference,
)
from tests.machine.test_compare import ZEN5, machine, spec
from tests.verification.analysis.test_comparison import ONE, ZERO, make_claims
from tests.verification.analysis.test_outputs import make_claims as make_program_claims
from tests.verification.analysis.test_outputs import make_output
from tests.verification.equivalence.test_returns import statistics_of
from tests.verification.runs import Machine

BITWISE = ("reproduced-bitwise", "the re-execution reproduced every claim, bit for bit")


def differs(component="parameters"):
    return ComponentDifference(component=component, claimed="1", found="2")


# --- programs -------------------------------------------------------------------------------------


def judged(claimed, found, outputs):
    return judge_program(claimed, ComparisonFinding(compare_claims(claimed, found), outputs))


def test_a_difference_that_no_comparison_accounts_for_is_a_difference(tmp_path):
    """Claims of what neither run left, as if the comparison of the files had overlooked them."""
    file = make_output(tmp_path, "a", b"1")
    honest = make_program_claims({"a": file})
    assert judged(honest, honest, None).verdict == "reproduced-bitwise"
    for others in ({"deleted": ("b",)}, {"empty_folders": ("b",)}):
        assert (
            judged(make_program_claims({"a": file}, **others), honest, None).verdict
            == "not-reproduced"
        )
    other = make_program_claims({"a": make_output(tmp_path, "a", b"2")})
    assert judged(other, honest, None).verdict == "not-reproduced"


def output(path="a", nature="content", where="line 2"):
    part = Part(where=where, claimed="1", found="2", nature=nature)
    content = Comparison(format="text", parts=(part,), count=1, nature=nature)
    return OutputDifference(path=path, claimed="1", found="2", nature=nature, content=content)


def outputs(*files, nature="content", count=None):
    return OutputComparison(count=count or len(files), nature=nature, files=files)


SOMETHING = make_program_claims({"a": contract.Output(size=1, sha256=ZERO)})
NOTHING = make_program_claims({})


def program(claims=SOMETHING, differences=(), compared=None):
    return judge_program(claims, ComparisonFinding(differences, compared))


@pytest.mark.parametrize(
    ("file", "summary"),
    [
        (output(), "the outputs first differ in a, at line 2"),
        (output(where=""), "the outputs first differ in a"),
        (output("b", "order"), "the outputs first differ in b, at line 2"),
        (OutputDifference(path="c", claimed="a file", found="no output"),
         "the outputs first differ in c"),
    ],
)  # fmt: skip
def test_outputs_of_other_content_are_not_reproduced(file, summary):
    found = program(differences=(differs("outputs.a"),), compared=outputs(file, nature=file.nature))
    assert found == ("not-reproduced", summary)


@pytest.mark.parametrize(
    ("nature", "count", "reason"),
    [
        ("date", 1, "1 output differs only in dates"),
        ("date", 1_234, "1,234 outputs differ only in dates"),
        ("packaging", 2, "2 outputs differ only in how the same content is stored"),
    ],
)
def test_outputs_of_the_same_content_are_reproduced_by_content(nature, count, reason):
    compared = outputs(output(nature=nature), nature=nature, count=count)
    verdict, summary = program(differences=(differs("outputs.a"),), compared=compared)
    assert verdict == "reproduced-content"
    assert summary.endswith(reason)


def test_a_difference_beside_the_outputs_is_never_harmless():
    dated = outputs(output(nature="date"), nature="date")
    beside = differs("outputs.a"), differs("libraries.numpy")
    assert program(differences=beside, compared=dated).verdict == "not-reproduced"
    assert program(differences=beside[1:]) == (
        "not-reproduced",
        "the outputs are equal, but the versions of the libraries differ (libraries.numpy)",
    )


def test_equal_outputs_are_reproduced_bit_for_bit():
    assert program() == BITWISE


def test_attempts_that_were_not_made_again_are_not_said_to_be_reproduced():
    """The signer may have invented them."""
    verdict, summary = judge_program(SOMETHING, ComparisonFinding((), fewer_attempts=True))
    assert verdict == "reproduced-bitwise"
    assert "except that the program made fewer attempts" in summary


def test_nothing_claimed_and_nothing_left_decides_nothing():
    with pytest.raises(CapsuleError, match="NOTHING IS CLAIMED") as caught:
        program(NOTHING)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V048", ExitCode.INCONCLUSIVE)
    assert "working folder" in caught.value.fix
    # What the re-execution left, or a difference beside it, is a difference nevertheless.
    assert program(NOTHING, compared=outputs(output())).verdict == "not-reproduced"
    assert program(NOTHING, (differs("flags.threads"),)).verdict == "not-reproduced"


# --- trainers, bit for bit ------------------------------------------------------------------------

RECORD = TraceDifference(step=8, component="loss", claimed="1", found="2")


def trained(mode="full", differences=(), first=None, executed=None, compared=None):
    return judge_training(
        Mode.parse(mode),
        SimpleNamespace(reexecuted_steps=executed),
        ComparisonFinding(differences),
        AnalysisFinding(first, None, None, compared, None),
    )


def test_a_whole_run_without_a_difference_is_reproduced_bit_for_bit():
    assert trained(executed=400, compared=400) == BITWISE


def test_a_prefix_is_reproduced_if_it_was_executed_and_compared_to_its_end():
    verdict, summary = trained("prefix:1200", executed=1200, compared=1200)
    assert verdict == "reproduced-prefix"
    assert summary.startswith("the first 1,200 steps are the same")
    assert summary.endswith("the rest was not re-executed")


def test_a_prefix_of_one_step_is_written_in_the_singular():
    _, summary = trained("prefix:1", executed=1, compared=1)
    assert summary.startswith("the first step is the same, bit for bit")


@pytest.mark.parametrize(("executed", "compared"), [(80, 120), (120, 80), (80, 80), (None, None)])
def test_a_prefix_that_was_not_executed_or_compared_to_its_end_is_not_reproduced(
    executed, compared
):
    verdict, summary = trained("prefix:120", executed=executed, compared=compared)
    assert verdict == "not-reproduced"
    assert "before step 120" in summary


@pytest.mark.parametrize("mode", ["full", "prefix:120"])
def test_the_first_record_that_differs_decides_before_the_claims_do(mode):
    steps = {"executed": 120, "compared": 120}
    found = trained(mode, (differs(),), RECORD, **steps)
    assert found == ("not-reproduced", "the runs first differ at step 8, in the loss")
    named = RECORD.model_copy(update={"name": "w"})
    assert trained(mode, first=named, **steps).summary.endswith("in the loss (w)")
    found = trained(mode, (differs(), differs("steps")), **steps)
    assert found == ("not-reproduced", "the traces are equal, but the parameters differ")


class Hasty(Machine):
    """Ends a prefix before the step that it is to reach."""

    def run(self, task, **options):
        job = task.run_directory / contract.JOB
        text = job.read_text()
        assert '"stop_after":120' in text
        job.write_text(text.replace('"stop_after":120', '"stop_after":80'))
        return super().run(task, **options)


@pytest.mark.xdist_group("verification")  # they share runs
@pytest.mark.slow
def test_a_prefix_that_ends_early_is_not_reproduced(verified, honest_bundle):
    report = verified(honest_bundle, "prefix:120", Hasty())
    assert report.verdict == "not-reproduced"
    assert report.summary.startswith("the re-execution ended before step 120")


# --- trainers, by their returns -------------------------------------------------------------------


def graded(by, expected="statistical", unexplained=None, **tolerance):
    found = statistics_of(by, **tolerance)
    declared = ToleranceSpec(**tolerance) if tolerance else None
    return grade_replica("they differ", expected, declared, unexplained, found)


def test_equivalent_returns_reproduce_where_bits_are_not_expected():
    verdict, summary = graded(0, relative=0.1)
    assert verdict == "reproduced-statistical"
    assert "lies within the declared" in summary
    assert "50 starts of CartPole-v1, the same in both runs" in summary


def test_a_worse_network_is_not_reproduced():
    assert graded(-60, relative=0.1)[0] == "not-reproduced"


def test_nothing_makes_up_for_bits_that_were_expected():
    assert graded(0, "bitwise", relative=0.1) == ("not-reproduced", "they differ")


def test_a_tolerance_must_have_been_declared():
    verdict, summary = graded(0)
    assert verdict == "not-reproduced"
    assert "evaluation.tolerance" in summary


def test_what_arithmetic_cannot_explain_is_not_excused():
    verdict, summary = graded(0, unexplained="streams differ", relative=0.1)
    assert (verdict, summary) == ("not-reproduced", "they differ; streams differ")


def test_a_tolerance_applies_only_where_traces_differ_for_good():
    assert inconsistent(None, None) == "a tolerance applies only where the traces differ"
    assert "after step 8 are equal again" in inconsistent(RECORD, 8)
    assert inconsistent(RECORD, None) is None


def test_returns_that_cannot_be_compared_decide_nothing():
    found = grade_replica("they differ", "statistical", ToleranceSpec(relative=0.1), None, None)
    assert found[0] == "inconclusive"


def stream(**changes):
    facts = {"name": "exploration", "seed": 1, "key": "0" * 32, "draws": 8, "digest": ZERO}
    return StreamProfile(**facts | changes)


@pytest.mark.parametrize(
    ("changes", "suspect"),
    [
        ({"parameters": ONE, "steps": 9, "episodes": 7}, ""),
        ({"flags": {"threads": "1", "onednn.isa": "Intel AVX2"}}, ""),
        ({"streams": (stream(draws=9, digest=ONE),)}, ""),
        ({"streams": (stream(seed=2),)}, "the random streams differ"),
        ({"streams": (stream(key="1" * 32),)}, "the random streams differ"),
        ({"streams": ()}, "the random streams differ"),
        ({"flags": {"threads": "2"}}, "the flags differ"),
        ({"libraries": {"torch": "2.12.0"}}, "the versions of the libraries differ"),
        ({"schedule": ONE}, "the schedule differs"),
        ({"streams": (stream(name="minibatch"),)}, "the random streams differ"),
        ({"lock": ONE}, "the lock differs"),
        ({"image": ImageClaim(config=f"sha256:{ONE}", layers=())}, "the image differs"),
        ({"entropy_profile": ONE}, "the recorded randomness differs"),
        ({"data": {"digits": ONE}}, "the data sets differ"),
        ({"relaxations": ("engine=process",)}, "the relaxations differ"),
    ],
)
def test_what_another_processor_may_change(changes, suspect):
    claimed = make_claims(streams=(stream(),))
    said = beyond_arithmetic(claimed, make_claims(**{"streams": (stream(),)} | changes))
    assert (said or "").partition(", which other arithmetic")[0] == suspect


def test_returns_that_decide_nothing_make_the_verdict_inconclusive():
    # Without a bound among the statistics there is nothing that returns could be within.
    declared = ToleranceSpec(relative=0.1)
    verdict, summary = grade_replica("they differ", "statistical", declared, None, statistics_of(0))
    assert verdict == "inconclusive"
    assert summary.startswith("they differ: ")


@pytest.mark.parametrize("expected", ["bitwise", "inconclusive"])
def test_only_where_other_bits_are_expected_do_returns_count(expected):
    assert graded(0, expected, relative=0.1).verdict == "not-reproduced"


@pytest.mark.parametrize("flag", sorted(PROCESSOR_FLAGS))
def test_a_flag_by_which_a_library_names_the_processor_may_differ(flag):
    left, right = (make_claims(flags={"threads": "1", flag: value}) for value in ("a", "b"))
    assert beyond_arithmetic(left, right) is None
    assert beyond_arithmetic(left, make_claims()) is None


def test_equal_results_of_other_code_are_reproduced_bit_for_bit():
    """Under ``native``, the flags in which a library names its code are no results."""
    claimed = make_claims(flags={"threads": "1", "onednn.isa": "a", "mkl.branch": "b"})
    other = make_claims(flags={"threads": "1", "onednn.isa": "c"})
    native, portable = (SimpleNamespace(cpu_numerics=each) for each in ("native", "portable-v3"))
    assert bitwise(claimed, claimed, portable) == BITWISE
    verdict, summary = bitwise(claimed, other, native)
    assert verdict == "reproduced-bitwise"
    assert "although the libraries chose other code" in summary
    assert bitwise(claimed, other, portable) is None
    results = {"parameters": ONE}, {"libraries": {"torch": "2.12.0"}}, {"flags": {"threads": "2"}}
    for changes in results:
        assert bitwise(claimed, other.model_copy(update=changes), native) is None


def test_whether_there_were_namespaces_is_a_fact_of_the_machine():
    with_them, without = make_claims(), make_claims(relaxations=(NO_NAMESPACES,))
    assert beyond_arithmetic(with_them, without) is None


# --- the whole ------------------------------------------------------------------------------------


def judged_as(claims, found, differences, *, mode="full", first=RECORD, statistics=None, **spec):
    tolerance = ToleranceSpec(**spec) if spec else None
    evaluation = SimpleNamespace(tolerance=tolerance)
    native = SimpleNamespace(evaluation=evaluation, cpu_numerics="native")
    lock = SimpleNamespace(spec=native)
    run = SimpleNamespace(claims=claims, lock=lock, compilers=lambda: None)
    return judge(
        run,
        Mode.parse(mode),
        SimpleNamespace(expected_grade="statistical", here=None),
        SimpleNamespace(reexecuted_steps=120, compilers=None),
        ComparisonFinding(differences, None, found),
        AnalysisFinding(first, None, None, 120, statistics),
    )


def test_a_program_is_judged_by_its_outputs():
    assert judged_as(SOMETHING, SOMETHING, (), first=None) == BITWISE


def test_equal_bits_of_a_trainer_need_no_returns():
    claims = make_claims()
    assert judged_as(claims, claims, (), first=None) == BITWISE


def test_a_whole_run_of_other_code_is_judged_by_its_results():
    claims, found = make_claims(flags={"onednn.isa": "a"}), make_claims(flags={"onednn.isa": "b"})
    judgement = judged_as(claims, found, (differs("flags.onednn.isa"),), first=None)
    assert judgement == bitwise(claims, found, SimpleNamespace(cpu_numerics="native"))


def test_other_bits_of_a_whole_run_may_be_accepted_by_their_returns():
    claims, found = make_claims(), make_claims(parameters=ONE)
    facts = {"statistics": statistics_of(0, relative=0.1), "relative": 0.1}
    assert judged_as(claims, found, (differs(),), **facts).verdict == "reproduced-statistical"
    # Claims that differ although the traces are equal are no matter of arithmetic, and neither is
    # another experiment.
    for other, first in ((found, None), (make_claims(lock=ONE), RECORD)):
        judgement = judged_as(claims, other, (differs(),), first=first, **facts)
        assert judgement.verdict == "not-reproduced"


def test_other_bits_of_a_prefix_are_never_accepted():
    claims = make_claims()
    judgement = judged_as(
        claims, None, (differs("checkpoints.8"),), mode="prefix:120", relative=0.1
    )
    assert judgement == ("not-reproduced", "the runs first differ at step 8, in the loss")


@pytest.mark.parametrize(
    ("numerics", "named", "imported", "verdict"),
    [
        ("portable-v3", "numba", None, "not-reproduced"),
        ("portable-v3", "numba", "numba", "reproduced-statistical"),
        ("native", "numba", None, "reproduced-statistical"),
        ("native", None, None, "reproduced-statistical"),
    ],
)
def test_a_package_that_only_the_bundle_names_excuses_no_other_bits(
    numerics, named, imported, verdict
):
    tolerance = ToleranceSpec(relative=0.1)
    experiment = spec(CpuAccelerator(numerics=numerics), evaluation={"tolerance": tolerance})
    claims, here = make_claims(), machine(ZEN5)
    run = SimpleNamespace(
        claims=claims,
        lock=SimpleNamespace(spec=experiment),
        compilers=lambda: named,
        observations=lambda: SimpleNamespace(fingerprint=machine()),
    )
    judgement = judge(
        run,
        Mode.parse("full"),
        SimpleNamespace(expected_grade="statistical", here=here),
        SimpleNamespace(reexecuted_steps=120, compilers=imported),
        ComparisonFinding((differs(),), None, make_claims(parameters=ONE)),
        AnalysisFinding(RECORD, None, None, 120, statistics_of(0, relative=0.1)),
    )
    assert judgement.verdict == verdict
    assert ("the bundle names numba as imported" in judgement.summary) == (
        verdict == "not-reproduced"
    )
