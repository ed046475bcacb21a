"""The variables that a spec stands for: what each setting changes, and what changes nothing."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from capsule.entropy.launch import launch_arguments
from capsule.experiment.variables import environment_variables, maths_variables
from tests.experiment.specs import ATARI, CUDA, DQN, IMPALA, PROGRAM, make_spec

CPU = {"kind": "cpu"}
COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PROFILES = ("portable-v3", "portable-v3-strict", "portable-v2", "native")


def variables(document=DQN, **changes):
    return environment_variables(make_spec(document, **changes))


def settings(given_variables):
    return json.loads(given_variables["CAPSULE_DETERMINISM"])


def without_settings(given_variables):
    return {name: each for name, each in given_variables.items() if name != "CAPSULE_DETERMINISM"}


def preloads(spec):
    words = launch_arguments(spec, native="/n", directory="/d", replay=False)
    return [word for word in words if "libcapsule-math" in word]


def test_the_variables_follow_the_numerics_profile():
    pinned, native = variables(), variables(accelerator={"numerics": "native"})
    assert pinned["ATEN_CPU_CAPABILITY"] == "avx2"
    assert "ATEN_CPU_CAPABILITY" not in native
    assert native["PYTHONHASHSEED"] == "0"
    cuda = variables(accelerator=CUDA)
    assert cuda["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert cuda["NVIDIA_TF32_OVERRIDE"] == "0"


@pytest.mark.parametrize(
    ("determinism", "accelerator", "changed"),
    [
        ({"hash_seed": None}, CPU, {"PYTHONHASHSEED": "random"}),
        ({"hash_seed": 42}, CPU, {"PYTHONHASHSEED": "42"}),
        ({"propagation": False}, CPU, {"CAPSULE_DETERMINISM": None}),
        ({"threads": None}, CPU, dict.fromkeys(COUNTS)),
        ({"threads": 3}, CPU, dict.fromkeys(COUNTS, "3")),
        ({"cublas_workspace": None}, CUDA, {"CUBLAS_WORKSPACE_CONFIG": None}),
        ({"cublas_workspace": ":16:8"}, CUDA, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
        ({"cublas_workspace": ":16:8"}, CPU, {}),
        ({"tf32": True}, CUDA, {"NVIDIA_TF32_OVERRIDE": None}),
        ({"tf32": True}, CPU, {}),
        ({"algorithms": "warn"}, CUDA, {}),
        ({"algorithms": "off"}, CPU, {"TORCHINDUCTOR_DETERMINISTIC": "0"}),
        (
            {"algorithms": "off"},
            CUDA,
            {
                "TORCHINDUCTOR_DETERMINISTIC": "0",
                "FLASH_ATTENTION_DETERMINISTIC": None,
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO": None,
            },
        ),
    ],
)
def test_variables_follow_the_switches(determinism, accelerator, changed):
    usual = variables(accelerator=accelerator)
    weaker = variables(accelerator=accelerator, determinism=determinism)
    differing = {
        name: weaker.get(name)
        for name in usual.keys() | weaker.keys()
        if usual.get(name) != weaker.get(name)
    }
    assert differing == {"CAPSULE_DETERMINISM": weaker.get("CAPSULE_DETERMINISM")} | changed


def test_only_trainers_of_our_own_have_the_c_library_keep_big_buffers():
    names = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
    assert names <= variables().keys()
    assert not names & variables(PROGRAM).keys()


def test_the_cpu_of_a_cuda_run_is_held_to_the_profile_as_without_a_gpu():
    with_gpu, without = make_spec(accelerator=CUDA), make_spec(accelerator=CPU)
    assert with_gpu.cpu_numerics == without.cpu_numerics == "portable-v3"
    native = variables(accelerator={"numerics": "native"})
    pins = without_settings(environment_variables(without)).items() - native.items()
    assert pins <= environment_variables(with_gpu).items()
    assert preloads(with_gpu) == preloads(without) != []


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("threads", [None, 1, 8])
def test_a_spec_has_the_maths_variables_of_its_profile(profile, threads):
    found = variables(accelerator={"numerics": profile}, determinism={"threads": threads})
    assert maths_variables(profile, threads).items() <= found.items()


@pytest.mark.parametrize("profile", PROFILES)
def test_the_libraries_keep_to_the_number_of_threads(profile):
    fixed, free = maths_variables(profile, 8), maths_variables(profile, None)
    assert fixed == free | dict.fromkeys(COUNTS, "8")
    assert (free["OMP_DYNAMIC"], free["MKL_DYNAMIC"]) == ("FALSE", "FALSE")


def test_a_caller_cannot_change_the_pins_of_a_profile():
    first = maths_variables("portable-v3", 1)
    first["ATEN_CPU_CAPABILITY"] = "avx512"
    assert maths_variables("portable-v3", 1)["ATEN_CPU_CAPABILITY"] == "avx2"


def test_every_portable_profile_pins_the_same_libraries_and_excludes_avx_512():
    pins = {
        each: maths_variables(each, 1).items() - maths_variables("native", 1).items()
        for each in PROFILES
    }
    names = {each: {name for name, _ in pins[each]} for each in PROFILES}
    assert names["portable-v3"] == names["portable-v3-strict"] == names["portable-v2"]
    assert names["native"] == set()
    for profile in PROFILES[:-1]:
        tunables = dict(pins[profile])["GLIBC_TUNABLES"]
        disabled = set(re.findall(r"-(\w+)", tunables.partition("hwcaps=")[2]))
        assert disabled >= {f"AVX512{part}" for part in ("F", "VL", "BW", "DQ", "CD")}
        assert ({"AVX2", "FMA"} <= disabled) is (profile == "portable-v2")


def test_a_cpu_run_has_no_variables_of_a_gpu():
    words = ("CUDA", "NVIDIA", "CUBLAS", "NVTE", "FLASH")
    assert not [name for name in variables() if any(word in name for word in words)]
    assert [name for name in variables(accelerator=CUDA) if any(word in name for word in words)]


def test_child_processes_get_the_settings_and_the_variables_that_belong_to_them():
    found = variables(accelerator=CUDA, determinism={"threads": 2, "algorithms": "warn"})
    told = settings(found)
    assert told.keys() == {"determinism", "numerics", "environment"}
    assert told["environment"] == without_settings(found)
    assert (told["determinism"]["threads"], told["determinism"]["algorithms"]) == (2, "warn")
    spaced = json.dumps(told, separators=(",", ":"), sort_keys=True)
    assert found["CAPSULE_DETERMINISM"] == spaced


@pytest.mark.parametrize(
    ("accelerator", "promised"),
    [
        ({"kind": "cpu", "numerics": "native"}, "native"),
        ({"kind": "cpu", "numerics": "portable-v2"}, "portable-v2"),
        ({**CUDA, "numerics": "portable-v2"}, "portable-v2"),
        ({**CUDA, "numerics": "native"}, None),
    ],
)
def test_a_profile_is_settled_unless_nothing_is_promised_of_the_cpu(accelerator, promised):
    assert settings(variables(accelerator=accelerator))["numerics"] == promised


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"seeds": {"root": 9}},
        {"entropy": {"mode": "recorded", "clock": "fixed"}},
        {"limits": {"minutes": 7}},
        {"image": {"packages": ["torch==2.0"]}},
        {"environment": ATARI, "trainer": {"network": "nature"}},
    ],
)
def test_other_sections_change_no_variable(changes):
    assert variables(**changes) == variables()


def test_the_variables_do_not_depend_on_the_algorithm():
    assert variables(IMPALA) == variables()


@examples(max_examples=30)
@given(
    seed=st.none() | st.integers(0, 2**32 - 1),
    threads=st.none() | st.integers(1, 512),
    profile=st.sampled_from(PROFILES),
    gpu=st.booleans(),
)
def test_every_variable_is_one_of_a_process(seed, threads, profile, gpu):
    accelerator = {**(CUDA if gpu else CPU), "numerics": profile}
    found = variables(accelerator=accelerator, determinism={"hash_seed": seed, "threads": threads})
    for name, value in found.items():
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*", name)
        assert value.isprintable()
        assert value != "None"
