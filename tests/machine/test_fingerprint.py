"""The fingerprint of this machine, and processors that are not here."""

import os
import platform
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.canonical import parse_canonical_json
from capsule.machine.fingerprint import CPUINFO, Cpu, Fingerprint, read_cpu, take_fingerprint

ZEN5 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC 9755 128-Core Processor
stepping\t: 1
flags\t\t: fpu sse sse2 fma sse4_1 sse4_2 avx f16c rdrand avx2 avx512f avx512_bf16 avx_vnni aes

processor\t: 1
vendor_id\t: other
flags\t\t: fpu
"""


def cache(folder, index, level, kind, size):
    entry = folder / f"index{index}"
    entry.mkdir()
    (entry / "level").write_text(f"{level}\n")
    (entry / "type").write_text(f"{kind}\n")
    (entry / "size").write_text(f"{size}\n")


def test_a_processor_is_read_from_its_first_core(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(ZEN5)
    cache(tmp_path, 0, 1, "Data", "48K")
    cache(tmp_path, 1, 1, "Instruction", "32K")
    cache(tmp_path, 2, 2, "Unified", "1024K")
    cache(tmp_path, 3, 3, "Unified", "512M")
    assert read_cpu(cpuinfo, tmp_path) == Cpu(
        vendor="AuthenticAMD",
        name="AMD EPYC 9755 128-Core Processor",
        family=26,
        model=2,
        stepping=1,
        flags=("avx", "avx2", "avx512_bf16", "avx512f", "avx_vnni", "f16c", "fma", "sse4_2"),
        logical_cores=os.cpu_count(),
        usable_cores=len(os.sched_getaffinity(0)),
        caches={"L1d": 48 << 10, "L1i": 32 << 10, "L2": 1 << 20, "L3": 512 << 20},
    )


def test_what_a_processor_does_not_tell_is_null(tmp_path):
    assert read_cpu(tmp_path / "none", tmp_path / "none") == Cpu(
        logical_cores=os.cpu_count(), usable_cores=len(os.sched_getaffinity(0))
    )
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nstepping : unknown\nFeatures : asimd\n")
    assert read_cpu(cpuinfo, tmp_path).stepping is None


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_no_text_in_cpuinfo_is_an_error(text, tmp_path_factory):
    cpuinfo = tmp_path_factory.mktemp("proc") / "cpuinfo"
    cpuinfo.write_text(text, encoding="utf-8", errors="surrogatepass")
    read_cpu(cpuinfo, cpuinfo.parent)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="lscpu's words differ elsewhere")
def test_this_processor_is_what_lscpu_says():
    listing = subprocess.run(
        ["lscpu"], env={"LC_ALL": "C"}, capture_output=True, text=True, check=True
    ).stdout
    facts = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in listing.splitlines())
    }
    cpu = read_cpu()
    assert cpu.vendor == facts["Vendor ID"]
    assert cpu.name == facts["Model name"]
    assert (cpu.family, cpu.model) == (int(facts["CPU family"]), int(facts["Model"]))
    assert set(cpu.flags) <= set(facts["Flags"].split())
    assert ("avx2" in cpu.flags) == ("avx2" in facts["Flags"].split())


def test_this_machine_has_a_fingerprint_that_survives_json():
    engine = {"name": "docker", "version": "20.10.24", "storage-driver": "overlay2"}
    taken = take_fingerprint(engine)
    assert Fingerprint.model_validate_json(taken.document()) == taken
    assert parse_canonical_json(taken.document())["schema"] == "capsule/fingerprint/v1"
    assert taken.engine == engine
    assert take_fingerprint(None).engine is None
    total = Path("/proc/meminfo").read_text().split("\n", 1)[0].split()[1]
    assert taken.memory_bytes == int(total) * 1024
    assert take_fingerprint(engine) == taken


def test_names_and_paths_stay_out():
    values = set(_leaves(parse_canonical_json(take_fingerprint(None).document())))
    private = {socket.gethostname(), socket.getfqdn(), pwd.getpwuid(os.getuid()).pw_name}
    assert not values & private
    assert not any(str(value).startswith("/") for value in values)
    assert str(Path.home()) not in repr(values)


def _leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def test_importing_the_room_loads_nothing_heavy():
    code = (
        "import sys, capsule.machine.compare, capsule.bundle.sbom;"
        "print(sorted({'pynvml', 'cyclonedx', 'packageurl', 'jsonschema', 'packaging'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_linux_tells_what_is_read():
    assert CPUINFO.exists()
