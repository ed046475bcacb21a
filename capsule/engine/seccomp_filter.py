"""The seccomp profile of containers as a program for the kernel, compiled by libseccomp.

Container engines take the profile as JSON and compile it themselves; bubblewrap takes the result.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from typing import Any

from capsule.image.seccomp import seccomp_profile

_LIBRARY = "libseccomp.so.2"
# SCMP_ACT_ALLOW and SCMP_ACT_ERRNO(0), and values of enum scmp_compare (seccomp.h).
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_COMPARISONS = {"SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
_NO_SUCH_CALL = -1  # __NR_SCMP_ERROR: this libseccomp does not know the name


class _Comparison(ctypes.Structure):
    """``struct scmp_arg_cmp`` of seccomp.h."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def compiled_profile() -> bytes | None:
    """Return the profile as ``struct sock_filter`` records; None without libseccomp.

    A system call that this libseccomp does not know stays forbidden, as with every engine.

    Raises:
        OSError: libseccomp rejects a rule of the profile.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    # By default ctypes would cut the pointer to the 32 bits of an int.
    library.seccomp_init.restype = ctypes.c_void_p
    profile = json.loads(seccomp_profile())
    context = ctypes.c_void_p(library.seccomp_init(_ERRNO | profile["defaultErrnoRet"]))
    try:
        for rule in profile["syscalls"]:
            for name in rule["names"]:
                _add(library, context, name, rule)
        with os.fdopen(os.memfd_create("seccomp"), "rb") as stream:
            _succeed(library.seccomp_export_bpf(context, stream.fileno()), "export")
            stream.seek(0)
            return stream.read()
    finally:
        library.seccomp_release(context)


def _add(
    library: ctypes.CDLL, context: ctypes.c_void_p, name: str, rule: Mapping[str, Any]
) -> None:
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number == _NO_SUCH_CALL:
        return
    action = _ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else _ERRNO | rule["errnoRet"]
    arguments = rule.get("args", [])
    comparisons = (_Comparison * len(arguments))(
        *(
            # For MASKED_EQ, "value" is the mask and "valueTwo" what has to be left of the argument.
            _Comparison(a["index"], _COMPARISONS[a["op"]], a["value"], a.get("valueTwo", 0))
            for a in arguments
        )
    )
    added = library.seccomp_rule_add_array(
        context, ctypes.c_uint32(action), number, len(arguments), comparisons
    )
    _succeed(added, name)


def _succeed(status: int, what: str) -> None:
    if status != 0:
        raise OSError(-status, f"libseccomp rejects {what}")
