# ruff: noqa: S108, T201 -- paths inside the container; output is what this is about
"""What a stranger's program might try from inside its container: everything that should fail.

Written to ``attempts.json``: for each attempt ``refused``, or what it got hold of.
"""

import ctypes
import json
import mmap
import os
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
REFUSED = "refused"
LISTENER = "\0capsule-confinement"  # abstract: a name in a network namespace, not in a folder
SECRET = "CAPSULE_CONFINEMENT_SECRET"  # a variable of the machine's

# Of linux/arch/x86/entry/syscalls/syscall_64.tbl, with arguments that would be no error of their
# own, or would be another than EPERM or ENOSYS.
SYSTEM_CALLS = {
    "add_key": (248, b"user", b"name", b"data", 4, -3),
    "bpf": (321, 0, 0, 0),
    "chroot": (161, b"/out"),
    "clone into a user namespace": (56, 0x10000000, 0, 0, 0, 0),
    "clone3": (435, 0, 0),
    "fanotify_init": (300, 0, 0),
    "fsopen": (430, b"tmpfs", 0),
    "init_module": (175, 0, 0, b""),
    "io_uring_setup": (425, 1, 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "keyctl": (250, 0, -3, 0),
    "mount": (165, b"none", b"/tmp", b"tmpfs", 0, 0),
    "open_by_handle_at": (304, -1, 0, 0),
    "open_tree": (428, -100, b"/", 1),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "pivot_root": (155, b"/out", b"/out"),
    "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
    "quotactl": (179, 0, 0, 0, 0),
    "reboot": (169, 0, 0, 0),
    "setns": (308, 0, 0),
    "settimeofday": (164, 0, 0),
    "swapon": (167, b"/out/x", 0),
    "umount2": (166, b"/out", 0),
    "unshare": (272, 0x10000000),
    "userfaultfd": (323, 0),
}


def system_call(number, *arguments):
    def attempt():
        ctypes.set_errno(0)
        result = LIBC.syscall(number, *arguments)
        if result == 0 and number == 56:
            os._exit(0)
        if result >= 0:
            return f"returned {result}"
        error = ctypes.get_errno()
        return REFUSED if error in (1, 38) else f"reached the kernel: {os.strerror(error)}"

    return attempt


def connect(family, kind, address):
    def attempt():
        with socket.socket(family, kind) as client:
            client.settimeout(3)
            client.connect(address)
            client.send(b"x")
        return "connected"

    return attempt


def resolve():
    return str(socket.getaddrinfo("example.com", 443))


def make_socket(family, kind, protocol=0):
    def attempt():
        socket.socket(family, kind, protocol).close()
        return "made"

    return attempt


def add_interface():
    """Ask the kernel, by rtnetlink(7), for a dummy interface."""
    link = struct.pack("=BxHiII", 0, 0, 0, 0, 0)
    kind = b"dummy\0\0\0"
    info = struct.pack("=HH", 4 + len(kind), 1) + kind  # IFLA_INFO_KIND
    attribute = struct.pack("=HH", 4 + len(info), 18) + info  # IFLA_LINKINFO
    body = link + attribute
    header = struct.pack("=IHHII", 16 + len(body), 16, 0x605, 1, 0)  # RTM_NEWLINK, create
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.bind((0, 0))
        netlink.send(header + body)
        answer = netlink.recv(4096)
    code = struct.unpack_from("=i", answer, 16)[0]
    return "added" if code == 0 else os_error(-code)


def os_error(number):
    raise OSError(number, os.strerror(number))


def write(path):
    def attempt():
        with Path(path).open("ab") as stream:
            stream.write(b"x")
        return "written"

    return attempt


def read(path):
    def attempt():
        with Path(path).open("rb") as stream:
            return f"read {stream.read(64)!r}"

    return attempt


def execute_in(folder):
    def attempt():
        program = Path(folder, "program")
        program.write_bytes(b"#!/bin/sh\nexit 0\n")
        program.chmod(0o755)
        return f"ended with {subprocess.run([program]).returncode}"

    return attempt


def map_code_in(folder):
    def attempt():
        path = Path(folder, "code")
        path.write_bytes(bytes(4096))
        with path.open("rb") as stream:
            mmap.mmap(stream.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
        return "mapped"

    return attempt


def remains_writable():
    """Tell whether the root would be writable to whoever owns something there."""
    return REFUSED if os.statvfs("/").f_flag & os.ST_RDONLY else "mounted to be written"


def make_device():
    os.mknod("device", stat.S_IFCHR | 0o666, os.makedev(1, 1))
    return "made"


def link_across_mounts():
    os.link("/usr/bin/python3.11", "/out/workspace/linked")
    return "linked"


def become_root_by_a_set_user_id_program():
    code = "import os; print(os.geteuid())"
    os.setuid(0)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout


def huge_file():
    with Path("huge").open("wb") as stream:
        stream.truncate(1 << 40)
    return "made"


def see_other_processes():
    """List what is neither the container's init nor Capsule's nor ours."""
    known = (b"docker-init", b"/dev/init", b"catatonit", b"capsule", b"main.py", b"run-init")
    others = []
    for folder in Path("/proc").glob("[0-9]*"):
        line = (folder / "cmdline").read_bytes()
        if not any(name in line for name in known):
            others.append(line.decode("utf-8", "replace"))
    return str(others) if others else REFUSED


def find_secret():
    places = [Path("/proc/self/environ"), *Path("/proc").glob("[0-9]*/environ")]
    for place in places:
        try:
            data = place.read_bytes()
        except OSError:
            continue
        if SECRET.encode() in data:
            return f"found in {place}"
    return REFUSED


def raise_limits():
    import resource

    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        try:
            resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except (OSError, ValueError):
            continue
        return f"raised {limit}"
    return REFUSED


def capabilities():
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":\t")
        if name.startswith("Cap") and int(value, 16):
            return line
        if (name, value) in (("NoNewPrivs", "0"), ("Seccomp", "0")):
            return line
    return REFUSED


ATTEMPTS = {
    "network: an address": connect(socket.AF_INET, socket.SOCK_STREAM, ("1.1.1.1", 53)),
    "network: the cloud's metadata": connect(
        socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80)
    ),
    "network: a datagram": connect(socket.AF_INET, socket.SOCK_DGRAM, ("8.8.8.8", 53)),
    "network: version 6": connect(socket.AF_INET6, socket.SOCK_STREAM, ("2606:4700::1111", 53)),
    "network: a name": resolve,
    "network: the machine's own services": connect(
        socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 45871)
    ),
    "network: an abstract socket": connect(socket.AF_UNIX, socket.SOCK_STREAM, LISTENER),
    "network: the engine's socket": connect(
        socket.AF_UNIX, socket.SOCK_STREAM, "/var/run/docker.sock"
    ),
    "network: a new interface": add_interface,
    "network: raw packets": make_socket(socket.AF_PACKET, socket.SOCK_RAW, 0x300),
    "network: the hypervisor": make_socket(40, socket.SOCK_STREAM),
    "network: the kernel's tables": make_socket(socket.AF_NETLINK, socket.SOCK_RAW, 12),
    "network: the kernel's cryptography": make_socket(socket.AF_ALG, socket.SOCK_SEQPACKET),
    "write: the root": write("/probe"),
    "write: the root, as its owner": remains_writable,
    "write: a program": write("/usr/bin/python3.11"),
    "write: the accounts": write("/etc/passwd"),
    "write: the source tree": write("/project/attempts.py"),
    "write: the kernel's core pattern": write("/proc/sys/kernel/core_pattern"),
    "write: the kernel's keys": write("/proc/sysrq-trigger"),
    "write: the control groups": write("/sys/fs/cgroup/cgroup.procs"),
    "write: the modules' parameters": write("/sys/module/kernel/parameters/panic"),
    "write: own memory limit": write("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    "write: a huge file of holes": huge_file,
    "read: the machine's memory": read("/proc/kcore"),
    "read: the kernel's log": read("/dev/kmsg"),
    "read: the machine's disk": read("/dev/vda"),
    "read: the machine's secrets": read("/etc/shadow"),
    "read: the machine's environment": find_secret,
    "read: other processes": see_other_processes,
    "execute: in /tmp": execute_in("/tmp"),
    "execute: in /dev/shm": execute_in("/dev/shm"),
    "execute: code mapped from /tmp": map_code_in("/tmp"),
    "privilege: a device": make_device,
    "privilege: a hard link across mounts": link_across_mounts,
    "privilege: root": become_root_by_a_set_user_id_program,
    "privilege: limits": raise_limits,
    "privilege: capabilities, seccomp": capabilities,
    **{f"system call: {name}": system_call(*words) for name, words in SYSTEM_CALLS.items()},
}


def outcome(attempt):
    try:
        return attempt()
    except OSError as error:
        print(error, file=sys.stderr)
        return REFUSED


def main():
    outcomes = {name: outcome(attempt) for name, attempt in ATTEMPTS.items()}
    Path("huge").unlink(missing_ok=True)
    Path("attempts.json").write_text(json.dumps(outcomes, indent=1))
