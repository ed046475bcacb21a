/* The functions of the C library that the wrappers call. */
#ifndef CAPSULE_REAL_H
#define CAPSULE_REAL_H

#include <dirent.h>
#include <mqueue.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>
#include <wordexp.h>

#define WAITING_FUNCTIONS(X)                                                                       \
    X(int, nanosleep, (const struct timespec *, struct timespec *))                                \
    X(int, clock_nanosleep, (clockid_t, int, const struct timespec *, struct timespec *))          \
    X(unsigned, sleep, (unsigned))                                                                 \
    X(int, usleep, (useconds_t))                                                                   \
    X(int, poll, (struct pollfd *, nfds_t, int))                                                   \
    X(int, ppoll, (struct pollfd *, nfds_t, const struct timespec *, const sigset_t *))            \
    X(int, select, (int, fd_set *, fd_set *, fd_set *, struct timeval *))                          \
    X(int, pselect,                                                                                \
      (int, fd_set *, fd_set *, fd_set *, const struct timespec *, const sigset_t *))              \
    X(int, epoll_wait, (int, struct epoll_event *, int, int))                                      \
    X(int, epoll_pwait, (int, struct epoll_event *, int, int, const sigset_t *))                   \
    X(int, epoll_pwait2,                                                                           \
      (int, struct epoll_event *, int, const struct timespec *, const sigset_t *))                 \
    X(int, sigtimedwait, (const sigset_t *, siginfo_t *, const struct timespec *))                 \
    X(int, sem_timedwait, (sem_t *, const struct timespec *))                                      \
    X(int, sem_clockwait, (sem_t *, clockid_t, const struct timespec *))                           \
    X(int, pthread_cond_timedwait, (pthread_cond_t *, pthread_mutex_t *, const struct timespec *)) \
    X(int, pthread_cond_clockwait,                                                                 \
      (pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *))                   \
    X(int, pthread_mutex_timedlock, (pthread_mutex_t *, const struct timespec *))                  \
    X(int, pthread_mutex_clocklock, (pthread_mutex_t *, clockid_t, const struct timespec *))       \
    X(int, pthread_rwlock_timedrdlock, (pthread_rwlock_t *, const struct timespec *))              \
    X(int, pthread_rwlock_timedwrlock, (pthread_rwlock_t *, const struct timespec *))              \
    X(int, pthread_rwlock_clockrdlock, (pthread_rwlock_t *, clockid_t, const struct timespec *))   \
    X(int, pthread_rwlock_clockwrlock, (pthread_rwlock_t *, clockid_t, const struct timespec *))   \
    X(int, pthread_timedjoin_np, (pthread_t, void **, const struct timespec *))                    \
    X(int, pthread_clockjoin_np, (pthread_t, void **, clockid_t, const struct timespec *))         \
    X(ssize_t, mq_timedreceive, (mqd_t, char *, size_t, unsigned *, const struct timespec *))      \
    X(int, mq_timedsend, (mqd_t, const char *, size_t, unsigned, const struct timespec *))         \
    X(int, timer_settime, (timer_t, int, const struct itimerspec *, struct itimerspec *))          \
    X(int, timerfd_settime, (int, int, const struct itimerspec *, struct itimerspec *))

#define LISTING_FUNCTIONS(X)                                                                       \
    X(DIR *, opendir, (const char *))                                                              \
    X(DIR *, fdopendir, (int))                                                                     \
    X(struct dirent64 *, readdir64, (DIR *))                                                       \
    X(void, rewinddir, (DIR *))                                                                    \
    X(int, dirfd, (DIR *))                                                                         \
    X(int, closedir, (DIR *))                                                                      \
    X(int, scandirat64,                                                                            \
      (int, const char *, struct dirent64 ***, int (*)(const struct dirent64 *),                   \
       int (*)(const struct dirent64 **, const struct dirent64 **)))                               \
    X(long, telldir, (DIR *))                                                                      \
    X(void, seekdir, (DIR *, long))

#define CORE_FUNCTIONS(X)                                                                          \
    X(long, sysconf, (int))                                                                        \
    X(int, sched_getcpu, (void))                                                                   \
    X(int, getcpu, (unsigned *, unsigned *))                                                       \
    X(int, pthread_getaffinity_np, (pthread_t, size_t, cpu_set_t *))                               \
    X(int, pthread_setaffinity_np, (pthread_t, size_t, const cpu_set_t *))                         \
    X(int, pthread_attr_setaffinity_np, (pthread_attr_t *, size_t, const cpu_set_t *))

/* One that may wait is here because a thread can be cancelled in it, as it could not be in a system
 * call. */
#define REAL_FUNCTIONS(X)                                                                          \
    X(int, openat, (int, const char *, int, ...))                                                  \
    X(ssize_t, read, (int, void *, size_t))                                                        \
    X(ssize_t, readv, (int, const struct iovec *, int))                                            \
    X(ssize_t, pread, (int, void *, size_t, off_t))                                                \
    X(ssize_t, preadv, (int, const struct iovec *, int, off_t))                                    \
    X(ssize_t, preadv2, (int, const struct iovec *, int, off_t, int))                              \
    X(FILE *, fopen, (const char *, const char *))                                                 \
    X(FILE *, fdopen, (int, const char *))                                                         \
    X(FILE *, freopen, (const char *, const char *, FILE *))                                       \
    X(int, fclose, (FILE *))                                                                       \
    X(int, fileno, (FILE *))                                                                       \
    X(void, closefrom, (int))                                                                      \
    X(int, fcntl, (int, int, ...))                                                                 \
    X(FILE *, popen, (const char *, const char *))                                                 \
    X(int, pclose, (FILE *))                                                                       \
    X(int, wordexp, (const char *, wordexp_t *, int))                                              \
    X(int, execvpe, (const char *, char *const[], char *const[]))                                  \
    X(int, posix_spawn,                                                                            \
      (pid_t *, const char *, const void *, const void *, char *const[], char *const[]))           \
    X(int, posix_spawnp,                                                                           \
      (pid_t *, const char *, const void *, const void *, char *const[], char *const[]))           \
    X(pid_t, _Fork, (void))                                                                        \
    X(int, clone, (int (*)(void *), void *, int, void *, ...))                                     \
    X(int, pthread_create, (pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))       \
    X(int, clock_gettime, (clockid_t, struct timespec *))                                          \
    WAITING_FUNCTIONS(X)                                                                           \
    LISTING_FUNCTIONS(X)                                                                           \
    CORE_FUNCTIONS(X)

struct real_functions {
#define MEMBER(type, name, arguments) type(*name) arguments;
    REAL_FUNCTIONS(MEMBER)
#undef MEMBER
};

extern struct real_functions real;

#endif
