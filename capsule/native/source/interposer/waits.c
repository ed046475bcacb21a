/* Waits, under a calendar clock that is not the machine's.
 *
 * A wait until a date becomes a wait until the date on the machine's clock that is equally far
 * away. A sleep advances the thread's clock by its duration, and so does a wait that runs to its
 * time-out. A wait that ends earlier, because its event occurred, does not advance the clock,
 * because its duration depends on the machine.
 *
 * Programs often wait for the rest of a duration, which depends on the load of the machine. So the
 * time-out of a wait is rounded up to one digit: 97 ms count as 100 ms. A sleep counts exactly. A
 * sleep until a monotonic time counts from the thread's last reading of the monotonic clock, from
 * which the program computed it. */
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>

#include "interposer.h"

#define NANOSECONDS INT64_C(1000000000)
#define MILLISECONDS INT64_C(1000000)

/* ---- times ---- */

static int64_t nanoseconds(const struct timespec *time) {
    int64_t sum;
    bool overflows = __builtin_mul_overflow(time->tv_sec, NANOSECONDS, &sum) ||
                     __builtin_add_overflow(sum, time->tv_nsec, &sum);
    return overflows ? INT64_MAX : sum;
}

/* No machine has been up for thirty years. So a later deadline is a date of the calendar clock,
 * whatever clock a condition variable has. */
static bool is_date(const struct timespec *deadline) {
    return settings.clock != CLOCK_SYSTEM && deadline && deadline->tv_sec >= 1000000000;
}

/* The date on the machine's clock that is as far away as `date` is on the thread's clock; `date`
 * itself if it is not one of the calendar clock. */
static const struct timespec *real_date(const struct timespec *date, struct timespec *translated) {
    struct timespec now;
    int64_t there;
    if (!is_date(date)) return date;
    real.clock_gettime(CLOCK_REALTIME, &now);
    if (__builtin_add_overflow(nanoseconds(date) - shown_date(), nanoseconds(&now), &there))
        return date;
    *translated = (struct timespec){there / NANOSECONDS, there % NANOSECONDS};
    if (there < 0) *translated = (struct timespec){0, 0};
    return translated;
}

int64_t one_digit(int64_t number) {
    int64_t unit = 1;
    while (number / unit >= 10) unit *= 10;
    return (number + unit - 1) / unit * unit;
}

/* The duration from the thread's last reading of the monotonic clock; zero without a reading. */
static int64_t until_monotonic(const struct timespec *deadline) {
    int64_t since = this_thread()->monotonic;
    return since ? nanoseconds(deadline) - since : 0;
}

/* ---- sleeps ---- */

EXPORT int nanosleep(const struct timespec *duration, struct timespec *left) {
    attach();
    int result = real.nanosleep(duration, left);
    if (result == 0) advance_clock(nanoseconds(duration));
    return result;
}

EXPORT int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time,
                           struct timespec *left) {
    struct timespec translated;
    attach();
    if (!(flags & TIMER_ABSTIME)) {
        int result = real.clock_nanosleep(clock, flags, time, left);
        if (result == 0) advance_clock(nanoseconds(time));
        return result;
    }
    int result = real.clock_nanosleep(clock, flags, real_date(time, &translated), left);
    if (result == 0 && is_date(time)) advance_clock_to(nanoseconds(time));
    if (result == 0 && clock == CLOCK_MONOTONIC) advance_clock(until_monotonic(time));
    return result;
}

EXPORT unsigned sleep(unsigned seconds) {
    attach();
    unsigned left = real.sleep(seconds);
    if (left == 0) advance_clock(seconds * NANOSECONDS);
    return left;
}

EXPORT int usleep(useconds_t microseconds) {
    attach();
    int result = real.usleep(microseconds);
    if (result == 0) advance_clock(microseconds * INT64_C(1000));
    return result;
}

EXPORT int thrd_sleep(const struct timespec *duration, struct timespec *left) {
    if (nanosleep(duration, left) == 0) return 0;
    return errno == EINTR ? -1 : -2;
}

/* ---- waits for descriptors and signals; without any they are sleeps ---- */

/* Account for a wait with this `result`; `nothing` means that it could only run to its time-out. */
static int waited(int result, bool nothing, int64_t duration) {
    if (result == 0 && duration > 0) advance_clock(nothing ? duration : one_digit(duration));
    return result;
}

static int64_t optional(const struct timespec *duration) {
    return duration ? nanoseconds(duration) : 0;
}

EXPORT int poll(struct pollfd *waiting, nfds_t count, int milliseconds) {
    attach();
    return waited(real.poll(waiting, count, milliseconds), count == 0, milliseconds * MILLISECONDS);
}

EXPORT int ppoll(struct pollfd *waiting, nfds_t count, const struct timespec *duration,
                 const sigset_t *mask) {
    attach();
    return waited(real.ppoll(waiting, count, duration, mask), count == 0, optional(duration));
}

void __chk_fail(void) __attribute__((noreturn));

EXPORT int __poll_chk(struct pollfd *waiting, nfds_t count, int milliseconds, size_t room) {
    if (room / sizeof *waiting < count) __chk_fail();
    return poll(waiting, count, milliseconds);
}

EXPORT int __ppoll_chk(struct pollfd *waiting, nfds_t count, const struct timespec *duration,
                       const sigset_t *mask, size_t room) {
    if (room / sizeof *waiting < count) __chk_fail();
    return ppoll(waiting, count, duration, mask);
}

EXPORT int select(int count, fd_set *restrict readable, fd_set *restrict writable,
                  fd_set *restrict exceptional, struct timeval *restrict duration) {
    attach();
    /* The kernel writes the rest of the duration. */
    int64_t given = duration ? duration->tv_sec * NANOSECONDS + duration->tv_usec * 1000 : 0;
    return waited(real.select(count, readable, writable, exceptional, duration), count == 0, given);
}

EXPORT int pselect(int count, fd_set *restrict readable, fd_set *restrict writable,
                   fd_set *restrict exceptional, const struct timespec *restrict duration,
                   const sigset_t *restrict mask) {
    attach();
    return waited(real.pselect(count, readable, writable, exceptional, duration, mask), count == 0,
                  optional(duration));
}

EXPORT int epoll_wait(int set, struct epoll_event *events, int most, int milliseconds) {
    attach();
    return waited(real.epoll_wait(set, events, most, milliseconds), false,
                  milliseconds * MILLISECONDS);
}

EXPORT int epoll_pwait(int set, struct epoll_event *events, int most, int milliseconds,
                       const sigset_t *mask) {
    attach();
    return waited(real.epoll_pwait(set, events, most, milliseconds, mask), false,
                  milliseconds * MILLISECONDS);
}

EXPORT int epoll_pwait2(int set, struct epoll_event *events, int most,
                        const struct timespec *duration, const sigset_t *mask) {
    attach();
    return waited(real.epoll_pwait2(set, events, most, duration, mask), false, optional(duration));
}

EXPORT int sigtimedwait(const sigset_t *restrict signals, siginfo_t *restrict facts,
                        const struct timespec *restrict duration) {
    attach();
    int result = real.sigtimedwait(signals, facts, duration);
    if (result < 0 && errno == EAGAIN) waited(0, false, optional(duration));
    return result;
}

static int64_t duration_by_number(long number, const long a[6]) {
    switch (number) {
    case SYS_epoll_pwait: return (int)a[3] * MILLISECONDS;
    case SYS_epoll_pwait2: return optional((const struct timespec *)a[3]);
    case SYS_pselect6: return optional((const struct timespec *)a[4]);
    default: return optional((const struct timespec *)a[2]); /* ppoll, rt_sigtimedwait */
    }
}

long wait_by_number(long number, const long a[6]) {
    attach();
    int64_t duration = duration_by_number(number, a); /* the kernel may write what is left of it */
    bool nothing = (number == SYS_ppoll && a[1] == 0) || (number == SYS_pselect6 && a[0] == 0);
    long result = checked(system_call(number, a[0], a[1], a[2], a[3], a[4], a[5]));
    bool no_signal = number == SYS_rt_sigtimedwait && result < 0 && errno == EAGAIN;
    waited(no_signal ? 0 : (int)result, nothing, duration);
    return result;
}

/* ---- waits until a deadline ---- */

static bool ran_out(long result) {
    return result == ETIMEDOUT || (result == -1 && errno == ETIMEDOUT);
}

static void waited_until(const struct timespec *deadline, long result) {
    if (ran_out(result) && is_date(deadline)) advance_clock_to(nanoseconds(deadline));
}

/* Account for a wait on the clock that the caller names. */
static void waited_on(clockid_t clock, const struct timespec *deadline, long result) {
    waited_until(deadline, result);
    if (ran_out(result) && clock == CLOCK_MONOTONIC) waited(0, false, until_monotonic(deadline));
}

/* Define a function of the C library that has the parameter `deadline`. If the function has no
 * parameter for the clock, the clock may be the monotonic one, and then its time-outs do not count:
 * with such waits, CPython passes its lock from thread to thread every few milliseconds. */
#define WAIT_UNTIL(type, name, parameters, arguments)                                              \
    EXPORT type name parameters {                                                                  \
        const struct timespec *given = deadline;                                                   \
        struct timespec translated;                                                                \
        attach();                                                                                  \
        deadline = real_date(deadline, &translated);                                               \
        type result = real.name arguments;                                                         \
        waited_until(given, result);                                                               \
        return result;                                                                             \
    }

#define WAIT_ON_CLOCK(name, parameters, arguments)                                                 \
    EXPORT int name parameters {                                                                   \
        const struct timespec *given = deadline;                                                   \
        struct timespec translated;                                                                \
        attach();                                                                                  \
        deadline = real_date(deadline, &translated);                                               \
        int result = real.name arguments;                                                          \
        waited_on(clock, given, result);                                                           \
        return result;                                                                             \
    }

WAIT_UNTIL(int, sem_timedwait,
           (sem_t *restrict semaphore, const struct timespec *restrict deadline),
           (semaphore, deadline))
WAIT_UNTIL(int, pthread_cond_timedwait,
           (pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
            const struct timespec *restrict deadline),
           (condition, mutex, deadline))
WAIT_UNTIL(int, pthread_mutex_timedlock,
           (pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline),
           (mutex, deadline))
WAIT_UNTIL(int, pthread_rwlock_timedrdlock,
           (pthread_rwlock_t *restrict lock, const struct timespec *restrict deadline),
           (lock, deadline))
WAIT_UNTIL(int, pthread_rwlock_timedwrlock,
           (pthread_rwlock_t *restrict lock, const struct timespec *restrict deadline),
           (lock, deadline))
WAIT_UNTIL(int, pthread_timedjoin_np,
           (pthread_t thread, void **result_of, const struct timespec *deadline),
           (thread, result_of, deadline))
WAIT_UNTIL(ssize_t, mq_timedreceive,
           (mqd_t queue, char *restrict message, size_t size, unsigned *restrict priority,
            const struct timespec *restrict deadline),
           (queue, message, size, priority, deadline))
WAIT_UNTIL(int, mq_timedsend,
           (mqd_t queue, const char *message, size_t size, unsigned priority,
            const struct timespec *deadline),
           (queue, message, size, priority, deadline))

WAIT_ON_CLOCK(sem_clockwait,
              (sem_t *restrict semaphore, clockid_t clock,
               const struct timespec *restrict deadline),
              (semaphore, clock, deadline))
WAIT_ON_CLOCK(pthread_cond_clockwait,
              (pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock,
               const struct timespec *restrict deadline),
              (condition, mutex, clock, deadline))
WAIT_ON_CLOCK(pthread_mutex_clocklock,
              (pthread_mutex_t *restrict mutex, clockid_t clock,
               const struct timespec *restrict deadline),
              (mutex, clock, deadline))
WAIT_ON_CLOCK(pthread_rwlock_clockrdlock,
              (pthread_rwlock_t *restrict lock, clockid_t clock,
               const struct timespec *restrict deadline),
              (lock, clock, deadline))
WAIT_ON_CLOCK(pthread_rwlock_clockwrlock,
              (pthread_rwlock_t *restrict lock, clockid_t clock,
               const struct timespec *restrict deadline),
              (lock, clock, deadline))
WAIT_ON_CLOCK(pthread_clockjoin_np,
              (pthread_t thread, void **result_of, clockid_t clock,
               const struct timespec *deadline),
              (thread, result_of, clock, deadline))

static int c11_result(int error) {
    return error == 0 ? thrd_success : error == ETIMEDOUT ? thrd_timedout : thrd_error;
}

/* glibc's types of C11 are those of POSIX under other names. */
EXPORT int cnd_timedwait(cnd_t *restrict condition, mtx_t *restrict mutex,
                         const struct timespec *restrict deadline) {
    return c11_result(
        pthread_cond_timedwait((pthread_cond_t *)condition, (pthread_mutex_t *)mutex, deadline));
}

EXPORT int mtx_timedlock(mtx_t *restrict mutex, const struct timespec *restrict deadline) {
    return c11_result(pthread_mutex_timedlock((pthread_mutex_t *)mutex, deadline));
}

bool waits_until(const long futex[6]) {
    int command = (int)futex[1] & FUTEX_CMD_MASK;
    /* FUTEX_WAIT takes a duration, which is the same on every clock (futex(2)). */
    return command == FUTEX_WAIT_BITSET || command == FUTEX_LOCK_PI ||
           command == FUTEX_WAIT_REQUEUE_PI;
}

long futex_by_number(const long a[6]) {
    const struct timespec *given = waits_until(a) ? (const struct timespec *)a[3] : NULL;
    struct timespec translated;
    long deadline = given ? (long)real_date(given, &translated) : a[3];
    long result = checked(system_call(SYS_futex, a[0], a[1], a[2], deadline, a[4], a[5]));
    if (given) waited_until(given, result);
    return result;
}

/* ---- timers ---- */

static const struct itimerspec *real_expiry(const struct itimerspec *given,
                                            struct itimerspec *translated) {
    if (!given || !is_date(&given->it_value)) return given;
    *translated = *given;
    struct timespec date;
    translated->it_value = *real_date(&given->it_value, &date);
    return translated;
}

EXPORT int timer_settime(timer_t timer, int flags, const struct itimerspec *restrict expiry,
                         struct itimerspec *restrict before) {
    struct itimerspec translated;
    attach();
    if (flags & TIMER_ABSTIME) expiry = real_expiry(expiry, &translated);
    return real.timer_settime(timer, flags, expiry, before);
}

EXPORT int timerfd_settime(int fd, int flags, const struct itimerspec *expiry,
                           struct itimerspec *before) {
    struct itimerspec translated;
    attach();
    if (flags & TFD_TIMER_ABSTIME) expiry = real_expiry(expiry, &translated);
    return real.timerfd_settime(fd, flags, expiry, before);
}

long timer_by_number(long number, const long a[6]) {
    struct itimerspec translated;
    const struct itimerspec *expiry = (const struct itimerspec *)a[2];
    attach();
    if (a[1] & TIMER_ABSTIME) expiry = real_expiry(expiry, &translated);
    return checked(system_call(number, a[0], a[1], (long)expiry, a[3], 0, 0));
}
