#define _GNU_SOURCE
#include "supervisor.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "account.h"
#include "channel.h"
#include "ending.h"
#include "events.h"
#include "proc.h"
#include "program.h"
#include "tasks.h"

#define X32_BIT 0x40000000
#define LONGEST_ANSWER 33554431 /* bytes; what getrandom(2) promises at most */
#define CHUNK 4096              /* one slot of a pipe */

static const struct options *options;
static int listener;
static size_t notification_size, response_size; /* of this header or the running kernel */

static void *allocate(size_t size) {
    void *memory = calloc(1, size + 1);
    if (memory == NULL) fail("CAP-R110", "the supervisor is out of memory");
    return memory;
}

/* ---- answering ---- */

/* A launcher that is stopped and continued may be interrupted. */
static int control(unsigned long request, void *argument) {
    int result;
    do result = ioctl(listener, (int)request, argument);
    while (result < 0 && errno == EINTR);
    return result;
}

/* Send an answer; false when the caller was killed, or (before Linux 5.19) was interrupted and will
 * repeat the call. */
static bool respond(uint64_t id, int64_t value, int error, uint32_t flags) {
    struct seccomp_notif_resp *response = allocate(response_size);
    *response = (struct seccomp_notif_resp){id, value, error, flags};
    int failed = control(SECCOMP_IOCTL_NOTIF_SEND, response);
    free(response);
    if (failed && errno != ENOENT)
        fail("CAP-R104", "this kernel does not accept the supervisor's answers: %s",
             strerror(errno));
    return !failed;
}

static bool let_through(uint64_t id) { return respond(id, 0, 0, SECCOMP_USER_NOTIF_FLAG_CONTINUE); }

/* Whether the caller still waits. Otherwise its id may be that of another task. */
static bool still_waits(uint64_t id) { return control(SECCOMP_IOCTL_NOTIF_ID_VALID, &id) == 0; }

/* Open the caller's memory; -1 when the caller was killed. */
static int open_memory(const struct seccomp_notif *call, int mode) {
    int memory = proc_open_memory((pid_t)call->pid, mode);
    int error = errno;
    if (memory >= 0 && still_waits(call->id)) return memory;
    if (memory >= 0) close(memory);
    else if (still_waits(call->id)) {
        char *executable = proc_executable((pid_t)call->pid);
        fail("CAP-R108", "the memory of %s cannot be accessed: %s",
             executable ? executable : "a process", strerror(error));
    }
    return -1;
}

/* ---- getrandom ---- */

/* glibc's malloc (once for a program) and its temporary names make this call without a function
 * that a library could replace. */
static bool is_inside_libc(const struct task *caller, size_t size, unsigned flags) {
    return caller->program->preloaded && size == 8 && flags == GRND_NONBLOCK;
}

static bool flags_are_valid(unsigned flags) {
    bool both = flags & GRND_RANDOM && flags & GRND_INSECURE;
    return !both && !(flags & ~(GRND_NONBLOCK | GRND_RANDOM | GRND_INSECURE));
}

/* Write to the caller's buffer and respond; false when the caller did not get the bytes. */
static bool deliver(const struct seccomp_notif *call, const uint8_t *bytes, size_t size) {
    int memory = open_memory(call, O_WRONLY);
    if (memory < 0) return false;
    ssize_t written = pwrite(memory, bytes, size, (off_t)call->data.args[0]);
    close(memory);
    if (written == (ssize_t)size) return respond(call->id, written, 0, 0);
    respond(call->id, 0, -EFAULT, 0);
    return false;
}

static void answer_getrandom(const struct seccomp_notif *call, struct task *caller) {
    size_t size = call->data.args[1] < LONGEST_ANSWER ? call->data.args[1] : LONGEST_ANSWER;
    unsigned flags = (unsigned)call->data.args[2];
    if (size == 0 || !flags_are_valid(flags)) {
        respond(call->id, 0, size == 0 ? 0 : -EINVAL, 0);
        return;
    }
    if (!caller->kernel.open)
        channel_open(&caller->kernel, CHANNEL_CALLS, caller->process, caller->thread, "kernel");
    struct channel before = caller->kernel;
    uint8_t *bytes = allocate(size);
    if (!channel_read(&caller->kernel, bytes, size)) {
        free(bytes); /* the caller waits for an answer until the run is ended */
        return;
    }
    if (deliver(call, bytes, size)) {
        struct tally *tally = is_inside_libc(caller, size, flags) ? &caller->program->inside_libc
                                                                  : &caller->program->getrandom;
        channel_used(&caller->kernel, bytes, size);
        tally->calls++;
        tally->bytes += size;
    } else {
        caller->kernel = before;
    }
    free(bytes);
}

/* ---- random devices ---- */

/* The replacement for a random device: a pipe with room for one chunk, filled again whenever it is
 * empty. So the positions at which a read returns less than requested do not depend on time. */
struct device {
    struct watch watch;
    struct device *next, **link; /* of `devices` */
    int pipe;
    struct channel channel;
    struct program *program;
    uint8_t chunk[CHUNK];
};

static struct device *devices;

/* Fill the empty pipe: false if no process has its reading end any more. */
static bool device_fill(struct device *device) {
    channel_read(&device->channel, device->chunk, CHUNK);
    ssize_t written = write(device->pipe, device->chunk, CHUNK);
    if (written != CHUNK && !(written < 0 && errno == EPIPE))
        fail("CAP-R110", "a process changed the pipe that replaces a random device");
    return written == CHUNK;
}

static void device_used(struct device *device, size_t size) {
    device->program->devices.bytes += size;
    channel_used(&device->channel, device->chunk, size);
}

static void device_unlink(struct device *device) {
    *device->link = device->next;
    if (device->next) device->next->link = device->link;
}

static void device_free(struct device *device) {
    close(device->pipe);
    free(device);
}

/* The reading end is closed; the bytes that are left in the pipe were never read. */
static void device_close(struct device *device) {
    int unread = CHUNK;
    device_unlink(device);
    ioctl(device->pipe, FIONREAD, &unread);
    device_used(device, (size_t)(CHUNK - unread));
    device_free(device);
}

static void device_ready(struct watch *watch, uint32_t events) {
    struct device *device = (struct device *)watch;
    if (events & EPOLLERR) {
        device_close(device);
        return;
    }
    device_used(device, CHUNK);
    if (channels_mismatch() || device_fill(device)) return;
    device_unlink(device); /* closed since it was found empty */
    device_free(device);
}

static struct device *device_open(struct task *caller, int *readable) {
    struct device *device = allocate(sizeof *device);
    char label[40];
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0 || fcntl(ends[1], F_SETPIPE_SZ, CHUNK) < 0 ||
        fcntl(ends[1], F_SETFL, O_NONBLOCK) < 0)
        fail("CAP-R110", "no pipe can be opened to replace a random device: %s", strerror(errno));
    snprintf(label, sizeof label, "kernel:device:%u", caller->devices + 1);
    channel_open(&device->channel, CHANNEL_DEVICE, caller->process, caller->thread, label);
    device->watch.ready = device_ready;
    device->pipe = ends[1];
    device->program = caller->program;
    device->next = devices;
    device->link = &devices;
    if (devices) devices->link = &device->next;
    devices = device;
    *readable = ends[0];
    device_fill(device);
    return device;
}

/* Put the reading end of the pipe into the caller, as the result of its open. */
static bool hand_over(const struct seccomp_notif *call, int descriptor, uint32_t flags) {
    struct seccomp_notif_addfd given = {
        .id = call->id,
        /* Descriptor and answer in one step (Linux 5.14): between two steps, a signal could leave
         * the caller with a descriptor that was never returned to it. */
        .flags = SECCOMP_ADDFD_FLAG_SEND,
        .srcfd = (uint32_t)descriptor,
        .newfd_flags = flags & O_CLOEXEC,
    };
    int number = control(SECCOMP_IOCTL_NOTIF_ADDFD, &given);
    if (number >= 0) return true;
    if (errno == EMFILE || errno == ENFILE) respond(call->id, 0, -errno, 0);
    else if (errno != ENOENT)
        fail("CAP-R104", "this kernel does not accept the supervisor's descriptors: %s",
             strerror(errno));
    return false;
}

static void answer_device(const struct seccomp_notif *call, struct task *caller, uint32_t flags) {
    int readable;
    struct device *device = device_open(caller, &readable);
    bool delivered = hand_over(call, readable, flags);
    close(readable);
    if (!delivered) {
        device_close(device); /* unread */
        return;
    }
    caller->devices++;
    caller->program->devices.calls++;
    events_watch(device->pipe, EPOLLOUT, &device->watch);
}

enum opened { ORDINARY, RANDOM_DEVICE, RANDOM_FILE, CALLER_GONE };

/* Find out what the path in the caller's memory names. A program could change the path after it was
 * read here: this finds programs that request randomness, not programs that hide their requests. */
static enum opened classify(const struct seccomp_notif *call, uint64_t address) {
    char path[sizeof "/proc/sys/kernel/random/uuid"] = "";
    int memory = open_memory(call, O_RDONLY);
    if (memory < 0) return CALLER_GONE;
    ssize_t length = pread(memory, path, sizeof path, (off_t)address);
    close(memory);
    if (length <= 0 || memchr(path, '\0', (size_t)length) == NULL) return ORDINARY;
    if (!strcmp(path, "/dev/urandom") || !strcmp(path, "/dev/random")) return RANDOM_DEVICE;
    return strcmp(path, "/proc/sys/kernel/random/uuid") ? ORDINARY : RANDOM_FILE;
}

/* The flags of openat2 are in memory as well, in the first field of its structure. */
static uint32_t open_flags(const struct seccomp_notif *call) {
    if (call->data.nr == SYS_open) return (uint32_t)call->data.args[1];
    if (call->data.nr == SYS_openat) return (uint32_t)call->data.args[2];
    uint64_t flags = 0;
    int memory = open_memory(call, O_RDONLY);
    if (memory < 0) return 0;
    if (pread(memory, &flags, sizeof flags, (off_t)call->data.args[2]) < 0) flags = 0;
    close(memory);
    return (uint32_t)flags;
}

/* Whether an open is one for reading, of which the filter notifies. */
static bool is_read(uint32_t flags) {
    return (flags & O_ACCMODE) != O_WRONLY && !(flags & (O_DIRECTORY | O_PATH));
}

static struct task *identify(const struct seccomp_notif *call);

static void answer_open(const struct seccomp_notif *call) {
    enum opened what = classify(call, call->data.args[call->data.nr == SYS_open ? 0 : 1]);
    bool random = what == RANDOM_DEVICE || what == RANDOM_FILE;
    uint32_t flags = random ? open_flags(call) : 0;
    struct task *caller = random && is_read(flags) ? identify(call) : NULL;
    if (caller && what == RANDOM_DEVICE) {
        answer_device(call, caller, flags);
        return;
    }
    if (let_through(call->id) && caller) caller->program->unanswered++;
}

/* ---- programs ---- */

/* Stack guards and hash seeds of run-time systems come from these sixteen bytes. */
static void derive_start_bytes(const struct seccomp_notif *call, struct task *leader) {
    struct channel channel;
    uint8_t bytes[16];
    uint64_t address = proc_auxiliary(leader->id, AT_RANDOM);
    int memory = address ? open_memory(call, O_WRONLY) : -1;
    if (memory < 0) return;
    channel_open(&channel, CHANNEL_CALLS, leader->process, CAPSULE_ROOT_PATH, "kernel:start");
    if (channel_read(&channel, bytes, sizeof bytes) &&
        pwrite(memory, bytes, sizeof bytes, (off_t)address) == sizeof bytes) {
        channel_used(&channel, bytes, sizeof bytes);
        leader->program->start_bytes_derived = true;
    }
    close(memory);
}

static void note_program_start(const struct seccomp_notif *call, struct task *caller) {
    if (caller->program->started) return;
    caller->program->started = true;
    program_check_preloads(caller->program, caller->id, options);
    derive_start_bytes(call, caller);
}

static struct task *identify(const struct seccomp_notif *call) {
    bool executed;
    struct task *caller = tasks_caller((pid_t)call->pid, &executed);
    if (executed) program_describe(caller->program, caller->id);
    return caller;
}

/* ---- creation ---- */

/* Whether a clone makes a thread. clone3 has its flags in memory, first in its structure. */
static bool makes_thread(const struct seccomp_notif *call) {
    uint64_t flags = call->data.args[0];
    if (call->data.nr == SYS_fork || call->data.nr == SYS_vfork) return false;
    if (call->data.nr == SYS_clone3) {
        int memory = open_memory(call, O_RDONLY);
        if (memory < 0) return false;
        if (pread(memory, &flags, sizeof flags, (off_t)call->data.args[0]) < 0) flags = 0;
        close(memory);
    }
    return flags & CLONE_THREAD;
}

/* ---- the calls ---- */

static void answer(const struct seccomp_notif *call) {
    int number = call->data.nr;
    if (call->data.arch != AUDIT_ARCH_X86_64 || number >= X32_BIT) {
        char *executable = proc_executable((pid_t)call->pid);
        fail("CAP-R109", "%s makes system calls of an ABI other than x86-64",
             executable ? executable : "a program");
    }
    if (number == SYS_open || number == SYS_openat || number == SYS_openat2) {
        answer_open(call);
        return;
    }
    struct task *caller = identify(call);
    if (caller == NULL) return; /* it was killed, and waits for no answer */
    switch (number) {
    case SYS_getrandom: answer_getrandom(call, caller); return;
    case SYS_arch_prctl: note_program_start(call, caller); break;
    case SYS_execve:
    case SYS_execveat: tasks_execution(caller); break;
    case SYS_wait4:
    case SYS_waitid: tasks_wait(caller); break;
    case SYS_exit: /* so that a task is seen that asked for nothing else */
    case SYS_exit_group: break;
    default: tasks_creation(caller, makes_thread(call));
    }
    if (!channels_mismatch()) let_through(call->id);
}

void supervisor_end(void) {
    while (devices) device_close(devices);
}

static void listener_ready(struct watch *watch, uint32_t events) {
    (void)watch;
    if (!(events & EPOLLIN)) { /* no process with the filter is left */
        close(listener);
        return;
    }
    struct seccomp_notif *call = allocate(notification_size);
    if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, call) == 0) answer(call);
    else if (errno != ENOENT && errno != EINTR) /* ENOENT: the caller was killed */
        fail("CAP-R110", "no notification can be received: %s", strerror(errno));
    free(call);
}

static size_t larger(size_t one, size_t other) { return one > other ? one : other; }

void supervisor_begin(const struct options *given, int descriptor, pid_t root) {
    static struct watch watch = {listener_ready};
    struct seccomp_notif_sizes sizes;
    options = given;
    listener = descriptor;
    if (syscall(SYS_seccomp, SECCOMP_GET_NOTIF_SIZES, 0, &sizes) != 0)
        fail("CAP-R104", "this kernel does not support system call notification: %s",
             strerror(errno));
    /* The structure of a newer kernel can be larger than that of this header, and that of an older
     * kernel smaller. */
    notification_size = larger(sizes.seccomp_notif, sizeof(struct seccomp_notif));
    response_size = larger(sizes.seccomp_notif_resp, sizeof(struct seccomp_notif_resp));
    /* Answers arrive earlier when both processes run on one processor (Linux 6.6). This is an
     * optimisation only, so an error is ignored. */
    ioctl(listener, SECCOMP_IOCTL_NOTIF_SET_FLAGS, SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP);
    tasks_begin(root);
    events_watch(listener, EPOLLIN, &watch);
}
