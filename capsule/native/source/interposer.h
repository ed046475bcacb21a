/* The interposer: a preloaded library between a program and the operating system's randomness.
 *
 *   interposer.c  settings, threads, and where the bytes of a call come from
 *   journal.c     what was asked for (and, when recording, given) is written down
 *   recording.c   what is replayed
 *   sources.c     the functions that give randomness
 *   devices.c     /dev/urandom and /dev/random as files
 *   lineage.c     processes and threads get their paths; children get the environment
 *   scopes.c      pieces of work with paths of their own, whichever thread does them
 *   clock.c       the calendar clock
 */
#ifndef CAPSULE_INTERPOSER_H
#define CAPSULE_INTERPOSER_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>

#include "entropy.h"
#include "journal.h"
#include "recording.h"

#define EXPORT __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

/* The most that the kernel gives in one read or getrandom. */
#define MOST_BYTES ((size_t)0x7ffff000)

enum mode { MODE_SYSTEM, MODE_VIRTUAL, MODE_RECORD, MODE_REPLAY };
enum clock { CLOCK_SYSTEM, CLOCK_FIXED, CLOCK_VIRTUAL };

/* How randomness was asked for; the numbers are in the journal and in profiles. */
enum source {
    SOURCE_GETRANDOM = 1,
    SOURCE_GETENTROPY,
    SOURCE_ARC4RANDOM,
    SOURCE_SYSCALL,
    SOURCE_DEVICE,
    SOURCE_RANDOM_DEVICE,
};

/* Of the process; set once, before it can have a second thread, but for `process` after a fork. */
struct settings {
    bool attached;
    enum mode mode;
    enum clock clock;
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
    uint64_t clock;
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

/* The functions of the C library that wrappers pass on to. One that may wait is here because a
 * thread can be cancelled in it, as it could not be in a system call. */
#define REAL_FUNCTIONS(X)                                                                        \
    X(int, openat, (int, const char *, int, ...))                                                \
    X(ssize_t, read, (int, void *, size_t))                                                      \
    X(ssize_t, readv, (int, const struct iovec *, int))                                          \
    X(ssize_t, pread, (int, void *, size_t, off_t))                                              \
    X(FILE *, fopen, (const char *, const char *))                                               \
    X(FILE *, fdopen, (int, const char *))                                                       \
    X(int, fclose, (FILE *))                                                                     \
    X(int, fileno, (FILE *))                                                                     \
    X(void, closefrom, (int))                                                                    \
    X(FILE *, popen, (const char *, const char *))                                               \
    X(int, execvpe, (const char *, char *const[], char *const[]))                                \
    X(int, posix_spawn, (pid_t *, const char *, const void *, const void *, char *const[],       \
                         char *const[]))                                                         \
    X(int, posix_spawnp, (pid_t *, const char *, const void *, const void *, char *const[],      \
                          char *const[]))                                                        \
    X(pid_t, _Fork, (void))                                                                      \
    X(int, clone, (int (*)(void *), void *, int, void *, ...))                                   \
    X(int, pthread_create, (pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))     \
    X(int, clock_gettime, (clockid_t, struct timespec *))

struct real_functions {
#define MEMBER(type, name, arguments) type(*name) arguments;
    REAL_FUNCTIONS(MEMBER)
#undef MEMBER
};

extern struct settings settings;
extern struct real_functions real;

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

/* Say on standard error what is wrong with the settings, and end the run. */
_Noreturn void refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* End the whole run, not only this process: a worker pool would start another worker. */
_Noreturn void end_run(void);

/* lineage.c: keep what children need of the environment, and give every fork a number. */
void keep_environment(void);
void watch_forks(void);
void number_child(char child[CAPSULE_PATH_SIZE]);
void become_process(const char *process);
bool was_forked_unseen(void);

/* devices.c: let the program read a device that it was given as its standard input. */
void open_standard_input(void);

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
