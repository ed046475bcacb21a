"""The profile of the CPU beside a GPU: new specs have one, and locks of before had none."""

import json

import pytest

from capsule.entropy.launch import launch_arguments
from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import Spec
from capsule.experiment.variables import environment_variables
from capsule.host.spec_file import parse_spec

GPU = "kind: cuda, cuda: '13.0', cudnn: '>=9.10', driver: '>=580.65'"


def parse(accelerator, trainer="{algorithm: dqn, network: mlp}"):
    text = f"schema: capsule/spec/v1\nname: a\naccelerator: {{{accelerator}}}\ntrainer: {trainer}\n"
    return parse_spec(f"{text}environment: {{suite: gymnasium, id: CartPole-v1}}\n".encode(), "a")


def preloads(spec):
    words = launch_arguments(spec, native="/n", directory="/d", replay=False)
    return [word for word in words if "libcapsule-math" in word]


def test_the_cpu_of_a_cuda_run_is_held_to_the_profile_as_without_a_gpu():
    with_gpu, without = parse(GPU), parse("kind: cpu")
    assert with_gpu.cpu_numerics == without.cpu_numerics == "portable-v3"
    native = environment_variables(parse("numerics: native"))
    held = environment_variables(without).items() - native.items()
    pins = {name: value for name, value in held if name != "CAPSULE_DETERMINISM"}
    assert pins.items() <= environment_variables(with_gpu).items()
    assert preloads(with_gpu) == preloads(without) != []


def test_a_lock_of_before_keeps_what_it_meant_and_its_identity():
    spec = parse(f"{GPU}, numerics: native")
    stored = spec.document()
    assert "numerics" not in json.loads(stored)["accelerator"]
    read = Spec.parse(stored)
    assert (read.cpu_numerics, read.document()) == ("native", stored)
    assert preloads(read) == []
    settled = json.loads(environment_variables(read)["CAPSULE_DETERMINISM"])
    assert settled["numerics"] is None


def test_a_new_profile_is_stored():
    document = json.loads(parse(GPU).document())
    assert document["accelerator"]["numerics"] == "portable-v3"
    assert Spec.parse(canonical_json(document)).cpu_numerics == "portable-v3"


def test_no_profile_is_promised_of_a_module_of_the_users_own():
    module = "{algorithm: dqn, network: {module: mine:Net}}"
    with pytest.raises(CapsuleError, match=r"requires accelerator\.numerics 'native'"):
        parse(GPU, module)
