"""One fault planted in each program: it is found, with line and mitigation. None: no finding."""

import pytest

SYSTEM = {"entropy": {"mode": "system"}}
MACHINE_CLOCK = {"entropy": {"clock": "system"}}


@pytest.mark.slow
def test_randomness_that_nothing_seeds(explained):
    found = explained(
        """\
        import random
        import uuid

        import numpy as np
        import torch

        start = random.random()
        rng = np.random.default_rng()
        name = str(uuid.uuid4())
        weights = torch.nn.Linear(3, 2)
        inputs = torch.randn(2, 3)
        print(start, rng.normal(), name, weights(inputs).sum().item())
        """,
        **SYSTEM,
    )
    assert not found.equal
    assert sorted(found.places()) == [
        ("CAP-D103", f"train.py:{line}") for line in ("11", "7", "8", "9")
    ]
    assert all(item.patch == {"entropy.mode": "virtual"} for item in found.findings)


@pytest.mark.slow
@pytest.mark.parametrize("generator", ["random.SystemRandom().random()", "secrets.randbits(64)"])
def test_randomness_that_cannot_be_seeded(explained, generator):
    found = explained(f"import random, secrets\nx = {generator}\nprint(x)\n", **SYSTEM)
    assert found.places() == [("CAP-D103", "train.py:2")]


CLOCKS = {
    "through a variable": (
        """\
        import random
        import time

        seed = int(time.time() * 1e6)
        started = time.monotonic()
        random.seed(seed)
        value = random.random()
        print(value)
        """,
        4,
    ),
    "directly": (
        """\
        import random
        import time

        random.seed(time.time_ns())
        value = random.random()
        print(value)
        """,
        4,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("program", "line"), CLOCKS.values(), ids=CLOCKS)
def test_a_seed_that_is_taken_from_the_clock(explained, program, line):
    found = explained(program, **MACHINE_CLOCK)
    assert found.places() == [("CAP-D102", f"train.py:{line}")]
    item = found.one("CAP-D102")
    assert item.patch == {"entropy.clock": "virtual"}
    assert "{seed}" in item.mitigation
    assert "time.time" in item.text


@pytest.mark.slow
def test_a_time_that_is_printed_is_a_warning(explained):
    found = explained("import time\nstarted = time.time()\nprint(started)\n", **MACHINE_CLOCK)
    assert found.places() == []
    assert found.places("warning") == [("CAP-D108", "train.py:2")]


@pytest.mark.slow
def test_an_order_that_depends_on_addresses(explained):
    # Addresses are moved by pages: the more slots a set has, the rarer an order comes twice.
    found = explained(
        """\
        from operator import attrgetter

        class Node:
            def __init__(self, name):
                self.name = name

        nodes = set(map(Node, range(16_000)))
        order = list(map(attrgetter("name"), nodes))
        print(order.index(0))
        """,
        entropy={"address_randomization": True},
    )
    assert ("CAP-D104", "train.py:8") in found.places()
    assert {code for code, _ in found.places()} == {"CAP-D104"}
    item = found.findings[0]
    assert item.patch == {"entropy.address_randomization": False}
    assert item.text == 'order = list(map(attrgetter("name"), nodes))'


@pytest.mark.slow
def test_an_address_that_is_computed_with(explained):
    found = explained("shard = id(object()) % 10**9\nprint(shard)\n")
    assert found.places() == [("CAP-D104", "train.py:1")]


HASHES = {
    "an order": """\
        columns = list({"angle", "speed", "height", "mass", "drag", "lift", "torque"})
        print(columns)
        """,
    "a value": """\
        shard = hash("episode-7") % 1_000_003
        print(shard)
        """,
}


@pytest.mark.slow
@pytest.mark.parametrize("program", HASHES.values(), ids=HASHES)
def test_what_depends_on_the_hash_seed(explained, program):
    found = explained(program, determinism={"hash_seed": None})
    assert found.places() == [("CAP-D105", "train.py:1")]
    assert found.one("CAP-D105").patch == {"determinism.hash_seed": 0}


def test_a_process_number(explained):
    found = explained("import os\nworker = os.getpid()\nprint(worker)\n")
    assert found.places() == [("CAP-D107", "train.py:2")]


def test_a_value_without_known_source(explained):
    found = explained(
        """\
        import subprocess

        answer = subprocess.check_output(["date", "+%N"])
        shorter = answer[:3]
        print(shorter, answer)
        """
    )
    assert found.places() == [("CAP-D109", "train.py:3")]


RACE = """\
import torch

torch.manual_seed(0)
index, values = torch.randint(7, (400_000,)), torch.randn(400_000)
for _ in range(10):
    total = torch.zeros(7).index_put_((index,), values, accumulate=True)
"""


@pytest.mark.slow
def test_a_racing_operator(explained):
    found = explained(RACE, torch=True, determinism={"algorithms": "off", "threads": 4})
    assert found.places() == [("CAP-D201", "train.py:6")]
    item = found.one("CAP-D201")
    assert item.operator == "aten::index_put_"
    assert item.patch == {"determinism.algorithms": "error"}
    assert "with 4 threads" in item.message


@pytest.mark.slow
def test_an_operator_that_races_only_elsewhere_is_a_warning(explained):
    found = explained(RACE, torch=True, determinism={"algorithms": "off", "threads": 1})
    assert found.equal
    assert found.places() == []
    assert found.places("warning") == [("CAP-D202", "train.py:6")]


@pytest.mark.slow
def test_an_operator_without_deterministic_implementation(explained):
    found = explained(
        """\
        import torch

        x = torch.zeros(4)
        x.put_(torch.tensor([1]), torch.ones(1))
        """,
        torch=True,
        determinism={"algorithms": "warn"},
    )
    assert found.places("warning") == [("CAP-D203", "train.py:4")]


CLEAN = """\
import os
import random
import time

import numpy as np
import torch
from torch import nn

seed = int(os.environ["CAPSULE_SEED"])
random.seed(seed)
np.random.seed(seed)
rng = np.random.default_rng(seed)
torch.manual_seed(seed)
started = time.time()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 16, num_layers=2, dropout=0.5)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        x, _ = self.lstm(x)
        return self.head(self.norm(x.flatten(0, 1)))


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters())
for step in range(3):
    batch = torch.from_numpy(rng.normal(size=(5, 8, 4)).astype(np.float32))
    loss = nn.functional.cross_entropy(policy(batch), torch.randint(2, (40,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
order = sorted({"a", "b", "c"}, key=lambda name: random.random())
print(order, loss.item(), np.random.rand())
elapsed = time.time() - started
"""


@pytest.mark.slow
def test_an_lstm_with_dropout_and_seeds_gives_no_finding(explained):
    found = explained(CLEAN, torch=True)
    assert found.equal
    assert found.findings == []
