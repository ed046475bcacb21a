/* The interposer: a preloaded library between a program and the operating system's randomness.
 *
 *   interposer.c  settings, threads, and where the bytes of a call come from
 *   journal.c     what was asked for (and, when recording, given) is written down
 *   recording.c   what is replayed
 *   sources.c     the functions that give randomness
 *   devices.c     /dev/urandom and /dev/random as files
 *   lineage.c     processes and threads get their paths
 *   environment.c children get the environment
 *   scopes.c      pieces of work with paths of their own, whichever thread does them
 *   clock.c       the calendar clock
 *   waits.c       waits until a date, and what waiting does to that clock
 *   names.c       names of temporary files
 *   listings.c    folders are listed in order
 *   cores.c       the number of processors
 *   calls.c       system calls by number, which the others answer
 *
 * Any exported function may be the first thing that happens in a process, before the constructor of
 * this library: another library's constructor may call it. So every one of them begins with
 * attach(), and attach() prepares every file: interposer.c and the others need each other. Separate
 * constructors would not do, because they might all come too late.
 */
#ifndef CAPSULE_INTERPOSER_H
#define CAPSULE_INTERPOSER_H

#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "../shared/entropy.h"
#include "../shared/journal.h"
#include "real.h"
#include "../shared/recording.h"

#define EXPORT __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

/* The most that the kernel gives in one read or getrandom. */
#define MOST_BYTES ((size_t)0x7ffff000)

enum clock { CLOCK_SYSTEM, CLOCK_FIXED, CLOCK_VIRTUAL };
enum listings { LISTINGS_SYSTEM, LISTINGS_SORTED };

/* How randomness was asked for; the numbers are in the journal and in profiles. */
enum source {
    SOURCE_GETRANDOM = 1,
    SOURCE_GETENTROPY,
    SOURCE_ARC4RANDOM,
    SOURCE_SYSCALL,
    SOURCE_DEVICE,
    SOURCE_RANDOM_DEVICE,
    SOURCE_NAME,
};

/* Of the process; set once, before it can have a second thread, but for `process` after a fork. */
struct settings {
    bool attached;
    enum mode mode;
    enum clock clock;
    int64_t clock_passed; /* on the calendar clock when the process began, ns */
    enum listings listings;
    unsigned cores; /* 0: as many as the machine has */
    bool derive_when_exhausted;
    pid_t launcher; /* 0 without one */
    uint8_t key[CAPSULE_KEY_SIZE];
    char process[CAPSULE_PATH_SIZE];
    struct journal_header *journal; /* NULL: nothing is written down */
};

#define CALLERS 16 /* a power of two */

struct thread {
    bool ready;
    bool vforked; /* in the child of a vfork, in the parent's memory */
    char process[CAPSULE_PATH_SIZE];
    char path[CAPSULE_PATH_SIZE];
    uint32_t forks, threads, works;
    int64_t passed;     /* on this thread's calendar clock, ns */
    int64_t phase;      /* of that clock within a step, ns; -1 until it is needed */
    int64_t monotonic;  /* what it last read on the monotonic clock, ns */
    cpu_set_t affinity; /* the processors that it chose; empty before it does */
    /* From the first call for randomness on: */
    bool drawing;
    bool exhausted; /* replay: from here on bytes are derived */
    uint64_t calls, bytes;
    struct capsule_stream stream;
    bool known; /* replay: in the recording */
    struct recorded_thread recorded;
    struct journal_thread *record;
    uint64_t counters; /* offset of the last made */
    struct {
        const void *caller;
        enum source source;
        struct journal_counter *counter;
    } callers[CALLERS];
};

extern struct settings settings;

/* Read the settings; before any wrapper does anything, and once. */
void attach(void);

/* The calling thread, with its paths known. */
struct thread *this_thread(void);

/* Describe a thread of these paths, which has asked for nothing yet. */
void describe_thread(struct thread *thread, const char *process, const char *path);

/* Make the calling thread the one of these paths, which has asked for nothing yet. */
void become(const char *process, const char *path);

/* Fill `buffer`, as the settings say; `caller` is an address in the library that asked. */
void draw(enum source source, void *buffer, size_t size, const void *caller);

/* The same with the kernel's limits: at most MOST_BYTES, and only up to the first page that cannot
 * be written. The number of bytes, or -1 and errno if that is the first one. */
ssize_t draw_checked(enum source source, void *buffer, size_t size, const void *caller);

/* Say on standard error what is wrong with the settings, and end the run. */
_Noreturn void refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* End the whole run, not only this process: a worker pool would start another worker. */
_Noreturn void end_whole_run(void);

/* What this process was told in place of what the machine would have said: a record in the journal.
 * `count` is the place of a number in it; nothing happens without a journal. */
void tell_once_more(size_t count);
void stop_telling(void); /* for a process that was forked: it has its own */
#define COUNT(member) tell_once_more(offsetof(struct journal_told, member))

/* clock.c: the calendar clock as the calling thread sees it, without reading it; the step that a
 * reading is; and how it goes on. Times are nanoseconds since 1970. */
int64_t shown_date(void);
void advance_clock(int64_t nanoseconds);
void advance_clock_to(int64_t date);

/* clock.c: gettimeofday, of which programs may ask for the zone alone. The name in C has an
 * attribute that says that they do not, by which the compiler would remove the test. */
int time_of_day(struct timeval *restrict now, void *restrict zone) __asm__("gettimeofday");

/* waits.c: the least number of one digit and zeros that is not less: as long as a wait counts that
 * ran to its time-out. */
int64_t one_digit(int64_t number);

/* waits.c: whether a futex system call has a deadline, which may be a date; answer one; one that
 * waits, and has other arguments than the function; and one that sets a timer. */
bool waits_until(const long futex[6]);
long futex_by_number(const long arguments[6]);
long wait_by_number(long number, const long arguments[6]);
long timer_by_number(long number, const long arguments[6]);

/* cores.c: answer the system calls of that name. */
long affinity_by_number(long number, const long arguments[6]);

/* lineage.c: give every fork a number. */
void watch_forks(void);
void number_child(char child[CAPSULE_PATH_SIZE]);
void become_process(const char *process);
bool was_forked_unseen(void);

/* sources.c: answer getrandom, checked and limited as the kernel does it. */
ssize_t checked_getrandom(enum source source, void *buffer, size_t size, unsigned flags,
                          const void *caller);

/* devices.c: let the program read a device that it was given as its standard input; a descriptor
 * is about to be closed; answer a system call that reads. */
void open_standard_input(void);
void forget_device(int fd);
long read_by_number(long number, const long arguments[6], const void *caller);

static inline long system_call(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

/* A kernel's result as the C library gives it. */
static inline long checked(long result) {
    if (result >= -4095 && result < 0) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

#endif
