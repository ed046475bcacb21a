"""Differences of pins and machines are listed with what they can do, the likeliest cause first."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.contract import Runtime, StreamProfile, StreamProfiles
from capsule.experiment.lock import LockedData, LockedProject
from capsule.experiment.spec import Spec
from capsule.machine.fingerprint import Cpu, Fingerprint, OperatingSystem
from capsule.machine.gpu import Driver
from capsule.verification.analysis.pin_differences import (
    Change,
    changes,
    circumstances,
    ranked,
)
from capsule.verification.analysis.runs import ComparedRun, Training
from tests.bundle.locks import debian, make_lock, wheel

MACHINE = Fingerprint(
    cpu=Cpu(vendor="GenuineIntel", family=6, model=85, flags=("avx2", "fma")),
    memory_bytes=1 << 34,
    kernel="6.1",
    os=OperatingSystem(id="debian", version_id="12"),
    driver=Driver(nvml="not found"),
)
IMPALA = {"algorithm": "impala", "network": "mlp"}
EVERY_UPDATE = {"trace_interval": 640, "tensor_interval": 640, "checkpoint_interval": 6400}


def side(lock=None, *, spec=None, flags=None, libraries=None, **facts):
    lock = lock or make_lock()
    runtime = Runtime(flags=flags or {}, libraries=libraries or {}, device={})
    return ComparedRun("run", lock.spec if spec is None else spec, runtime, lock=lock, **facts)


def found(a, b):
    return [(each.kind, each.what, each.a, each.b) for each in changes(a, b)]


def kinds(a, b):
    return {each.what: each.kind for each in changes(a, b)}


def test_equal_sides_have_no_changes():
    one = side(make_lock(wheels=(wheel("torch"),)), fingerprint=MACHINE, flags={"threads": "1"})
    assert changes(one, one) == ()


# --- specs ----------------------------------------------------------------------------------------


def spec_of(**sections):
    document = {
        "name": "test",
        "environment": {"suite": "gymnasium", "id": "CartPole-v1"},
        "trainer": {"algorithm": "dqn", "network": "mlp"},
        **sections,
    }
    return Spec.model_validate_json(json.dumps(document))


@pytest.mark.parametrize(
    ("sections", "what", "kind"),
    [
        ({"name": "other"}, "name", "recording"),
        ({"seeds": {"root": 5}}, "seeds.root", "seed"),
        ({"environment": {"suite": "gymnasium", "id": "Acrobot-v1"}}, "environment.id",
         "environment"),
        ({"trainer": {"algorithm": "dqn", "network": "mlp", "learning_rate": 0.5}},
         "trainer.learning_rate", "settings"),
        ({"accelerator": {"kind": "cpu", "numerics": "native"}}, "accelerator.numerics",
         "numerics"),
        ({"evaluation": {"starts": 3}}, "evaluation.starts", "evaluation"),
        ({"recording": {"trace_interval": 8}}, "recording.trace_interval", "recording"),
        ({"limits": {"minutes": 9}}, "limits.minutes", "recording"),
        ({"image": {"packages": ["attrs"]}}, "image.packages", "system"),
        ({"entropy": {"mode": "recorded"}}, "entropy.mode", "system"),
    ],
)  # fmt: skip
def test_a_setting_is_of_the_kind_of_its_section(sections, what, kind):
    lock = make_lock()
    a, b = (side(lock, spec=spec) for spec in (spec_of(), spec_of(**sections)))
    assert kinds(a, b) == {what: kind}


def test_a_schedule_is_not_a_setting_like_others():
    lock = make_lock()
    schedules = {"mode": "lockstep"}, {"mode": "recorded", "policy_lag": 3}
    a, b = (
        side(
            lock,
            spec=spec_of(
                trainer={**IMPALA, "schedule": each},
                recording=EVERY_UPDATE,
                evaluation={"interval": 6400},
            ),
        )
        for each in schedules
    )
    assert {each.kind for each in changes(a, b)} == {"schedule"}
    assert "trainer.schedule.mode" in kinds(a, b)


# --- locks ----------------------------------------------------------------------------------------


def test_a_wheel_of_another_version_is_named_with_both():
    a = side(make_lock(wheels=(wheel("attrs", "1.0"), wheel("torch", "2.0"))))
    b = side(make_lock(wheels=(wheel("attrs", "1.0"), wheel("torch", "2.1"))))
    (change,) = changes(a, b)
    assert (change.kind, change.what) == ("library", "wheel torch")
    assert change.a.startswith("2.0 (a dependency; ")
    assert change.b.startswith("2.1 (a dependency; ")


def test_a_package_that_one_lock_lacks_is_absent_there():
    packages = (debian("hello", "2.10"),)
    a, b = side(make_lock()), side(make_lock(wheels=(wheel("attrs"),), packages=packages))
    assert [each[:3] for each in found(a, b)] == [
        ("library", "wheel attrs", "absent"),
        ("system", "debian package hello", "absent"),
    ]


@pytest.mark.parametrize("name", ["gymnasium", "ale-py", "minatar"])
def test_the_packages_of_environments_are_environments(name):
    a, b = (
        side(make_lock(wheels=(wheel(name, version),)), libraries={name.replace("-", "_"): "1"})
        for version in ("1", "2")
    )
    assert kinds(a, b)[f"wheel {name}"] == "environment"


NOT_RECORDED = "it matters if the runs imported it, which their bundles do not record"


def test_wheels_that_were_loaded_come_before_those_of_which_that_is_not_known():
    names = ("ale-py", "sympy", "torch")
    a, b = (
        side(
            make_lock(wheels=tuple(wheel(name, version) for name in names)),
            libraries={"torch": "2.0"},
        )
        for version in ("1", "2")
    )
    assert [(each.kind, each.what, each.why) for each in changes(a, b)] == [
        ("library", "wheel torch", None),
        ("library", "wheel ale-py", NOT_RECORDED),
        ("library", "wheel sympy", NOT_RECORDED),
    ]


def test_of_a_program_it_is_not_known_what_it_imported():
    program = {"name": "test", "trainer": {"command": ["python", "x.py"]}, "code": {"path": "."}}
    a, b = (
        side(
            make_lock(wheels=(wheel("torch", version),)),
            spec=Spec.model_validate_json(json.dumps(program)),
            libraries={"torch": "2.0"},
        )
        for version in ("1", "2")
    )
    assert [each.why for each in changes(a, b)] == [NOT_RECORDED]


def test_a_plain_process_does_not_use_the_system_of_the_image():
    locks = (
        make_lock(packages=(debian("hello", version),), wheels=(wheel("torch", version),))
        for version in ("1", "2")
    )
    confined, plain = (Mock(claims=Mock(image=image)) for image in (ANY, None))
    a, b = map(side, locks)
    for runs, kind in ((confined, plain), "system"), ((plain, plain), "recording"):
        sides = (replace(each, recorded=run) for each, run in zip((a, b), runs, strict=True))
        found = changes(*sides)
        assert {each.what: each.kind for each in found} == {
            "wheel torch": "library",
            "debian package hello": kind,
        }
        (hello,) = ranked(found[1:], "results")
        assert hello.matters == (kind == "system")
    assert hello.why == "both runs were plain processes, which do not use it"


def test_the_request_for_a_wheel_is_shown_where_only_it_differs():
    plain = wheel("attrs")
    asked = plain.model_copy(update={"requested": "attrs>=1"})
    a, b = (side(make_lock(wheels=(each,))) for each in (plain, asked))
    (change,) = changes(a, b)
    assert "requested as 'attrs>=1'" in change.b


def with_image(**changes_of_image):
    lock = make_lock()
    return lock.model_copy(update={"image": lock.image.model_copy(update=changes_of_image)})


@pytest.mark.parametrize(
    ("lock", "what", "kind"),
    [
        (with_image(code=make_lock().image.code.model_copy(update={"sha256": "1" * 64})),
         "training code", "code"),
        (with_image(recipe_sha256="1" * 64), "image recipe", "system"),
        (with_image(assembler=2), "assembler", "system"),
    ],
)  # fmt: skip
def test_a_pin_of_the_image_is_of_its_kind(lock, what, kind):
    ((found_kind, found_what, _, b),) = found(side(), side(lock))
    assert (found_kind, found_what) == (kind, what)
    assert b == ("2" if what == "assembler" else "1" * 12 + "…")


def with_tree(digest, **files):
    tree = LockedProject(sha256=digest * 64, size=1, files=files, git=None)
    return side(make_lock().model_copy(update={"project": tree}))


def test_the_files_of_a_source_tree_are_named():
    a, b = (
        with_tree("1", **{"a.py": "1", "b.py": "1"}),
        with_tree("2", **{"a.py": "1", "b.py": "2"}),
    )
    assert [each[:2] for each in found(a, b)] == [
        ("code", "source tree"),
        ("code", "source file b.py"),
    ]
    assert kinds(side(), a) == {"source tree": "code"}


def test_the_digests_of_data_sets_are_compared_by_name():
    def reading(**digests):
        sets = {name: LockedData(sha256=digit * 64, files=1, size=1)
                for name, digit in digests.items()}  # fmt: skip
        return side(make_lock().model_copy(update={"data": sets}))

    (change,) = changes(reading(a="1", b="1"), reading(a="1", b="2", c="3"))
    assert (change.kind, change.what, change.why) == (
        "settings",
        "data set b",
        "the runs read other data",
    )


def test_without_both_locks_no_pin_is_compared():
    a, b = side(make_lock(wheels=(wheel("torch"),))), side()
    assert changes(a, replace(b, lock=None)) == changes(replace(a, lock=None), b) == ()


# --- what ran -------------------------------------------------------------------------------------


def test_flags_are_named_where_the_settings_that_govern_them_are_equal():
    a, b = side(flags={"threads": "1", "x": "1"}), side(flags={"threads": "2", "x": "1"})
    assert found(a, b) == [("numerics", "flags.threads", "1", "2")]
    native = make_lock(accelerator={"kind": "cpu", "numerics": "native"})
    assert kinds(a, replace(b, spec=native.spec)) == {"accelerator.numerics": "numerics"}


def test_libraries_are_compared_as_they_were_loaded():
    a = side(libraries={"torch": "2.0", "ale_py": "0.11", "numpy": "2"})
    b = side(libraries={"torch": "2.1", "ale_py": "0.12", "numpy": "2", "extra": "1"})
    assert found(a, b) == [
        ("environment", "library ale_py, as read back", "0.11", "0.12"),
        ("library", "library extra, as read back", "absent", "1"),
        ("library", "library torch, as read back", "2.0", "2.1"),
    ]


def test_a_processor_counts_where_bits_may_depend_on_it():
    native = make_lock(accelerator={"kind": "cpu", "numerics": "native"})
    other = MACHINE.model_copy(
        update={
            "cpu": MACHINE.cpu.model_copy(update={"flags": ("avx2", "fma", "sse4_2")}),
            "kernel": "6.12",
        }
    )
    for lock, kind in ((native, "machine"), (make_lock(), "recording")):
        a, b = side(lock, fingerprint=MACHINE), side(lock, fingerprint=other)
        assert kinds(a, b)["cpu.flags"] == kind
        assert kinds(a, b)["kernel"] == "recording"
        assert changes(a, replace(b, fingerprint=None)) == ()
        for compiled in ((replace(a, compilers="numba"), b), (a, replace(b, compilers="numba"))):
            assert kinds(*compiled)["cpu.flags"] == "machine"


# --- streams --------------------------------------------------------------------------------------


def training(**seeds):
    streams = tuple(
        StreamProfile(name=name, seed=seed, key=f"{seed:032x}", draws=0, digest="0" * 64)
        for name, seed in seeds.items()
    )
    return Training(Path("trace"), StreamProfiles(streams=streams), (), {}, None, None, "")


def test_streams_that_begin_with_another_key_are_named_with_their_seeds():
    a = side(training=training(minibatch=1, noise=2, gone=3))
    b = side(training=training(noise=2, minibatch=5, new=6))
    assert found(a, b) == [("seed", "stream minibatch", "seed 1", "seed 5")]
    assert found(a, side()) == []


# --- circumstances --------------------------------------------------------------------------------


def test_a_relaxation_or_an_unnamed_gpu_matters_although_both_sides_have_it():
    a = side(spec=spec_of(determinism={"algorithms": "warn"}), fingerprint=MACHINE)
    assert found(a, a) == [("machine", "determinism.algorithms", "warn", "warn")]


def test_a_machine_that_is_not_known_may_be_another_one():
    known = side(fingerprint=MACHINE)
    assert circumstances(known, known) == ()
    assert circumstances(known, side()) == ("the machine of run is not known",)
    resumed = replace(known, resumed=True)
    assert circumstances(known, resumed) == ("run was resumed, maybe on another machine",)


def test_what_each_run_records_for_itself_may_differ(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    other.write_text("2")

    def known(path):
        records = {"entropy": path, "arrivals": path}
        trained = replace(training(), schedule=path)
        return side(fingerprint=MACHINE, training=trained, **records)

    assert circumstances(known(one), known(one)) == circumstances(known(one), known(None)) == ()
    assert circumstances(known(one), known(other)) == (
        "each run recorded its own randomness of the operating system",
        "each run recorded its own order of arrivals",
        "each run recorded its own order of actors",
    )


# --- ranks ----------------------------------------------------------------------------------------

ALL = ["seed", "environment", "schedule", "numerics", "machine", "settings", "code", "library",
       "evaluation", "system", "recording"]  # fmt: skip
# By hand, from what each family of a first difference depends on.
FIRST = {
    "seed": ["seed", "environment", "code", "library", "settings"],
    "environment": ["environment", "code", "library", "settings", "numerics", "machine"],
    "schedule": ["schedule", "machine", "settings", "code"],
    "numbers": ["settings", "numerics", "code", "library", "machine", "environment"],
    "results": ["evaluation", "environment", "code", "library", "numerics", "machine"],
}


@given(st.sampled_from(sorted(FIRST)), st.permutations(ALL))
def test_what_can_explain_a_difference_comes_first_and_nothing_is_lost(family, order):
    explained = ranked(tuple(Change(kind, kind, "1", "2") for kind in order), family)
    names = [each.what for each in explained]
    assert sorted(names) == sorted(ALL)
    assert names[0] == FIRST[family][0]
    assert set(names[: len(FIRST[family])]) == set(FIRST[family])
    assert names[-1] == "recording"


@given(st.lists(st.sampled_from(["a", "b", "c"])))
def test_changes_of_one_kind_stay_in_their_order(names):
    explained = ranked(tuple(Change("code", name, "1", "2") for name in names), "numbers")
    assert [each.what for each in explained] == names


def test_the_reason_of_a_change_replaces_that_of_its_kind():
    plain, reasoned = Change("seed", "x", "1", "2"), Change("seed", "y", "1", "2", "because")
    first, second = ranked((plain, reasoned), "seed")
    assert first.why == "every draw of the stream differs"
    assert (second.what, second.a, second.b, second.why) == ("y", "1", "2", "because")


def test_a_change_is_shown_with_both_values():
    assert str(Change("library", "wheel torch", "2.0", "2.1")) == "wheel torch: 2.0 / 2.1"
