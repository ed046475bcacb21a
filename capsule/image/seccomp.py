"""The seccomp profile of containers: what engines use by default, without address randomisation.

``seccomp.json`` is written for this project after Docker's documented default and serves Docker and
Podman. A container has no capabilities here, so what the default lets only privileged programs call
is simply left out. Left out as well are io_uring, whose requests reach the kernel without a system
call that could be watched, the 32-bit system calls, and sockets other than those of UNIX, IPv4 and
IPv6 and the one by which a program lists its network interfaces, as ``torch.distributed`` does. One
rule is added: ``personality(ADDR_NO_RANDOMIZE)``, which ``capsule-launch`` needs and which gives a
program no power over anything but its own addresses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

PROFILE = Path(__file__).with_name("seccomp.json")


def seccomp_profile() -> str:
    """Return the profile as JSON text, in the format of Docker's ``--security-opt seccomp=``."""
    return PROFILE.read_text(encoding="ascii")


def seccomp_option(engine: Literal["docker", "podman"]) -> str:
    """Return the entry of ``security_opt`` for an engine's API.

    Docker's API takes the profile itself; Podman's takes the path of a file that its service can
    read.
    """
    return f"seccomp={PROFILE if engine == 'podman' else seccomp_profile()}"
