"""CPU numerics: the maths shim against IEEE 754 and wider numbers, the profiles read back."""

import json
import os
import sys
from functools import cache

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.experiment.variables import maths_variables
from capsule.native import native_part
from capsule.training.determinism import cpu
from tests.conftest import printed
from tests.training.conftest import ROOT

PORTABLE = ["portable-v3", "portable-v3-strict", "portable-v2"]


def python(code, profile, *, preload=True, interpreter=(sys.executable,), **variables):
    """Run code under a profile in a new interpreter; return what it prints as JSON."""
    prelude = "import json, sys\nfrom capsule.training.determinism import cpu, torch_flags\n"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        **maths_variables(profile, threads=1),
        **({"LD_PRELOAD": str(native_part("libcapsule-math.so"))} if preload else {}),
        **variables,
    }
    return json.loads(printed([*interpreter, "-c", prelude + code, profile], environment))


VECTORS = """
import torch, numpy as np
numbers = (np.arange(1, 100_001, dtype=np.int64) * 2654435761 % (1 << 24) + 1) / (1 << 20)
unit = numbers / 16
result = {}
for name in ("sqrt", "log", "log2", "log10", "asin", "acos", "atan", "tan"):
    for kind in (np.float32, np.float64):
        given = (unit if name in ("asin", "acos") else numbers).astype(kind)
        got = getattr(torch, name)(torch.from_numpy(given)).numpy()
        wide = getattr(np, {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}.get(name, name))(
            given.astype(np.longdouble)
        )
        unit_in_last_place = np.spacing(np.abs(wide).astype(kind)).astype(np.longdouble)
        worst = np.max(np.abs(got.astype(np.longdouble) - wide) / unit_in_last_place)
        unequal = int((got != wide.astype(kind)).sum())
        result[f"{name}.{np.dtype(kind).name}"] = (float(worst), unequal)
print(json.dumps(result))
"""
ROUNDED_TO_SINGLE = ("sqrt", "log2", "log10", "asin", "acos", "atan", "tan")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["portable-v3", "portable-v2"])
def test_vector_functions_are_accurate_and_binary32_correctly_rounded(profile):
    found = dict(answers(profile)["vectors"])
    assert found.pop("log10.float64")[0] < 2.0  # the C library's
    assert all(worst < 1.0 for worst, _ in found.values()), found
    assert {found[f"{name}.float32"][1] for name in ROUNDED_TO_SINGLE} == {0}


@pytest.mark.slow
def test_without_the_shim_single_results_are_not_all_correctly_rounded():
    found = python(VECTORS, "portable-v3", preload=False)
    assert any(found[f"{name}.float32"][1] for name in ROUNDED_TO_SINGLE)


EDGES = """
import torch
inf = float("inf")
single = torch.tensor([0.0, -0.0, inf, -1.0, 5e-324, 1e-45])
print(json.dumps([repr(getattr(single.to(kind), name)().tolist())
                  for kind in (torch.float32, torch.float64)
                  for name in ("sqrt", "log", "log2", "log10", "asin", "acos", "atan", "tan")]))
"""


@pytest.mark.slow
def test_special_values_are_those_of_the_c_library():
    import math

    def log(function, value):
        if value == 0:
            return -math.inf
        return math.nan if value < 0 else function(value)

    def of(function, *bad):
        return lambda value: math.nan if value in bad else function(value)

    functions = [
        of(math.sqrt, -1.0),
        lambda v: log(math.log, v),
        lambda v: log(math.log2, v),
        lambda v: log(math.log10, v),
        of(math.asin, math.inf),
        of(math.acos, math.inf),
        math.atan,
        of(math.tan, math.inf),
    ]
    import numpy as np

    expected = []
    for kind in (np.float32, np.float64):
        values = np.array([0.0, -0.0, math.inf, -1.0, np.float32(5e-324), np.float32(1e-45)], kind)
        for function in functions:
            wanted = [float(kind(function(float(value)))) for value in values]
            expected.append(wanted)
    found = [
        [float(number) for number in text.strip("[]").split(", ")]
        for text in answers("portable-v3")["edges"]
    ]
    np.testing.assert_array_max_ulp(np.array(found), np.array(expected), 1)


ROOTS = """
import torch, numpy as np
unequal = 0
for kind in (np.float32, np.float64):
    for size in (*range(1, 40), 100_003):
        numbers = np.arange(1, size + 1, dtype=np.int64) * 2654435761 % (1 << 24)
        given = (numbers / 1024).astype(kind)
        tensor = torch.from_numpy(given.copy())
        unequal += int((tensor.sqrt().numpy() != np.sqrt(given)).sum())
        unequal += int((tensor.sqrt_().numpy() != np.sqrt(given)).sum())
print(json.dumps(unequal))
"""


@pytest.mark.slow
def test_the_square_root_is_that_of_ieee_754_in_place_and_at_every_length():
    assert answers("portable-v3")["roots"] == 0


SETTLED = """
name = sys.argv[1]
cpu.require(name)
cpu.settle(name)
print(json.dumps(torch_flags.expect(cpu.read_back(name, 1), "library")))
"""


# What each interpreter of answers() is asked; the last changes what follows it.
ASKED = {
    "portable-v3": {"vectors": VECTORS, "edges": EDGES, "roots": ROOTS, "settled": SETTLED},
    "portable-v3-strict": {"settled": SETTLED},
    "portable-v2": {"vectors": VECTORS, "settled": SETTLED},
}
IN_TURN = """
import contextlib, io
answers = {{}}
for name, text in {programs!r}.items():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(text, dict(globals()))
    answers[name] = json.loads(printed.getvalue())
print(json.dumps(answers))
"""


@cache
def answers(profile):
    """Run the programs of a portable profile in one interpreter, whose start takes seconds."""
    return python(IN_TURN.format(programs=ASKED[profile]), profile)


@pytest.mark.slow
@pytest.mark.parametrize("profile", PORTABLE)
def test_portable_profiles_take_effect(profile):
    flags = answers(profile)["settled"]
    narrow = profile == "portable-v2"
    assert flags["torch.cpu_capability"] == ("DEFAULT" if narrow else "AVX2")
    assert flags["mkl.branch"] == ("SSE4_2" if narrow else "AVX2")
    assert flags["mkl.vendor_check"] == "libcapsule-math.so"
    assert flags["onednn.isa"] == ("Intel AVX2" if profile == "portable-v3" else "off")
    assert flags["nnpack.enabled"] == "False"
    assert flags["openblas.core"] == ("Nehalem" if narrow else "Haswell")
    assert "AVX512" not in flags["numpy.cpu_features"]
    assert ("X86_V3" in flags["numpy.cpu_features"]) != narrow


@pytest.mark.slow
def test_native_leaves_the_libraries_alone():
    flags = python(SETTLED, "native", preload=False)
    assert flags["mkl.vendor_check"] == "libtorch_cpu.so"
    assert flags["onednn.isa"] != "off"


REFUSED = """
from capsule.experiment.errors import CapsuleError
try:
    cpu.require(sys.argv[1])
    cpu.settle(sys.argv[1])
    torch_flags.expect(cpu.read_back(sys.argv[1], 1), "library")
    print(json.dumps("accepted"))
except CapsuleError as error:
    print(json.dumps(str(error) + " | " + error.fix))
"""


@pytest.mark.parametrize("profile", PORTABLE)
def test_a_missing_preload_is_named_with_its_fix(profile):
    said = python(REFUSED, profile, preload=False)
    assert said.startswith("CAP-T108")
    assert profile in said
    assert "LD_PRELOAD" in said


@pytest.mark.slow
def test_a_pin_that_is_not_kept_stops_the_run():
    said = python(REFUSED, "portable-v3", MKL_CBWR="COMPATIBLE")
    assert said.startswith("CAP-T104")
    assert "mkl.branch reads back as 'COMPATIBLE'" in said
    said = python(REFUSED, "portable-v3", NPY_DISABLE_CPU_FEATURES="")
    if "avx512f" in cpu.cpu_facts()["flags"]:
        assert "numpy.cpu_features" in said
    else:
        assert said == "accepted"


@pytest.mark.parametrize(
    ("profile", "flags", "missing"),
    [
        ("portable-v3", "sse4_2 popcnt avx avx2", "fma"),
        ("portable-v3-strict", "sse4_2", "avx2, fma"),
        ("portable-v2", "sse2", "popcnt, sse4_2"),
        ("native", "sse2", None),
    ],
)
def test_a_processor_without_the_instructions_is_refused(monkeypatch, profile, flags, missing):
    monkeypatch.setattr(cpu, "cpu_facts", lambda: {"flags": flags})
    if missing is None:
        cpu.require(profile)
        return
    with pytest.raises(CapsuleError, match=f"missing: {missing}$") as caught:
        cpu.require(profile)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-T103", 4)


@pytest.mark.parametrize("symbol", ["openblas_get_corename64_", "scipy_openblas_get_corename64_"])
def test_the_openblas_of_each_numpy_is_asked_for_its_kernels(monkeypatch, symbol):
    def function(library, name):
        return (lambda: b"Haswell") if (library, name) == ("openblas", symbol) else None

    monkeypatch.setattr(cpu, "_function", function)
    assert cpu._openblas_core() == "Haswell"
