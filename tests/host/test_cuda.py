"""NVIDIA's libraries among Python packages, and the GPUs that a build of torch has code for."""

import itertools
import re

import pytest

from capsule.host.cuda import NEEDS, cuda_versions, wheel_architectures

# The wheels that "pip install torch==2.9.1" installs for Linux on x86-64, abridged.
TORCH_2_9 = [
    ("filelock", "3.20.0"),
    ("nvidia-cublas-cu12", "12.8.4.1"),
    ("nvidia-cuda-nvrtc-cu12", "12.8.93"),
    ("nvidia-cuda-runtime-cu12", "12.8.90"),
    ("nvidia-cudnn-cu12", "9.10.2.21"),
    ("nvidia-cudnn-frontend", "1.15.0"),
    ("torch", "2.9.1"),
]
RUNTIMES = {"12.6": "12.6.77", "12.8": "12.8.90", "13.0": "13.0.96", "13.2": "13.2.51"}
RELEASES = ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14")


def architectures(torch, cuda):
    return wheel_architectures(
        [("torch", f"{torch}.0"), (f"nvidia-cuda-runtime-cu{cuda[:2]}", RUNTIMES[cuda])]
    )


def test_the_versions_are_those_of_the_wheels_that_carry_the_libraries():
    assert cuda_versions(iter(TORCH_2_9)) == {
        "CUDA": "12.8.90",
        "cuDNN": "9.10.2.21",
        "cuBLAS": "12.8.4.1",
    }


@pytest.mark.parametrize("suffix", ["", "-cu11", "-cu12", "-cu13"])
def test_the_suffix_of_a_distribution_may_name_the_major_version(suffix):
    assert cuda_versions([(f"nvidia-cuda-runtime{suffix}", "13.0.96")]) == {"CUDA": "13.0.96"}


@pytest.mark.parametrize(
    "name", ["nvidia-cuda-runtime-cu", "nvidia-cuda-runtime-cu12-dev", "my-nvidia-cudnn", "torch"]
)
def test_a_distribution_of_another_name_is_no_library(name):
    assert cuda_versions([(name, "12.8.90")]) == {}


def test_the_architectures_are_those_of_the_release_and_of_its_cuda():
    # The builds of PyTorch 2.9 for CUDA 12.8, by "PyTorch CUDA Support Matrix" of RELEASE.md.
    assert set(wheel_architectures(TORCH_2_9)) == {
        "sm_70",
        "sm_75",
        "sm_80",
        "sm_86",
        "sm_90",
        "sm_100",
        "sm_120",
    }


def test_a_local_version_changes_nothing():
    local = [(name, "2.9.1+cu128" if name == "torch" else v) for name, v in TORCH_2_9]
    assert wheel_architectures(local) == wheel_architectures(TORCH_2_9)


@pytest.mark.parametrize(
    "wheels",
    [
        [],
        [("torch", "2.9.1")],
        [("nvidia-cuda-runtime-cu12", "12.8.90")],
        [("torch", "1.13.1"), ("nvidia-cuda-runtime-cu12", "12.8.90")],
        [("torch", "2.9.1"), ("nvidia-cuda-runtime-cu11", "11.8.89")],
    ],
    ids=["nothing", "no CUDA", "no torch", "an older torch", "an older CUDA"],
)
def test_of_other_wheels_no_architecture_is_known(wheels):
    assert wheel_architectures(wheels) == ()


def test_no_build_has_code_for_a_gpu_that_its_cuda_no_longer_supports():
    """The matrix of PyTorch and the release notes of CUDA are two sources of this."""
    built = {
        (torch, cuda): architectures(torch, cuda)
        for torch, cuda in itertools.product(RELEASES, RUNTIMES)
    }
    for (_, cuda), names in built.items():
        for name in names:
            major, minor = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)", name).groups()
            assert (int(major), int(minor)) >= NEEDS[cuda[:2]].capability
    assert all(any(built[torch, cuda] for cuda in RUNTIMES) for torch in RELEASES)
