/* The function syscall: system calls by number. */

#include <mqueue.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <time.h>

#include "interposer.h"

#define LEAST_CLONE3_SIZE 64 /* the kernel refuses less, by which programs find out what it has */

/* Whether the kernel can read 8 bytes there. It reads a signal mask before it rejects an invalid
 * way to change it. */
static bool is_readable(const void *bytes) {
    return system_call(SYS_rt_sigprocmask, -1, (long)bytes, 0, 8, 0, 0) != -EFAULT;
}

/* Whether the bytes that are read here before the kernel tests the argument can be read. `size` is
 * less than a page, so testing both ends tests every page. */
static bool is_sound(long argument, size_t size) {
    const char *bytes = (const char *)argument;
    return !bytes || (is_readable(bytes) && is_readable(bytes + size - 8));
}

static bool has_sound_arguments(long number, const long a[6]) {
    switch (number) {
    case SYS_clock_nanosleep:
    case SYS_ppoll:
    case SYS_rt_sigtimedwait: return is_sound(a[2], sizeof(struct timespec));
    case SYS_futex: return !waits_until(a) || is_sound(a[3], sizeof(struct timespec));
    case SYS_epoll_pwait2: return is_sound(a[3], sizeof(struct timespec));
    case SYS_select:
    case SYS_pselect6:
    case SYS_mq_timedsend:
    case SYS_mq_timedreceive: return is_sound(a[4], sizeof(struct timespec));
    case SYS_timer_settime:
    case SYS_timerfd_settime: return is_sound(a[2], sizeof(struct itimerspec));
    case SYS_clone3: return is_sound(a[0], LEAST_CLONE3_SIZE);
    default: return true;
    }
}

/* Whether a call is a fork, whose child must get a path. A fork that shares memory is not changed.
 */
static bool is_fork(long number, const long arguments[6]) {
    if (number == SYS_fork || number == SYS_vfork) return true;
    if (number == SYS_clone) return !(arguments[0] & CLONE_VM);
    const uint64_t *flags = (const uint64_t *)arguments[0]; /* first in the structure */
    bool made = number == SYS_clone3 && flags && arguments[1] >= LEAST_CLONE3_SIZE;
    return made && !(*flags & CLONE_VM);
}

static long fork_by_number(long number, const long arguments[6]) {
    char child[CAPSULE_PATH_SIZE];
    number_child(child);
    if (number == SYS_vfork) number = SYS_fork; /* the stack of this function must not be shared */
    long result = system_call(number, arguments[0], arguments[1], arguments[2], arguments[3],
                              arguments[4], arguments[5]);
    if (result == 0) become_process(child);
    return checked(result);
}

/* The kernel answers first, because it tests the address of the answer; the functions do not. */
static long told_by_number(long number, const long a[6]) {
    long answer = checked(system_call(number, a[0], a[1], a[2], 0, 0, 0));
    if (answer == -1) return answer;
    switch (number) {
    case SYS_clock_gettime: return clock_gettime((clockid_t)a[0], (struct timespec *)a[1]);
    case SYS_gettimeofday: return time_of_day((struct timeval *)a[0], (void *)a[1]);
    case SYS_time: return time((time_t *)a[0]);
    default: return getcpu((unsigned *)a[0], (unsigned *)a[1]);
    }
}

/* Answer a call as the function of the same name does. Calls whose arguments differ from those of
 * the function are answered by separate functions. */
static long by_number(long number, const long a[6], const void *caller) {
    /* The kernel returns the error. */
    if (!has_sound_arguments(number, a))
        return checked(system_call(number, a[0], a[1], a[2], a[3], a[4], a[5]));
    switch (number) {
    case SYS_getrandom:
        return checked_getrandom(SOURCE_SYSCALL, (void *)a[0], (size_t)a[1], (unsigned)a[2],
                                 caller);
    case SYS_read:
    case SYS_pread64:
    case SYS_readv:
    case SYS_preadv:
    case SYS_preadv2: return read_by_number(number, a, caller);
    case SYS_clock_gettime:
    case SYS_gettimeofday:
    case SYS_time:
    case SYS_getcpu: return told_by_number(number, a);
    case SYS_nanosleep: return nanosleep((const struct timespec *)a[0], (struct timespec *)a[1]);
    case SYS_clock_nanosleep:
        return checked(-clock_nanosleep((clockid_t)a[0], (int)a[1], (const struct timespec *)a[2],
                                        (struct timespec *)a[3]));
    case SYS_poll: return poll((struct pollfd *)a[0], (nfds_t)a[1], (int)a[2]);
    case SYS_select:
        return select((int)a[0], (fd_set *)a[1], (fd_set *)a[2], (fd_set *)a[3],
                      (struct timeval *)a[4]);
    case SYS_epoll_wait:
        return epoll_wait((int)a[0], (struct epoll_event *)a[1], (int)a[2], (int)a[3]);
    case SYS_ppoll:
    case SYS_pselect6:
    case SYS_epoll_pwait:
    case SYS_epoll_pwait2:
    case SYS_rt_sigtimedwait: return wait_by_number(number, a);
    case SYS_futex: return futex_by_number(a);
    case SYS_mq_timedsend:
        return mq_timedsend((mqd_t)a[0], (const char *)a[1], (size_t)a[2], (unsigned)a[3],
                            (const struct timespec *)a[4]);
    case SYS_mq_timedreceive:
        return mq_timedreceive((mqd_t)a[0], (char *)a[1], (size_t)a[2], (unsigned *)a[3],
                               (const struct timespec *)a[4]);
    case SYS_timer_settime:
    case SYS_timerfd_settime: return timer_by_number(number, a);
    case SYS_sched_getaffinity:
    case SYS_sched_setaffinity: return checked(affinity_by_number(number, a));
    case SYS_execve: return execve((const char *)a[0], (char *const *)a[1], (char *const *)a[2]);
    case SYS_execveat:
        return execveat((int)a[0], (const char *)a[1], (char *const *)a[2], (char *const *)a[3],
                        (int)a[4]);
    default: break;
    }
    if (is_fork(number, a)) return fork_by_number(number, a);
    return checked(system_call(number, a[0], a[1], a[2], a[3], a[4], a[5]));
}

EXPORT long syscall(long number, ...) {
    long a[6];
    va_list arguments;
    va_start(arguments, number);
    /* If the caller gave fewer arguments, the rest is arbitrary, and the kernel does not read it.
     */
    for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
    va_end(arguments);
    return by_number(number, a, CALLER);
}
