/* The calendar clock, for programs whose results depend on the time of day.
 *
 * A fixed clock always shows START. With a virtual clock, every thread has its own clock, which is
 * a function of what the thread does: each reading advances it by STEP, each sleep by its duration,
 * and each wait that runs to its time-out by the time-out (waits.c). A new thread, process or
 * program begins with the clock of its creator, so that it reads later times than its creator had
 * read. Within a step each thread has its own phase, derived from its paths, so that threads that
 * read equally often do not read the same time. The monotonic clocks, by which programs wait, are
 * not changed. */
#include <dlfcn.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>

#include "interposer.h"

#define NANOSECONDS INT64_C(1000000000)
#define START (INT64_C(1767225600) * NANOSECONDS) /* 2026-01-01T00:00:00Z */
#define STEP INT64_C(1000000)

static int64_t phase_of(const struct thread *thread) {
    struct capsule_blake2s hash;
    uint8_t digest[CAPSULE_KEY_SIZE];
    uint32_t number;
    capsule_blake2s_begin(&hash, NULL);
    capsule_blake2s_add(&hash, thread->process, strlen(thread->process) + 1);
    capsule_blake2s_add(&hash, thread->path, strlen(thread->path));
    capsule_blake2s_end(&hash, digest);
    memcpy(&number, digest, sizeof number);
    return number % STEP;
}

int64_t shown_date(void) {
    if (settings.clock == CLOCK_FIXED) return START;
    struct thread *self = this_thread();
    if (self->phase < 0) self->phase = phase_of(self);
    return START + self->passed + self->phase;
}

void advance_clock(int64_t nanoseconds) {
    struct thread *self = this_thread();
    if (settings.clock != CLOCK_VIRTUAL || nanoseconds <= 0) return;
    if (__builtin_add_overflow(self->passed, nanoseconds, &self->passed))
        self->passed = INT64_MAX / 2;
    COUNT(waits);
}

void advance_clock_to(int64_t date) { advance_clock(date - shown_date()); }

static struct timespec timespec_of(int64_t date) {
    return (struct timespec){date / NANOSECONDS, date % NANOSECONDS};
}

static struct timespec read_calendar(void) {
    COUNT(readings);
    if (settings.clock == CLOCK_VIRTUAL) this_thread()->passed += STEP;
    return timespec_of(shown_date());
}

static bool is_calendar(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI ||
           clock == CLOCK_REALTIME_ALARM;
}

static int read_real(clockid_t clock, struct timespec *now) {
    return real.clock_gettime
               ? real.clock_gettime(clock, now)
               : (int)checked(system_call(SYS_clock_gettime, clock, (long)now, 0, 0, 0, 0));
}

EXPORT int clock_gettime(clockid_t clock, struct timespec *now) {
    attach();
    if (settings.clock != CLOCK_SYSTEM && is_calendar(clock)) {
        *now = read_calendar();
        return 0;
    }
    int result = read_real(clock, now);
    if (settings.clock == CLOCK_VIRTUAL && clock == CLOCK_MONOTONIC && result == 0)
        this_thread()->monotonic = now->tv_sec * NANOSECONDS + now->tv_nsec;
    return result;
}

/* Python's semaphores between processes read the clock to compute a deadline, whether or not they
 * then wait. How often a program calls them depends on the order of arrival, for example in torch's
 * DataLoader. So this does not count as a reading of the program. */
static bool is_semaphores(const void *caller) {
    static const char library[] = "_multiprocessing.";
    Dl_info info;
    if (!dladdr(caller, &info) || !info.dli_fname) return false;
    const char *slash = strrchr(info.dli_fname, '/');
    return slash && strncmp(slash + 1, library, strlen(library)) == 0;
}

/* dladdr() compares an address with every symbol of its library, which takes a millisecond for
 * torch's library, and oneDNN reads the time in each operation. So the last few callers are
 * remembered. */
static bool computes_deadline(const void *caller) {
    static __thread struct {
        const void *caller;
        bool answer;
    } known[CALLERS];
    size_t place = ((uintptr_t)caller >> 2) % CALLERS;
    if (known[place].caller != caller) {
        known[place].answer = is_semaphores(caller);
        known[place].caller = caller;
    }
    return known[place].answer;
}

EXPORT int time_of_day(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact = {0};
    attach();
    if (zone) *(struct timezone *)zone = (struct timezone){0};
    if (!now) return 0;
    if (settings.clock == CLOCK_VIRTUAL && computes_deadline(CALLER))
        exact = timespec_of(shown_date());
    else if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return -1;
    *now = (struct timeval){exact.tv_sec, exact.tv_nsec / 1000};
    return 0;
}

EXPORT time_t time(time_t *out) {
    struct timespec now = {0};
    /* The coarse clock is what time() reads. */
    if (clock_gettime(CLOCK_REALTIME_COARSE, &now) != 0) return -1;
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

EXPORT int timespec_get(struct timespec *now, int base) {
    if (base != TIME_UTC) return 0;
    return clock_gettime(CLOCK_REALTIME, now) == 0 ? base : 0;
}
