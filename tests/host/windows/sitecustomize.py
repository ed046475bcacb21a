"""Makes an interpreter look like one of Windows to Capsule: what only POSIX has is missing.

Python executes this module at its start where ``PYTHONPATH`` names the folder. Paths, the standard
library and other packages stay those of Linux, so all of these that choose by the platform are
loaded before. ``tests/end_to_end/test_windows.py`` has a true Python for Windows.
"""

import ctypes
import fcntl
import importlib
import os
import platform
import shutil
import stat
import sys
import sysconfig
import tempfile
import types

for loaded in (
    *("asyncio", "ctypes.wintypes", "subprocess", "urllib.request", "zoneinfo"),
    *("cryptography.hazmat.primitives.serialization", "cyclonedx.validation.json", "jinja2"),
    *("jsonschema", "PIL.Image", "pydantic", "requests", "rich.console", "rich.progress"),
    *("rich.table", "ruamel.yaml", "typer.testing", "xxhash", "zstandard"),
):
    importlib.import_module(loaded)
sysconfig.get_config_vars()
tempfile._O_TMPFILE_WORKS = False
shutil._use_fd_functions = shutil._USE_CP_SENDFILE = False

ONLY_POSIX = (
    "chown fchmod fchown fork forkpty geteuid getegid getgid getgroups getpgid getpriority getsid "
    "getuid killpg lchown lockf memfd_create mkfifo mknod nice pathconf pipe2 posix_fadvise "
    "posix_fallocate posix_spawn pread preadv pwrite pwritev readv register_at_fork "
    "sched_getaffinity sched_setaffinity sched_yield sendfile setsid setuid statvfs sysconf uname "
    "wait3 wait4 writev"
)
for name in (*ONLY_POSIX.split(), *(each for each in dir(os) if each.startswith("O_"))):
    if hasattr(os, name) and name not in (
        "O_RDONLY O_WRONLY O_RDWR O_APPEND O_CREAT O_EXCL O_TRUNC"
    ):
        delattr(os, name)
os.O_BINARY = 0  # this C library translates no line ends
os.supports_dir_fd, os.supports_fd = set(), {os.truncate, os.stat}

flock, LOCK_SH, LOCK_EX, LOCK_NB = fcntl.flock, fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_NB
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"):
    sys.modules[name] = None  # so that an import fails


class Kernel:
    """The one function of kernel32.dll that is used."""

    def __init__(self, *_, **__):
        pass

    @staticmethod
    def LockFileEx(handle, flags, *_):  # noqa: N802
        kind = (LOCK_EX if flags & 2 else LOCK_SH) | (LOCK_NB if flags & 1 else 0)
        try:
            flock(handle.value, kind)
        except BlockingIOError:
            return False
        return True


ctypes.WinDLL = Kernel
ctypes.get_last_error = lambda: 33  # ERROR_LOCK_VIOLATION
sys.modules["msvcrt"] = types.SimpleNamespace(get_osfhandle=lambda descriptor: descriptor)

_open, _stat, _lstat = os.open, os.stat, os.lstat


def _refused(path):
    raise PermissionError(13, "Permission denied", str(path))


def open_file(path, flags, mode=0o777, *, dir_fd=None):
    """Open a file, and no folder."""
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    return _refused(path) if os.path.isdir(path) else _open(path, flags, mode)  # noqa: PTH112


def _facts(facts):
    """Return what Windows says of a file: no owner, and no mode but read-only."""
    mode = stat.S_IFMT(facts.st_mode) | (0o777 if stat.S_ISDIR(facts.st_mode) else 0o666)
    return os.stat_result((mode, *facts[1:4], 0, 0, *facts[6:10]))


def stat_file(path, *, dir_fd=None, follow_symlinks=True):
    """Return the facts of a file."""
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return _facts(_stat(path, follow_symlinks=follow_symlinks))


def _without_proc(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))


os.open = open_file
os.stat = stat_file
os.lstat = lambda path, *, dir_fd=None: stat_file(path, dir_fd=dir_fd, follow_symlinks=False)
os.fstat = lambda descriptor: _facts(_stat(descriptor))
sys.addaudithook(_without_proc)
platform.system, platform.machine = (lambda: "Windows"), (lambda: "AMD64")
platform.libc_ver = lambda *_, **__: ("", "")
sys.platform = "win32"
