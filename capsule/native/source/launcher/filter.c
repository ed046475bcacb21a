#define _GNU_SOURCE
#include "filter.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../shared/entropy.h"

#define X32_BIT 0x40000000
#define SIGN_BIT 0x80000000 /* no system call has this number: syscall(-1) is an error */
#define ARCH_SET_FS 0x1002
#define MAP_TYPE_BITS 0x0f
/* Since Linux 6.11. It is a type of mapping and not a flag, so other bits are masked out. */
#define MAP_DROPPABLE 0x08

#define LOAD(offset) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (offset))
#define LOAD_ARGUMENT(n) LOAD(offsetof(struct seccomp_data, args[n])) /* its low half */
#define LOAD_ARGUMENT_HIGH(n) LOAD(offsetof(struct seccomp_data, args[n]) + 4)
#define AND(mask) BPF_STMT(BPF_ALU | BPF_AND | BPF_K, (mask))
#define IF_EQUAL(value, then, otherwise)                                                           \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), (then), (otherwise))
#define IF_ANY_BIT(mask, then, otherwise)                                                          \
    BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, (mask), (then), (otherwise))
#define NOTIFY BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF)
#define ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

/* Each block either returns or continues with the number of the system call still loaded. */
#define WHEN_CALLED(number, size) IF_EQUAL((number), 0, (size))
#define NOTIFY_WHEN_CALLED(number) WHEN_CALLED(number, 1), NOTIFY

/* A random device is opened for reading and is not a directory. This condition excludes many other
 * opens. */
#define NOTIFY_WHEN_OPENED(number, flags_argument)                                                 \
    WHEN_CALLED(number, 6), LOAD_ARGUMENT(flags_argument), IF_ANY_BIT(O_DIRECTORY | O_PATH, 2, 0), \
        AND(O_ACCMODE), IF_EQUAL(O_WRONLY, 0, 1), ALLOW, NOTIFY

static const struct sock_filter program[] = {
    /* The numbers below are those of x86-64. Another ABI is reported and not supported. */
    LOAD(offsetof(struct seccomp_data, arch)),
    IF_EQUAL(AUDIT_ARCH_X86_64, 1, 0),
    NOTIFY,
    LOAD(offsetof(struct seccomp_data, nr)),
    IF_ANY_BIT(SIGN_BIT, 2, 0),
    IF_ANY_BIT(X32_BIT, 0, 1),
    NOTIFY,

    NOTIFY_WHEN_OPENED(SYS_openat, 2),
    NOTIFY_WHEN_OPENED(SYS_open, 1),
    NOTIFY_WHEN_CALLED(SYS_openat2),

    /* The C library would generate random bytes in this memory without a system call. Old kernels
     * reject it, too. glibc repeats the request each time, so no notification is made. */
    WHEN_CALLED(SYS_mmap, 5),
    LOAD_ARGUMENT(3),
    AND(MAP_TYPE_BITS),
    IF_EQUAL(MAP_DROPPABLE, 0, 1),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
    ALLOW,

    /* The interposer's own calls are recognised by an argument that the kernel does not read. */
    WHEN_CALLED(SYS_getrandom, 6),
    LOAD_ARGUMENT(3),
    IF_EQUAL(CAPSULE_OWN_CALL & 0xffffffff, 0, 3),
    LOAD_ARGUMENT_HIGH(3),
    IF_EQUAL(CAPSULE_OWN_CALL >> 32, 0, 1),
    ALLOW,
    NOTIFY,

    NOTIFY_WHEN_CALLED(SYS_clone),
    NOTIFY_WHEN_CALLED(SYS_clone3),
    NOTIFY_WHEN_CALLED(SYS_fork),
    NOTIFY_WHEN_CALLED(SYS_vfork),
    NOTIFY_WHEN_CALLED(SYS_execve),
    NOTIFY_WHEN_CALLED(SYS_execveat),
    NOTIFY_WHEN_CALLED(SYS_exit),
    NOTIFY_WHEN_CALLED(SYS_exit_group),
    NOTIFY_WHEN_CALLED(SYS_wait4),
    NOTIFY_WHEN_CALLED(SYS_waitid),

    /* Once in the start-up of nearly every program, before anything reads AT_RANDOM. */
    WHEN_CALLED(SYS_arch_prctl, 3),
    LOAD_ARGUMENT(0),
    IF_EQUAL(ARCH_SET_FS, 0, 1),
    NOTIFY,
    ALLOW,
};

int filter_install(void) {
    const struct sock_fprog code = {sizeof program / sizeof *program,
                                    (struct sock_filter *)program};
    /* Once the supervisor has a notification, only a fatal signal withdraws it (Linux 5.19). */
    unsigned killable = SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    long descriptor = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, killable, &code);
    if (descriptor < 0 && errno == EINVAL)
        descriptor =
            syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &code);
    return (int)descriptor;
}
