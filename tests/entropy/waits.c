/* Waits in every way that has a time-out. One line each: its name, and how far the calendar clock
 * went. A wait that ends before its time ends the program. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <mqueue.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

#define DURATION 20000000 /* ns */

static int64_t read_clock(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static struct timespec in_a_while(clockid_t clock) {
    int64_t then = read_clock(clock) + DURATION;
    return (struct timespec){then / 1000000000, then % 1000000000};
}

static int64_t begun, date;
static struct timespec deadline, since_boot;
static const struct timespec duration = {0, DURATION};

static void begin(void) {
    date = read_clock(CLOCK_REALTIME);
    begun = read_clock(CLOCK_MONOTONIC);
    deadline = in_a_while(CLOCK_REALTIME);
    since_boot = in_a_while(CLOCK_MONOTONIC);
}

static void end(const char *name, int timed_out) {
    int64_t took = read_clock(CLOCK_MONOTONIC) - begun;
    if (!timed_out || took < DURATION) {
        printf("%s ended early\n", name);
        exit(1);
    }
    printf("%s %ld\n", name, read_clock(CLOCK_REALTIME) - date);
}

#define TRY(name, timed_out) (begin(), end(name, timed_out))
#define RETURNS(error, wait) ((wait) == (error))
#define SETS(error, wait) ((wait) == -1 && errno == (error))

static void sleeps(void) {
    TRY("nanosleep", nanosleep(&duration, NULL) == 0);
    TRY("clock_nanosleep", clock_nanosleep(CLOCK_MONOTONIC, 0, &duration, NULL) == 0);
    TRY("until a date", clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &deadline, NULL) == 0);
    TRY("until a time", clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &since_boot, NULL) == 0);
    TRY("by number", syscall(SYS_nanosleep, &duration, NULL) == 0);
    int absolute = TIMER_ABSTIME;
    TRY("by number, until a date",
        syscall(SYS_clock_nanosleep, CLOCK_REALTIME, absolute, &deadline, NULL) == 0);
    TRY("usleep", usleep(DURATION / 1000) == 0);
    TRY("thrd_sleep", thrd_sleep(&duration, NULL) == 0);
}

static void descriptors(void) {
    struct timeval rest = {0, DURATION / 1000};
    struct epoll_event event;
    int ends[2], set = epoll_create1(0);
    if (pipe(ends) != 0) abort();
    struct pollfd readable = {.fd = ends[0], .events = POLLIN};
    fd_set files;
    FD_ZERO(&files);
    FD_SET(ends[0], &files);
    TRY("poll", poll(&readable, 1, DURATION / 1000000) == 0);
    TRY("poll nothing", poll(NULL, 0, DURATION / 1000000) == 0);
    TRY("ppoll", ppoll(&readable, 1, &duration, NULL) == 0);
    TRY("select", select(ends[0] + 1, &files, NULL, NULL, &rest) == 0);
    TRY("pselect", pselect(0, NULL, NULL, NULL, &duration, NULL) == 0);
    TRY("epoll_wait", epoll_wait(set, &event, 1, DURATION / 1000000) == 0);
    TRY("epoll_pwait", epoll_pwait(set, &event, 1, DURATION / 1000000, NULL) == 0);
    sigset_t none;
    sigemptyset(&none);
    TRY("sigtimedwait", SETS(EAGAIN, sigtimedwait(&none, NULL, &duration)));
}

static void by_number(void) {
    struct timeval rest = {0, DURATION / 1000};
    struct timespec left = duration, other = duration;
    struct epoll_event event;
    sigset_t none;
    int set = epoll_create1(0), milliseconds = DURATION / 1000000;
    sigemptyset(&none);
    TRY("SYS_poll", syscall(SYS_poll, NULL, 0, milliseconds) == 0);
    TRY("SYS_ppoll", syscall(SYS_ppoll, NULL, 0, &left, NULL, 0) == 0 && left.tv_nsec == 0);
    TRY("SYS_select", syscall(SYS_select, 0, NULL, NULL, NULL, &rest) == 0);
    TRY("SYS_pselect6", syscall(SYS_pselect6, 0, NULL, NULL, NULL, &other, NULL) == 0);
    TRY("SYS_epoll_wait", syscall(SYS_epoll_wait, set, &event, 1, milliseconds) == 0);
    TRY("SYS_epoll_pwait", syscall(SYS_epoll_pwait, set, &event, 1, milliseconds, NULL, 8) == 0);
    TRY("SYS_epoll_pwait2", syscall(SYS_epoll_pwait2, set, &event, 1, &duration, NULL, 8) == 0);
    TRY("SYS_rt_sigtimedwait",
        SETS(EAGAIN, syscall(SYS_rt_sigtimedwait, &none, NULL, &duration, 8)));
}

static pthread_mutex_t held = PTHREAD_MUTEX_INITIALIZER, mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_rwlock_t written = PTHREAD_RWLOCK_INITIALIZER;
static pthread_barrier_t both;

static void *wait_for_ever(void *unused) {
    pthread_mutex_lock(&held);
    pthread_rwlock_wrlock(&written);
    pthread_barrier_wait(&both);
    for (;;) pause();
    return unused;
}

static void locks(void) {
    pthread_t other;
    sem_t none;
    uint32_t word = 0;
    pthread_cond_t never = PTHREAD_COND_INITIALIZER, steady;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&steady, &attributes);
    pthread_barrier_init(&both, NULL, 2);
    pthread_create(&other, NULL, wait_for_ever, NULL);
    pthread_barrier_wait(&both);
    sem_init(&none, 0, 0);
    pthread_mutex_lock(&mutex);
    TRY("sem_timedwait", SETS(ETIMEDOUT, sem_timedwait(&none, &deadline)));
    TRY("sem_clockwait", SETS(ETIMEDOUT, sem_clockwait(&none, CLOCK_MONOTONIC, &since_boot)));
    TRY("sem_clockwait, a date", SETS(ETIMEDOUT, sem_clockwait(&none, CLOCK_REALTIME, &deadline)));
    TRY("condition", RETURNS(ETIMEDOUT, pthread_cond_timedwait(&never, &mutex, &deadline)));
    TRY("steady condition",
        RETURNS(ETIMEDOUT, pthread_cond_timedwait(&steady, &mutex, &since_boot)));
    TRY("condition, clock",
        RETURNS(ETIMEDOUT, pthread_cond_clockwait(&never, &mutex, CLOCK_MONOTONIC, &since_boot)));
    TRY("cnd_timedwait",
        RETURNS(thrd_timedout, cnd_timedwait((cnd_t *)&never, (mtx_t *)&mutex, &deadline)));
    TRY("mtx_timedlock", RETURNS(thrd_timedout, mtx_timedlock((mtx_t *)&held, &deadline)));
    TRY("mutex", RETURNS(ETIMEDOUT, pthread_mutex_timedlock(&held, &deadline)));
    TRY("mutex, clock",
        RETURNS(ETIMEDOUT, pthread_mutex_clocklock(&held, CLOCK_MONOTONIC, &since_boot)));
    TRY("read lock", RETURNS(ETIMEDOUT, pthread_rwlock_timedrdlock(&written, &deadline)));
    TRY("write lock", RETURNS(ETIMEDOUT, pthread_rwlock_timedwrlock(&written, &deadline)));
    TRY("join", RETURNS(ETIMEDOUT, pthread_timedjoin_np(other, NULL, &deadline)));
    int wait = FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME;
    TRY("futex", SETS(ETIMEDOUT, syscall(SYS_futex, &word, wait, 0, &deadline, NULL, ~0U)));
}

/* They ring at a date, whoever waits; that does not move the clock. */
static void timers(void) {
    timer_t timer;
    uint64_t expirations;
    struct sigevent told = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
    sigset_t alarm;
    int descriptor = timerfd_create(CLOCK_REALTIME, 0);
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    sigprocmask(SIG_BLOCK, &alarm, NULL);
    begin();
    timerfd_settime(descriptor, TFD_TIMER_ABSTIME, &(struct itimerspec){{0, 0}, deadline}, NULL);
    end("timerfd", read(descriptor, &expirations, sizeof expirations) == sizeof expirations);
    begin();
    syscall(SYS_timerfd_settime, descriptor, TFD_TIMER_ABSTIME,
            &(struct itimerspec){{0, 0}, deadline}, NULL);
    end("SYS_timerfd_settime",
        read(descriptor, &expirations, sizeof expirations) == sizeof expirations);
    timer_create(CLOCK_REALTIME, &told, &timer);
    begin();
    timer_settime(timer, TIMER_ABSTIME, &(struct itimerspec){{0, 0}, deadline}, NULL);
    end("timer", sigwaitinfo(&alarm, NULL) == SIGALRM);
    begin();
    syscall(SYS_timer_settime, timer, TIMER_ABSTIME, &(struct itimerspec){{0, 0}, deadline}, NULL);
    end("SYS_timer_settime", sigwaitinfo(&alarm, NULL) == SIGALRM);
}

int main(void) {
    sleeps();
    descriptors();
    by_number();
    timers();
    locks();
    return 0;
}
