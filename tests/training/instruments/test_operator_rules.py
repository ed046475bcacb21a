"""The census of operators: against torch's own documentation, and against what torch does."""

import inspect
import re
import warnings

import pytest
import torch

from capsule.training.instruments.operator_reexecution import ReexecutionMode
from capsule.training.instruments.operator_rules import RULES, STATUSES, status_of


def documented(heading):
    """Return the bullets under a heading of torch's documentation, without markup."""
    text = inspect.getdoc(torch.use_deterministic_algorithms)
    section = text.partition(heading)[2].partition("``mode=True``:")[2]
    lines = []
    for line in section.splitlines()[2:]:
        if line and not line.startswith(" "):
            break
        lines.append(line)
    bullets = re.split(r"^\s*\* ", "\n".join(lines), flags=re.MULTILINE)[1:]
    return {plain(bullet) for bullet in bullets}


def plain(bullet):
    text = re.sub(r":\w+:`([^`]*)`", r"\1", bullet).replace("`", "")
    return re.sub(r":\s+- (.*)", lambda m: ": " + m[1].replace(" - ", ", "), " ".join(text.split()))


def restated(status):
    return {entry for rule in RULES if rule.status == status for entry in rule.documented}


@pytest.mark.parametrize(
    ("heading", "status"),
    [("operations will act", "with-flag"), ("operations will throw a", "raises")],
)
def test_the_rules_are_the_lists_of_torchs_documentation(heading, status):
    assert len(documented(heading)) > 20
    assert restated(status) == documented(heading)


def test_every_rule_names_operators_that_exist_and_a_known_status():
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    for rule in RULES:
        assert rule.status in STATUSES
        for name in rule.operators:
            assert {f"aten::{name}", f"aten::{name}_"} & known, name


def status(name, device="cpu", *, seeded=False, **arguments):
    return status_of(name, device, arguments, seeded=seeded)[0]


def test_the_status_depends_on_device_and_arguments():
    floats, integers = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    assert status("aten::index_put_", accumulate=True) == "with-flag"
    assert status("aten::index_put_", accumulate=False) == "with-flag"
    assert status("aten::index_put", "cuda", accumulate=True) == "deterministic"
    assert status("aten::put_", accumulate=True) == "with-flag"
    assert status("aten::put_", accumulate=False) == "raises"
    assert status("aten::cumsum", "cuda", self=floats) == "raises"
    assert status("aten::cumsum", "cuda", self=integers) == "deterministic"
    assert status("aten::cumsum", "cuda", self=integers, dtype=torch.float32) == "raises"
    assert status("aten::cumsum", "cpu", self=floats) == "deterministic"
    assert status("aten::scatter", "cuda", src=floats) == "with-flag"
    assert status("aten::scatter", "cuda", value=1.0) == "deterministic"
    assert status("aten::bernoulli_", seeded=True) == "seeded"
    assert status("aten::empty") == "uninitialized"
    assert status("mine::op") == "unknown"


CPU_CALLS = {
    "put_ overwriting": lambda: torch.zeros(4).put_(torch.tensor([1]), torch.ones(1)),
    "put_ accumulating": lambda: torch.zeros(4).put_(
        torch.tensor([1]), torch.ones(1), accumulate=True
    ),
    "index_put accumulating": lambda: torch.zeros(4).index_put_(
        (torch.tensor([1]),), torch.ones(1), accumulate=True
    ),
    "cumsum": lambda: torch.ones(4).cumsum(0),
    "scatter_add": lambda: torch.zeros(4).scatter_add(0, torch.tensor([1]), torch.ones(1)),
    "max_unpool2d": lambda: torch.nn.functional.max_unpool2d(
        torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int64), 2
    ),
}


@pytest.mark.parametrize("call", CPU_CALLS.values(), ids=CPU_CALLS)
@pytest.mark.slow
def test_torch_warns_of_exactly_the_calls_whose_status_is_raises(call, deterministic_warnings):
    with warnings.catch_warnings(record=True) as caught, ReexecutionMode() as mode:
        warnings.simplefilter("always")
        call()
    warned = any("does not have a deterministic implementation" in str(w.message) for w in caught)
    statuses = {use.status for use in mode.uses()}
    assert warned == ("raises" in statuses)


@pytest.fixture
def deterministic_warnings():
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield
    torch.set_deterministic_debug_mode(before)
