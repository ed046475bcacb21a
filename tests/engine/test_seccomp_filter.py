"""The compiled seccomp profile, executed by the rules of the kernel for classic BPF."""

import ctypes
import errno
import struct

import pytest

from capsule.engine.seccomp_filter import compiled_profile

# seccomp(2), linux/audit.h and linux/seccomp.h.
X86_64, I386 = 0xC000003E, 0x40000003
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, (0x00000000, 0x80000000)
# arch/x86/entry/syscalls/syscall_64.tbl.
READ, SOCKET, CLONE, EXECVE, PERSONALITY, EXIT_GROUP = 0, 41, 56, 59, 135, 231
CHROOT, MOUNT, KEYCTL, UNSHARE, SETNS, BPF = 161, 165, 250, 272, 308, 321
IO_URING_SETUP, CLONE3 = 425, 435
X32 = 0x40000000  # added to numbers of the x32 ABI

CLONE_THREAD = 0x3D0F00  # the flags of glibc's pthread_create()
NAMESPACES = {
    "mount": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}


@pytest.fixture(scope="module")
def program():
    compiled = compiled_profile()
    if compiled is None:
        pytest.skip("libseccomp.so.2 is not installed")
    return compiled


def answer(program, call, *arguments, architecture=X86_64):
    """Execute a filter on ``struct seccomp_data`` as linux/filter.h defines its instructions."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", call, architecture, 0, *padded)
    instructions = list(struct.iter_unpack("<HBBI", program))
    place, accumulator = 0, 0
    while True:
        code, if_true, if_false, k = instructions[place]
        place += 1
        if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == 0x54:  # BPF_ALU | BPF_AND | BPF_K
            accumulator &= k
        elif code == 0x05:  # BPF_JMP | BPF_JA
            place += k
        elif code == 0x06:  # BPF_RET | BPF_K
            return k
        else:
            compare = {
                0x15: accumulator == k,  # BPF_JEQ
                0x25: accumulator > k,  # BPF_JGT
                0x35: accumulator >= k,  # BPF_JGE
                0x45: accumulator & k != 0,  # BPF_JSET
            }
            place += if_true if compare[code] else if_false


@pytest.mark.parametrize("call", [READ, EXECVE, EXIT_GROUP])
def test_what_programs_use_is_allowed(program, call):
    assert answer(program, call, 2**64 - 1, 2**64 - 1) == ALLOW


@pytest.mark.parametrize("call", [CHROOT, MOUNT, KEYCTL, UNSHARE, SETNS, BPF, IO_URING_SETUP])
def test_what_needs_privileges_is_forbidden(program, call):
    assert answer(program, call) == ERRNO | errno.EPERM


def test_system_calls_of_later_kernels_are_forbidden(program):
    assert answer(program, 100_000) == ERRNO | errno.EPERM


def test_threads_are_allowed_and_new_namespaces_are_not(program):
    assert answer(program, CLONE, CLONE_THREAD) == ALLOW
    for name, flag in NAMESPACES.items():
        assert answer(program, CLONE, CLONE_THREAD | flag) == ERRNO | errno.EPERM, name


def test_libraries_fall_back_from_clone3(program):
    assert answer(program, CLONE3) == ERRNO | errno.ENOSYS


@pytest.mark.parametrize(
    ("family", "allowed"), [(1, True), (2, True), (10, True), (17, False), (38, False)]
)
def test_sockets_of_three_families_are_allowed(program, family, allowed):
    assert (answer(program, SOCKET, family) == ALLOW) is allowed


def test_of_the_kernels_own_sockets_only_the_one_that_lists_interfaces_is_allowed(program):
    netlink, raw = 16, 3
    allowed = [kind for kind in range(32) if answer(program, SOCKET, netlink, raw, kind) == ALLOW]
    assert allowed == [0]  # NETLINK_ROUTE


@pytest.mark.parametrize("persona", [0, 8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF])
def test_the_personalities_of_the_profile_are_allowed(program, persona):
    assert answer(program, PERSONALITY, persona) == ALLOW


@pytest.mark.parametrize("persona", [1, 0x40008, 0x400000, 0x0440000, 1 << 32, 0x40000 | 1 << 63])
def test_other_personalities_are_forbidden_by_all_64_bits(program, persona):
    assert answer(program, PERSONALITY, persona) == ERRNO | errno.EPERM


@pytest.mark.parametrize("call", [READ, MOUNT])
def test_another_architecture_is_not_filtered_by_its_numbers(program, call):
    assert answer(program, call, architecture=I386) in KILL
    assert answer(program, X32 | call) != ALLOW


def test_equal_profiles_give_equal_programs(program):
    assert compiled_profile() == program
    assert len(program) % 8 == 0  # struct sock_filter
    assert len(program) // 8 <= 4096  # BPF_MAXINSNS


def test_there_is_no_program_without_the_library(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert compiled_profile() is None
