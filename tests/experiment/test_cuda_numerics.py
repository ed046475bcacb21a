"""Fields of accelerator.kind cuda that locks of before had not: numerics and cuda_graphs."""

import json

import pytest

from capsule.entropy.launch import launch_arguments
from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import Spec
from capsule.experiment.variables import environment_variables
from capsule.host.spec_file import parse_spec

GPU = "kind: cuda, cuda: '13.0', cudnn: '>=9.10', driver: '>=580.65'"
IMPALA = "{algorithm: impala, network: mlp, unroll_length: 4, batch_size: 1, micro_batches: [1]}"


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


def test_graphs_are_left_out_of_a_document_unless_asked_for():
    assert "cuda_graphs" not in json.loads(parse(GPU).document())["accelerator"]
    asked = parse(f"{GPU}, cuda_graphs: true").document()
    assert json.loads(asked)["accelerator"]["cuda_graphs"] is True
    assert Spec.parse(asked).document() == asked


@pytest.mark.parametrize(
    ("accelerator", "trainer", "message"),
    [
        ("kind: cpu", "{algorithm: dqn, network: mlp}", r"accelerator\..*cuda_graphs"),
        (GPU, IMPALA, "not supported by trainer.algorithm 'impala'"),
        (f"{GPU}, numerics: native", "{algorithm: dqn, network: {module: 'mine:Net'}}", "module"),
    ],
)
def test_graphs_are_refused_where_they_are_not_supported(accelerator, trainer, message):
    with pytest.raises(CapsuleError, match=message) as failure:
        parse(f"{accelerator}, cuda_graphs: true", trainer)
    assert failure.value.code.startswith("CAP-S")


def test_a_program_captures_graphs_itself():
    text = f"schema: capsule/spec/v1\nname: a\naccelerator: {{{GPU}, cuda_graphs: true}}\n"
    text += "code: {path: .}\ntrainer: {command: [python, train.py]}\n"
    with pytest.raises(CapsuleError, match=r"cuda_graphs does not apply to trainer\.command"):
        parse_spec(text.encode(), "a")
