/* The interposer: a preloaded library between a program and the operating system's randomness.
 *
 *   interposer.c  settings, threads, and the source of the bytes of a call
 *   journal.c     the record of requests (and, when recording, of the answers)
 *   recording.c   the recording that is replayed
 *   sources.c     the functions that return random bytes
 *   devices.c     /dev/urandom and /dev/random as files
 *   lineage.c     the paths of processes and threads
 *   environment.c the environment of children
 *   scopes.c      pieces of work with their own paths, whichever thread executes them
 *   clock.c       the calendar clock
 *   waits.c       waits until a date, and the effect of waiting on that clock
 *   names.c       names of temporary files
 *   listings.c    listings of folders in order
 *   cores.c       the number of processors
 *   calls.c       system calls by number, which the other files answer
 *
 * Any exported function may be called before the constructor of this library has run, because the
 * constructor of another library may call it. So each of them begins with attach(), which prepares
 * every file; this is why interposer.c and the other files depend on each other. Separate
 * constructors would not help, because all of them might run too late.
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

/* The way in which randomness was requested; the numbers are in the journal and in profiles. */
enum source {
    SOURCE_GETRANDOM = 1,
    SOURCE_GETENTROPY,
    SOURCE_ARC4RANDOM,
    SOURCE_SYSCALL,
    SOURCE_DEVICE,
    SOURCE_RANDOM_DEVICE,
    SOURCE_NAME,
};

/* Settings of the process. They are set once, before it can have a second thread, except that
 * `process` changes after a fork. */
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
    struct journal_header *journal; /* NULL: nothing is recorded */
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

/* Read the settings, once, before any wrapper does anything else. */
void attach(void);

/* The calling thread, with its paths. */
struct thread *this_thread(void);

/* Describe a thread of these paths that has made no request yet. */
void describe_thread(struct thread *thread, const char *process, const char *path);

/* Give the calling thread these paths, as a thread that has made no request yet. */
void become(const char *process, const char *path);

/* Fill `buffer` according to the settings; `caller` is an address in the requesting library. */
void draw(enum source source, void *buffer, size_t size, const void *caller);

/* The same with the kernel's limits: at most MOST_BYTES, and only up to the first page that cannot
 * be written. Return the number of bytes, or -1 and errno if no byte can be written. */
ssize_t draw_checked(enum source source, void *buffer, size_t size, const void *caller);

/* Report an error in the settings on standard error, and end the run. */
_Noreturn void refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* End the whole run, not only this process: a worker pool would start another worker. */
_Noreturn void end_whole_run(void);

/* Count an answer to this process that replaces the machine's answer. The counts are a record in
 * the journal, and `count` is the offset of one of them; nothing happens without a journal. */
void tell_once_more(size_t count);
void stop_telling(void); /* for a process that was forked: it has its own */
#define COUNT(member) tell_once_more(offsetof(struct journal_told, member))

/* clock.c: the date that the calling thread sees, without a reading; and functions that advance its
 * clock. Times are nanoseconds since 1970. */
int64_t shown_date(void);
void advance_clock(int64_t nanoseconds);
void advance_clock_to(int64_t date);

/* clock.c: gettimeofday, from which programs may request the zone alone. In C, its declaration has
 * an attribute that they do not, because of which the compiler would remove the test. */
int time_of_day(struct timeval *restrict now, void *restrict zone) __asm__("gettimeofday");

/* waits.c: round up to a number of one digit followed by zeros: the duration that is counted for a
 * wait that ran to its time-out. */
int64_t one_digit(int64_t number);

/* waits.c: whether a futex system call has a deadline, which may be a date; answer such a call; a
 * system call that waits and whose arguments differ from those of the function; and one that sets a
 * timer. */
bool waits_until(const long futex[6]);
long futex_by_number(const long arguments[6]);
long wait_by_number(long number, const long arguments[6]);
long timer_by_number(long number, const long arguments[6]);

/* cores.c: answer the system calls of that name. */
long affinity_by_number(long number, const long arguments[6]);

/* lineage.c: number every fork. */
void watch_forks(void);
void number_child(char child[CAPSULE_PATH_SIZE]);
void become_process(const char *process);
bool was_forked_unseen(void);

/* sources.c: answer getrandom, checked and limited as the kernel does it. */
ssize_t checked_getrandom(enum source source, void *buffer, size_t size, unsigned flags,
                          const void *caller);

/* devices.c: let the program read a device that is its standard input; note that a descriptor is
 * about to be closed; answer a system call that reads. */
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

/* A result of the kernel in the form of the C library: -1 and errno for an error. */
static inline long checked(long result) {
    if (result >= -4095 && result < 0) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

#endif
