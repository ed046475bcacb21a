"""Confines the process that it is executed in, and then executes a program in its place.

It is for engines that do not offer all of this confinement themselves. The Python of an image
executes this file there, by its text, so it imports nothing but the standard library.
"""

from __future__ import annotations

import base64
import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
import sys
from pathlib import Path

_PR_SET_SECCOMP, _FILTER = 22, 2  # <linux/prctl.h>, <linux/seccomp.h>
_SIOCGIFFLAGS, _IFF_UP, _IFREQ = 0x8913, 1, "16sH22x"  # netdevice(7)
_INSTRUCTION_BYTES = 8  # of struct sock_filter
_CANNOT = 125  # the status of programs that could not execute another


class _Program(ctypes.Structure):
    """``struct sock_fprog`` of <linux/filter.h>."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def confine_and_execute(arguments: str) -> None:
    """Set limits, close descriptors, filter system calls, read all of that back, and execute.

    Args:
        arguments: A JSON object with ``command``, ``variables``, ``limits`` (names of Python's
            ``RLIMIT_…`` in lower case, and values), ``filter`` (``struct sock_filter`` records in
            Base64; the empty string for none).

    Raises:
        RuntimeError: The process is confined less than is asked for.
        OSError: The kernel refuses the filter, or there is no such program.
    """
    asked = json.loads(arguments)
    for name, limit in asked["limits"].items():
        _limit(getattr(resource, f"RLIMIT_{name.upper()}"), limit)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    filtered = base64.b64decode(asked["filter"])
    if filtered:
        _filter(filtered)
    _check(filtered=bool(filtered))
    command = asked["command"]
    os.execve(command[0], command, asked["variables"])  # noqa: S606


def _limit(number: int, limit: int) -> None:
    _, hard = resource.getrlimit(number)
    value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(number, (value, value))


def _filter(instructions: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(instructions) // _INSTRUCTION_BYTES, instructions)
    # Without privileges the kernel accepts this only after no_new_privs (prctl(2)), which the
    # engine has set and _check() reads back.
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"the seccomp profile: {os.strerror(error)}")


def _check(*, filtered: bool) -> None:
    """Read back that there are no capabilities, none can be gained, and nothing can be reached."""
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    networks = _networks()
    for wrong, what in (
        (int(status["CapEff"], 16) or int(status["CapBnd"], 16), "it has capabilities"),
        (status["NoNewPrivs"] != "1", "it may gain privileges"),
        (filtered and status["Seccomp"] != "2", "its system calls are not filtered"),
        (networks, f"it has the networks {', '.join(networks)}"),
        (os.getpid() != 1, "it is not the first process of its namespace"),
    ):
        if wrong:
            raise RuntimeError(f"the program was not started, because {what}")


def _networks() -> list[str]:
    """Return the network interfaces that are up, but for the loopback interface.

    Some kernels make fallback interfaces of tunnels in every namespace (``tunl0``, ``sit0``). They
    are down, and nothing without a capability can change that.
    """
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    names = {line.split(":")[0].strip() for line in lines}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return [name for name in sorted(names - {"lo"}) if _is_up(any_socket, name)]


def _is_up(any_socket: socket.socket, name: str) -> bool:
    answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack(_IFREQ, name.encode(), 0))
    return bool(struct.unpack(_IFREQ, answer)[1] & _IFF_UP)


if __name__ == "__main__":
    try:
        confine_and_execute(sys.argv[1])
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"capsule: {error}\n")
        sys.exit(_CANNOT)
