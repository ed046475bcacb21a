"""Makes an interpreter look like that of macOS on ARM64 to Capsule: what only Linux has is missing.

Python executes this module at its start where ``PYTHONPATH`` names the folder. What the standard
library loads for macOS is not here, so the modules that choose by the platform are loaded before.
"""

import os
import resource
import sys
import sysconfig
import tempfile
import urllib.request  # noqa: F401 - macOS' own would be loaded
import zoneinfo  # noqa: F401 - asks sysconfig

sysconfig.get_config_vars()
tempfile._O_TMPFILE_WORKS = False  # Linux has such files; the module looked at its start

ONLY_LINUX = (
    "O_DIRECT O_PATH O_TMPFILE copy_file_range eventfd memfd_create pidfd_open posix_fadvise "
    "posix_fallocate getrandom sched_getaffinity sched_setaffinity setns splice unshare"
)
for name in ONLY_LINUX.split():
    if hasattr(os, name):  # some are younger than Python 3.11
        delattr(os, name)
del resource.prlimit

_stat = os.stat


def _is_linux(path):
    return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc", "/sys/"))


def _without_proc(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and _is_linux(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))


def _stat_without_proc(path, *arguments, **options):
    if _is_linux(path):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return _stat(path, *arguments, **options)


sys.addaudithook(_without_proc)
os.stat = _stat_without_proc
os.uname = lambda: os.uname_result(("Darwin", "mac", "24.0.0", "Darwin Kernel", "arm64"))
sys.platform = "darwin"
