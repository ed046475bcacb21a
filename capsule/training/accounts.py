"""The mechanisms that a run used: its surroundings, its Python processes, its trainer.

Each Python process of a run appends lines to ``interpreters.jsonl``
(:mod:`capsule.training.determinism.child_processes`), which this module counts. A user program can
write to this file, as to all others in the run directory, so its account cannot be trusted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from capsule.experiment import contract
from capsule.experiment.fields import Model
from capsule.experiment.files import open_regular
from capsule.experiment.mechanisms import (
    Interpreters,
    Mechanisms,
    Reach,
    Surroundings,
    TorchProcesses,
    TrainerUse,
)
from capsule.experiment.mounts import file_system_of, is_mounted_read_only
from capsule.training.determinism.child_processes import (
    note_start,
    note_torch,
    watch_compilers,
)
from capsule.training.state.run_directory import write_document

# A user program can write to the file, so only a bounded part of it is read.
MAX_ACCOUNT_BYTES = 64 << 20
# The digit excludes nvidiactl and nvidia-uvm, which are not GPUs. dxg belongs to WSL 2, and kfd to
# AMD's driver.
_GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd", "dri/renderD*")
_UP, _REJECTED = 0x0001, 0x0200  # RTF_UP, RTF_REJECT of linux/route.h
_MULTICAST = "ff"  # the first byte of an IPv6 multicast address


class _Line(Model):
    """A record of one process: of its start, of torch's flags, or of a compiler it imported."""

    hash_seed: str | None = None
    restarted: bool = False
    watched: bool = True
    torch: dict[str, str] | None = None
    compiler: str | None = None


@contextmanager
def accounted(directory: Path, flags: Mapping[str, str]) -> Iterator[None]:
    """Let this process, and every Python process that it starts, write to the account of the run.

    Args:
        directory: The run directory.
        flags: The flags that this process has read back.
    """
    before = os.environ.get(contract.RUN_VARIABLE)
    os.environ[contract.RUN_VARIABLE] = str(directory.absolute())
    try:
        # This interpreter was started without the variable, so its start was not recorded.
        note_start()
        note_torch({name: value for name, value in flags.items() if name.startswith("torch.")})
        watch_compilers()
        yield
    finally:
        del os.environ[contract.RUN_VARIABLE]
        if before is not None:
            os.environ[contract.RUN_VARIABLE] = before


def record_mechanisms(
    directory: Path, trainer: TrainerUse | None, *, process: int | None = None
) -> None:
    """Write the mechanisms that a run used, at its end.

    Args:
        directory: The run directory.
        trainer: The report of the trainer; None for a user program.
        process: Process id of the user program.

    Raises:
        CapsuleError: CAP-T131, the file cannot be written.
    """
    mechanisms = Mechanisms(
        surroundings=surroundings(directory),
        interpreters=interpreters(directory),
        trainer=trainer,
        process=process,
    )
    write_document(directory / contract.MECHANISMS, mechanisms)


def surroundings(directory: Path) -> Surroundings:
    """Return paths, libraries, routes and devices as this process sees them."""
    devices = Path("/dev")
    file_systems = {
        "run directory": file_system_of(directory.resolve()),
        "temporary files": file_system_of(Path("/tmp").resolve()),  # noqa: S108 - it is only looked at
    }
    return Surroundings(
        fixed_paths=str(directory.absolute()) == contract.RUN_FOLDER,
        c_library=os.confstr("CS_GNU_LIBC_VERSION") or "unknown",
        interfaces=interfaces([*_routes_4(), *_routes_6()]),
        file_systems={name: kind for name, kind in file_systems.items() if kind is not None},
        gpus=tuple(sorted(str(path) for name in _GPU_DEVICES for path in devices.glob(name))),
        data=_data_access(),
    )


def _data_access() -> Literal["read-only", "writable"] | None:
    """Return "read-only" if every mount of data sets is; None if the run has no data sets."""
    folder = os.environ.get(contract.DATA_VARIABLE)
    if folder is None:
        return None
    return "read-only" if is_mounted_read_only(Path(folder)) else "writable"


def interfaces(routes: Iterable[tuple[str, int]]) -> dict[str, Reach]:
    """Return the reach of each interface by its routes, without the loopback interface.

    Args:
        routes: Interface and length of the network prefix of each route; 0 for a default route.
    """
    found: dict[str, Reach] = {}
    for interface, prefix in routes:
        # An interface keeps its widest reach, whatever routes follow.
        if interface != "lo" and found.get(interface) != "everywhere":
            found[interface] = "neighbours" if prefix else "everywhere"
    return found


def interpreters(directory: Path) -> Interpreters | None:
    """Count the records of the run's Python processes; None if the file is not such an account."""
    try:
        with open_regular(directory / contract.INTERPRETERS, follow=False) as stream:
            data = stream.read(MAX_ACCOUNT_BYTES + 1)
        if len(data) > MAX_ACCOUNT_BYTES:
            return None
        lines = [_Line.model_validate_json(line) for line in data.splitlines()]
    except FileNotFoundError:
        lines = []  # no Python process was started, which the launcher's report can confirm
    except (OSError, ValidationError):
        return None
    torch = Counter(tuple(sorted(line.torch.items())) for line in lines if line.torch is not None)
    return Interpreters(
        hash_seeds=Counter(line.hash_seed for line in lines if line.hash_seed is not None),
        restarted=sum(line.restarted for line in lines),
        unwatched=sum(not line.watched for line in lines),
        torch=tuple(
            TorchProcesses(processes=count, flags=dict(flags))
            for flags, count in sorted(torch.items())
        ),
        compilers=", ".join(sorted({line.compiler for line in lines if line.compiler})) or None,
    )


def _routes_4() -> Iterator[tuple[str, int]]:
    for line in _lines("/proc/net/route")[1:]:
        interface, _, _, flags, *_, mask, _, _, _ = line.split()
        if _usable(flags):
            # The kernel prints the mask in the machine's byte order, which does not affect the
            # number of bits.
            yield interface, int(mask, 16).bit_count()


def _routes_6() -> Iterator[tuple[str, int]]:
    for line in _lines("/proc/net/ipv6_route"):
        destination, prefix, *_, flags, interface = line.split()
        # Every interface that is up has a route for multicast, which does not show its reach.
        if _usable(flags) and not destination.startswith(_MULTICAST):
            yield interface, int(prefix, 16)


def _usable(flags: str) -> bool:
    return int(flags, 16) & (_UP | _REJECTED) == _UP


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except FileNotFoundError:  # a kernel without this protocol
        return []
