"""Whether this machine can build, run and verify: one check after the other, each with its remedy.

No file is left behind, except by :func:`repair`.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from capsule.bundle.keys import load_public
from capsule.engine.connection import (
    CONTAINER_ENGINES,
    answering_engines,
    component,
    connect,
    engine_errors,
    is_rootless,
)
from capsule.engine.gpu import gpu_request, require_driver
from capsule.engine.interface import Engine
from capsule.experiment.files import HAVE_OWNERS
from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import CapsuleError, refusal_of
from capsule.host.folders import existing_folder, free_bytes
from capsule.host.owner import temporary_folder
from capsule.host.platform import require_execution
from capsule.host.wording import agreeing, counted
from capsule.image.cache import Cache, reject_shared
from capsule.image.distribution import DEBIAN_12
from capsule.image.recipe import load_recipe
from capsule.image.resolution.debian import shipped_base
from capsule.image.resolution.fetch import fetch_debian
from capsule.image.resolution.sources import machine_sources
from capsule.image.resolution.wheels import WheelSearch, compile_wheels
from capsule.machine.devices import VISIBLE, Device, read_devices, visible_devices
from capsule.machine.fingerprint import read_cpu
from capsule.machine.gpu import LOADED, NOT_FOUND, load_nvml, read_gpus
from capsule.machine.requirements import NEEDED_FLAGS
from capsule.machine.self_test import GpuSelfTest, SelfTest

Status = Literal["ok", "warning", "problem", "unchecked"]
_LITTLE_DISK, _NO_DISK = 10 << 30, 2 << 30
_PROGRAMS = {
    "git": "to record the commit of a program's source tree",
    "ssh-keygen": "for signatures with --ssh-key",
}
# The headers of PKCS#8, which 'capsule keygen' writes. Keys of other programs are not touched.
_PRIVATE = (b"-----BEGIN PRIVATE KEY-----", b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
_RESET = "Reset the GPU ('nvidia-smi --gpu-reset') or restart; replace it if this happens again."
_HIDDEN = 0o077  # what others may not do with a private key


class Check(NamedTuple):
    """The result of one check.

    Attributes:
        name: What was checked.
        status: "problem": runs or builds fail because of it; "warning": some of them may.
        found: What was found.
        fix: What to do about it; None if there is nothing to do.
    """

    name: str
    status: Status
    found: str
    fix: str | None = None


_Checking = Callable[[], Check | Iterable[Check]]


def check_machine(keys: Iterable[Path]) -> Iterator[Check]:
    """Check everything but numerics.

    Args:
        keys: Private keys, beside those in the current folder.
    """
    yield Check("Python", "ok", f"{sys.version.split()[0]}, {sys.executable}")
    system = next(_results("platform", check_platform))
    yield system
    if system.status != "ok":  # what the other checks look for exists on Linux only
        yield from _results("keys", lambda: map(check_key, private_keys(keys)))
        return
    engines = list(_results("engines", check_engines))
    yield from engines
    containers = any(check.status == "ok" for check in engines)
    checks: dict[str, _Checking] = {
        "rootless engines": lambda: check_rootless(containers=containers),
        "C library": lambda: check_c_library(containers=containers),
        "processor": check_processor,
        "GPU": check_gpus,
        "disk": check_disks,
        "cache": check_cache,
        "temporary files": check_temporary,
        "package index": check_index,
        "Debian mirror": check_mirror,
        "programs": check_programs,
        "keys": lambda: map(check_key, private_keys(keys)),
    }
    for name, check in checks.items():
        yield from _results(name, check)


def _results(name: str, check: _Checking) -> Iterator[Check]:
    """Yield the results of a check. One that cannot be made is a problem, and others follow."""
    try:
        found = check()
        yield from (found,) if isinstance(found, Check) else found
    except CapsuleError as error:
        yield Check(name, "problem", error.message, error.fix)
    except OSError as error:
        coded = refusal_of(error)
        fix = "Change to an existing folder that you may read." if coded is None else coded.fix
        yield Check(name, "problem", str(error), fix)


def check_platform() -> Check:
    """Check that runs can be executed here at all."""
    require_execution()
    return Check("platform", "ok", "Linux on x86_64")


def check_engines() -> Iterator[Check]:
    """Check which container engines answer. One is enough."""
    found: dict[str, Check] = {}
    for name in CONTAINER_ENGINES:
        try:
            with closing(connect(name)) as client, engine_errors(name):
                version, info = component(client.version())["Version"], client.info()
                found[name] = Check(name, "ok", version + ", rootless" * is_rootless(info))
        except CapsuleError as error:
            found[name] = Check(name, "warning", error.message, error.fix)
    answering = any(check.status == "ok" for check in found.values())
    for check in found.values():
        if check.status != "ok" and answering:
            yield Check(check.name, "ok", "does not answer, and is not needed beside the other")
        else:
            yield check


def check_rootless(*, containers: bool) -> Iterator[Check]:
    """Check the engines that need neither a daemon nor root. One is enough."""
    from capsule.engine.apptainer import ApptainerEngine  # which are for Linux only
    from capsule.engine.bubblewrap import BubblewrapEngine

    engines: dict[str, Callable[[], Engine]] = {
        "bwrap": BubblewrapEngine,
        "apptainer": ApptainerEngine,
    }
    for name, opened in engines.items():
        try:
            facts = opened().describe()
        except CapsuleError as error:
            if containers:
                found = f"not needed beside a container engine ({error.message})"
                yield Check(name, "ok", found)
            else:
                yield Check(name, "warning", error.message, error.fix)
        else:
            yield Check(name, "ok", f"{facts['version']}, seccomp: {facts['seccomp']}")


def check_c_library(*, containers: bool) -> Check:
    """Check that the locked interpreter and wheels run on this machine's C library."""
    name, version = platform.libc_ver()
    found = f"{name or 'unknown'} {version}".strip()
    if name == "glibc" and tuple(map(int, version.split("."))) >= DEBIAN_12.glibc:
        return Check("C library", "ok", f"{found}, for --engine process")
    needed = ".".join(map(str, DEBIAN_12.glibc))
    status: Status = "warning" if containers else "problem"
    fix = "Use a container engine, or --engine bwrap."
    return Check("C library", status, f"{found}; --engine process needs glibc {needed}", fix)


def check_processor() -> Check:
    """Check that the processor has what the portable numerics profiles need."""
    cpu = read_cpu()
    name = cpu.name or "an unknown processor"
    missing = sorted(NEEDED_FLAGS["portable-v3"] - set(cpu.flags))
    if not missing:
        cores = cpu.usable_cores
        number = "an unknown number of cores" if cores is None else counted(cores, "usable core")
        return Check("processor", "ok", f"{name}, {number}")
    fix = "Use a processor with AVX2 and FMA, or accelerator.numerics: native."
    return Check("processor", "problem", f"{name} lacks {', '.join(missing)}", fix)


def check_gpus() -> Iterator[Check]:
    """Check NVIDIA's driver and GPUs, and that an engine can give the visible ones to a run."""
    nvml = load_nvml()
    driver, gpus = read_gpus(nvml)
    if not gpus:
        found = f"none (NVML: {driver.nvml}); only CUDA specs need one"
        if driver.nvml in (NOT_FOUND, LOADED):
            yield Check("GPU", "ok", found)
        else:
            fix = "If it has a GPU, see 'nvidia-smi'; restart after an update of the driver."
            yield Check("GPU", "warning", found, fix)
        return
    try:
        devices = visible_devices(read_devices(nvml), os.environ)
    except CapsuleError as error:
        yield Check("GPU", "warning", error.message, error.fix)
        return
    if devices:
        named = ", ".join(f"{each.name} ({each.compute_capability})" for each in devices)
        yield _given(f"{named}; driver {driver.version}", devices)
    else:
        found = f"none of {len(gpus)} can be given to runs; driver {driver.version}"
        yield Check("GPU", "warning", found, f"Change {VISIBLE}, or see 'nvidia-smi -L'.")
    for gpu in gpus:
        if gpu.name is None:
            found = f"does not answer ({', '.join(gpu.unavailable.values())})"
            yield Check(f"GPU {gpu.index}", "warning", found, "See 'nvidia-smi' and 'dmesg'.")
        elif gpu.faults:
            yield Check(f"GPU {gpu.index}", "warning", "; ".join(gpu.faults), _RESET)


def _given(found: str, devices: Sequence[Device]) -> Check:
    """Check that an engine can give the first of some devices to a run."""
    failures = []
    for name, client in answering_engines():
        try:
            with closing(client), engine_errors(name):
                gpu_request(client.version(), client.info(), devices[:1])
            return Check("GPU", "ok", f"{found}; {name} gives it to runs")
        except CapsuleError as error:
            failures.append(error)
    if failures:
        return Check("GPU", "warning", f"{found}; {failures[0].message}", failures[0].fix)
    return _given_without_containers(found)


def _given_without_containers(found: str) -> Check:
    """Check that a GPU can be given to a run on a machine without Docker and Podman."""
    from capsule.engine.apptainer import ApptainerEngine  # for Linux only

    try:
        require_driver()
    except CapsuleError as error:
        return Check("GPU", "warning", f"{found}; {error.message}", error.fix)
    engines = ["process"]
    with suppress(CapsuleError):
        engines.append(ApptainerEngine().name)
    named = " and ".join(f"--engine {name}" for name in engines)
    return Check(
        "GPU", "ok", f"{found}; {named} {agreeing(len(engines), 'gives', 'give')} it to runs"
    )


def check_disks() -> Iterator[Check]:
    """Check the free space where files are written, each disk once."""
    places = {"cache": Cache().root, "temporary files": Path(tempfile.gettempdir()), "runs": Path()}
    disks: dict[int, tuple[Path, list[str]]] = {}
    for name, path in places.items():
        place = existing_folder(path)
        _, names = disks.setdefault(place.stat().st_dev, (place, []))
        names.append(f"{name} ({place})")
    for place, names in disks.values():
        free = free_bytes(place)
        status: Status = (
            "ok" if free >= _LITTLE_DISK else "warning" if free >= _NO_DISK else "problem"
        )
        fix = None if status == "ok" else "Free some space; 'capsule prune' helps."
        yield Check("disk", status, f"{free / (1 << 30):.1f} GiB free for {', '.join(names)}", fix)


def check_cache() -> Check:
    """Check that the cache can be written, and that no other user can."""
    root = Cache().root
    if not root.exists():
        place = existing_folder(root)
        if os.access(place, os.W_OK):
            return Check("cache", "ok", f"{root} will be made")
        fix = "Set CAPSULE_CACHE to a folder that you may write to."
        return Check("cache", "problem", f"{root} cannot be made in {place}", fix)
    reject_shared(root)
    if not os.access(root, os.W_OK):
        fix = "Set CAPSULE_CACHE to a folder that you may write to."
        return Check("cache", "problem", f"{root} cannot be written", fix)
    try:
        Cache().require_programs()
    except CapsuleError as error:  # a container engine works all the same
        return Check("cache", "warning", error.message, error.fix)
    return Check("cache", "ok", str(root))


def check_temporary() -> Check:
    """Check that the folder that TMPDIR names exists: Python takes another without a word."""
    wanted, used = os.environ.get("TMPDIR"), tempfile.gettempdir()
    if wanted and Path(wanted).absolute() != Path(used).absolute():
        found = f"TMPDIR is {wanted}, which cannot be used; {used} is used instead"
        return Check(
            "temporary files", "warning", found, "Run 'capsule doctor --fix', or unset TMPDIR."
        )
    return Check("temporary files", "ok", used)


def check_index() -> Check:
    """Ask the Python package indexes for what every image has."""
    try:
        with temporary_folder("capsule-doctor-") as folder:
            sources = machine_sources(SourcesSpec())
            # The temporary cache has no stored index that could answer in place of the real ones.
            search = WheelSearch(DEBIAN_12, sources, Cache(folder), lambda _: None)
            packages = load_recipe("cpu", DEBIAN_12.name).packages
            found = compile_wheels(search, packages, ["--no-deps"])
    except CapsuleError as error:
        return Check("package index", "warning", f"{error.code}: {error.message}", error.fix)
    named = ", ".join(f"{wheel.name} {wheel.version}" for wheel in found)
    return Check("package index", "ok", f"answers: {named}")


def check_mirror() -> Check:
    """Fetch the smallest package of the base from a Debian mirror, as a build does."""
    package = min(shipped_base(DEBIAN_12).packages, key=lambda each: each.size)
    try:
        with temporary_folder("capsule-doctor-") as folder:
            fetch_debian(DEBIAN_12.vendor, [package], Cache(folder), SourcesSpec(), lambda _: None)
    except CapsuleError as error:
        return Check("Debian mirror", "warning", f"{error.code}: {error.message}", error.fix)
    return Check("Debian mirror", "ok", f"has {package.name} {package.version}")


def check_programs() -> Iterator[Check]:
    """Check for programs that only some commands need."""
    for name, purpose in _PROGRAMS.items():
        place = shutil.which(name)
        if place is None:
            fix = f"Install {name} if you need it."
            yield Check(name, "warning", f"not found; needed {purpose}", fix)
        else:
            yield Check(name, "ok", place)


def private_keys(named: Iterable[Path]) -> list[Path]:
    """Return the private keys that are named, and those in the current folder."""
    here = (path.with_suffix("") for path in sorted(Path().glob("*.pub")))
    return list(dict.fromkeys([*named, *(path for path in here if _is_private_key(path))]))


def check_key(path: Path) -> Check:
    """Check that no other user can read a private key, and that its public key is beside it."""
    name, public = f"key {path}", Path(f"{path}.pub")
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        fingerprint = load_public(public).fingerprint
    except OSError as error:
        fix = "Name an existing key, or make one with 'capsule keygen'."
        return Check(name, "problem", error.strerror or str(error), fix)
    except CapsuleError as error:
        return Check(name, "warning", error.message, f"Restore {public} from the private key.")
    if HAVE_OWNERS and mode & _HIDDEN:
        found = f"other users may read it (mode {mode:04o})"
        return Check(name, "problem", found, f"Run 'capsule doctor --fix', or: chmod 600 {path}")
    return Check(name, "ok", fingerprint)


def numerics_check(test: SelfTest) -> Check:
    """Return the result of a self-test of numerics as a check."""
    libraries = ", ".join(f"{name} {version}" for name, version in test.libraries.items())
    if test.status == "as expected":
        found = f"{test.answers} of {counted(test.answers, 'answer')} as expected; {libraries}"
        return Check(test.profile, "ok", found)
    if test.status == "differs":
        named = ", ".join(test.different[:5]) + ", ..." * (len(test.different) > 5)
        wrong = f"{len(test.different)} of {counted(test.answers, 'answer')}"
        differ = agreeing(len(test.different), "differs", "differ")
        found = f"{wrong} {differ}: {named}; {libraries}"
        fix = "Do not trust results of this machine under this profile; report the processor."
        return Check(test.profile, "problem", found, fix)
    if test.status == "unchecked":
        found = f"no answers are known for {libraries}"
        return Check(test.profile, "unchecked", found, "Install the versions that images have.")
    return Check(test.profile, "problem", f"the test did not run: {test.reason}")


def gpu_check(test: GpuSelfTest | str) -> Check:
    """Return the result of a GPU's self-test as a check."""
    if isinstance(test, str):
        fix = "Use another GPU, or another build of torch; check 'nvidia-smi -q'."
        return Check("GPU numerics", "problem", test, fix)
    libraries = ", ".join(f"{name} {version}" for name, version in test.libraries.items())
    found = f"{test.gpu} ({test.compute_capability}) computes {test.found}; {libraries}"
    return Check("GPU numerics", "ok", found)


def no_torch() -> Check:
    """Return the check of numerics where this Python cannot test them."""
    found = "this Python has no torch; every run tests its profile when it starts"
    return Check(
        "numerics", "unchecked", found, "Run: pip install 'capsule-rl[train]' to test it here."
    )


def repair(keys: Sequence[Path]) -> Iterator[str]:
    """Do what needs no decision, and yield what was done.

    Folders that are missing are made, and private keys of this user are closed to others.
    """
    with suppress(CapsuleError):  # without a home directory; the checks say so
        yield from _made(Cache().root, 0o755)
    wanted = os.environ.get("TMPDIR")
    for made in _made(Path(wanted), 0o700) if wanted else ():
        yield made
        # Python chose another folder while this one was missing, and keeps the choice.
        tempfile.tempdir = None
    for path in private_keys(keys) if HAVE_OWNERS else ():
        if not _is_private_key(path):
            continue
        facts = path.stat()
        # A file of another user is left to its owner, even by root.
        if facts.st_uid == os.geteuid() and facts.st_mode & _HIDDEN:
            path.chmod(0o600)
            yield f"removed other users' access to {path} (mode 0600)"


def _made(folder: Path, mode: int) -> Iterator[str]:
    """Make a folder that is missing, and say so; if it cannot be made, the checks say why."""
    try:
        folder.mkdir(mode=mode, parents=True)
    except OSError:
        return
    yield f"made the folder {folder}"


def _is_private_key(path: Path) -> bool:
    """Tell a private key that ``capsule keygen`` wrote from other files; links do not count."""
    try:
        # A change of the mode would follow the link.
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as stream:
            return stream.readline(64).strip() in _PRIVATE
    except PermissionError:  # the key of another user
        return False
