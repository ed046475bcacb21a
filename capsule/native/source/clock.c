/* The calendar clock, for programs that take their seed from it. Fixed, it stands at the start of
 * the year 2000 (UTC). Virtual, it starts there in every thread and goes on by a microsecond each
 * time that the thread reads it. The monotonic clocks, by which programs wait, are left alone. */
#include <sys/syscall.h>
#include <sys/time.h>

#include "interposer.h"

#define START INT64_C(946684800)
#define MICROSECONDS INT64_C(1000000)

static int64_t microseconds_since_start(void) {
    if (settings.clock == CLOCK_FIXED) return 0;
    return (int64_t)++this_thread()->clock;
}

static struct timespec calendar(void) {
    int64_t passed = microseconds_since_start();
    return (struct timespec){START + passed / MICROSECONDS, passed % MICROSECONDS * 1000};
}

static bool is_calendar(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
}

EXPORT int clock_gettime(clockid_t clock, struct timespec *now) {
    attach();
    if (settings.clock != CLOCK_SYSTEM && is_calendar(clock)) {
        *now = calendar();
        return 0;
    }
    return real.clock_gettime ? real.clock_gettime(clock, now)
                              : (int)checked(system_call(SYS_clock_gettime, clock, (long)now, 0, 0,
                                                         0, 0));
}

EXPORT int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    if (zone) *(struct timezone *)zone = (struct timezone){0};
    clock_gettime(CLOCK_REALTIME, &exact);
    *now = (struct timeval){exact.tv_sec, exact.tv_nsec / 1000};
    return 0;
}

EXPORT time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now); /* the coarse clock is what time() reads */
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

EXPORT int timespec_get(struct timespec *now, int base) {
    if (base != TIME_UTC) return 0;
    clock_gettime(CLOCK_REALTIME, now);
    return base;
}
