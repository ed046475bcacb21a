/* Lineage: the path of a process or thread follows from its creator and the order of creation,
 * never from the order of requests for randomness. Children get it in their environment
 * (environment.c). */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <threads.h>
#include <unistd.h>
#include <wordexp.h>

#include "environment.h"
#include "interposer.h"

extern char **environ;

/* ---- exec: the path gets an x ---- */

static int exec_at(int at, const char *file, char *const argv[], char *const given[], int flags) {
    char path[CAPSULE_PATH_SIZE];
    capsule_path_exec(path, this_thread()->process);
    ENVIRONMENT(environment, given, path);
    return (int)checked(
        system_call(SYS_execveat, at, (long)file, (long)argv, (long)environment, flags, 0));
}

EXPORT int execve(const char *file, char *const argv[], char *const given[]) {
    char path[CAPSULE_PATH_SIZE];
    capsule_path_exec(path, this_thread()->process);
    ENVIRONMENT(environment, given, path);
    return (int)checked(
        system_call(SYS_execve, (long)file, (long)argv, (long)environment, 0, 0, 0));
}

EXPORT int execveat(int at, const char *file, char *const argv[], char *const given[], int flags) {
    return exec_at(at, file, argv, given, flags);
}

EXPORT int fexecve(int fd, char *const argv[], char *const given[]) {
    return exec_at(fd, "", argv, given, AT_EMPTY_PATH);
}

EXPORT int execv(const char *file, char *const argv[]) { return execve(file, argv, environ); }

EXPORT int execvpe(const char *file, char *const argv[], char *const given[]) {
    char path[CAPSULE_PATH_SIZE];
    capsule_path_exec(path, this_thread()->process);
    ENVIRONMENT(environment, given, path);
    return real.execvpe(file, argv, environment);
}

EXPORT int execvp(const char *file, char *const argv[]) { return execvpe(file, argv, environ); }

static size_t count_arguments(va_list arguments) {
    size_t count = 1;
    while (va_arg(arguments, char *)) count++;
    return count;
}

/* Declare `argv` from the arguments after `first`, and `after`, which comes after their end. */
#define ARGUMENT_LIST(argv, after, first)                                                          \
    va_list arguments, counted;                                                                    \
    va_start(arguments, first);                                                                    \
    va_copy(counted, arguments);                                                                   \
    size_t argv##_count = count_arguments(counted);                                                \
    char *argv[argv##_count + 1];                                                                  \
    va_end(counted);                                                                               \
    argv[0] = (char *)(uintptr_t)first;                                                            \
    for (size_t i = 1; i <= argv##_count; i++) argv[i] = va_arg(arguments, char *);                \
    char *const *after = environ

EXPORT int execl(const char *file, const char *first, ...) {
    ARGUMENT_LIST(argv, environment, first);
    va_end(arguments);
    return execve(file, argv, environment);
}

EXPORT int execlp(const char *file, const char *first, ...) {
    ARGUMENT_LIST(argv, environment, first);
    va_end(arguments);
    return execvpe(file, argv, environment);
}

EXPORT int execle(const char *file, const char *first, ...) {
    ARGUMENT_LIST(argv, environment, first);
    environment = va_arg(arguments, char *const *);
    va_end(arguments);
    return execve(file, argv, environment);
}

/* ---- fork: the child is the parent's n-th ---- */

/* All active calls of system(): the first one saves the signal handlers, the last restores them. */
static struct {
    pthread_mutex_t lock;
    unsigned calls;
    struct sigaction interrupt, quit;
} shells = {.lock = PTHREAD_MUTEX_INITIALIZER};

void number_child(char child[CAPSULE_PATH_SIZE]) {
    struct thread *self = this_thread();
    /* A pool that starts workers again and again must not outlive a failed replay. */
    if (settings.journal && atomic_load(&settings.journal->failed)) end_whole_run();
    capsule_path_child(child, self->process, self->path, ++self->forks);
}

/* A program that is started by other means has no number. */
static void name_unnumbered(void) {
    char path[CAPSULE_PATH_SIZE];
    capsule_path_unnumbered(path, settings.process);
    name_in_environment(path);
}

/* A page that the kernel wipes in the child of a fork, however that was made. */
static volatile bool *seen;

bool was_forked_unseen(void) { return seen && !*seen; }

void become_process(const char *process) {
    /* This comes first: otherwise this_thread() would treat the process as one that was forked
     * unseen, and begin again. */
    if (seen) *seen = true;
    strcpy(settings.process, process);
    become(process, CAPSULE_ROOT_PATH);
    settings.clock_passed = this_thread()->passed;
    own_environment();
    name_unnumbered();
    stop_telling();
    pthread_mutex_init(&shells.lock, NULL); /* of a thread that only the parent has */
    shells.calls = 0;
}

static __thread char forked[CAPSULE_PATH_SIZE];

static void before_fork(void) { number_child(forked); }
static void in_forked_child(void) { become_process(forked); }

/* Handlers are used because daemon() and forkpty() fork inside the C library. */
void watch_forks(void) {
    pthread_atfork(before_fork, NULL, in_forked_child);
    void *page = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED || madvise(page, 1, MADV_WIPEONFORK) != 0) return;
    seen = page;
    *seen = true;
}

EXPORT pid_t _Fork(void) { /* which runs no handlers */
    attach();
    before_fork();
    pid_t pid = real._Fork();
    if (pid == 0) in_forked_child();
    return pid;
}

struct cloned {
    int (*function)(void *);
    void *argument;
    char process[CAPSULE_PATH_SIZE];
};

static int begin_cloned(void *argument) {
    const struct cloned *cloned = argument;
    become_process(cloned->process);
    return cloned->function(cloned->argument);
}

EXPORT int clone(int (*function)(void *), void *stack, int flags, void *argument, ...) {
    attach();
    va_list arguments;
    va_start(arguments, argument);
    void *a = va_arg(arguments, void *), *b = va_arg(arguments, void *),
         *c = va_arg(arguments, void *);
    va_end(arguments);
    if (flags & CLONE_VM) return real.clone(function, stack, flags, argument, a, b, c);
    struct cloned cloned = {function, argument, ""}; /* the child has a copy of this stack */
    number_child(cloned.process);
    return real.clone(begin_cloned, stack, flags, &cloned, a, b, c);
}

/* ---- vfork: the child runs in the parent's memory, on the parent's stack ---- */

static __thread struct thread suspended; /* the parent, until the child has gone */
static __thread bool nested;             /* `suspended` is taken: this child gets its own memory */

/* Become the child beforehand; return the number of the system call that makes it. */
__attribute__((used)) static long before_vfork(void) {
    struct thread *self = this_thread();
    before_fork();
    nested = self->vforked;
    if (nested) return SYS_fork;
    suspended = *self;
    become(forked, CAPSULE_ROOT_PATH);
    self->vforked = true;
    return SYS_vfork;
}

__attribute__((used)) static int after_vfork(long result) {
    if (nested && result == 0) in_forked_child();
    if (!nested && result != 0) *this_thread() = suspended;
    nested = false;
    return (int)checked(result);
}

/* The return address is kept in a register, which the child cannot change: the child will have
 * overwritten this stack when the parent continues. */
__asm__(".globl vfork\n"
        ".type vfork, @function\n"
        "vfork:\n"
        /* At a call the ABI has the stack aligned to 16 bytes. */
        "    sub $8, %rsp\n"
        "    call before_vfork\n"
        "    add $8, %rsp\n"
        "    pop %rdi\n"
        "    syscall\n"
        "    push %rdi\n"
        "    mov %rax, %rdi\n"
        "    sub $8, %rsp\n"
        "    call after_vfork\n"
        "    add $8, %rsp\n"
        "    ret\n"
        ".size vfork, . - vfork\n");

/* ---- programs started in one call: a fork and an exec ---- */

static void number_program(char path[CAPSULE_PATH_SIZE]) {
    number_child(path);
    capsule_path_exec(path, path);
}

static int spawn(bool search, pid_t *pid, const char *file, const void *actions,
                 const void *attributes, char *const argv[], char *const given[]) {
    char path[CAPSULE_PATH_SIZE];
    number_program(path);
    ENVIRONMENT(environment, given, path);
    return (search ? real.posix_spawnp : real.posix_spawn)(pid, file, actions, attributes, argv,
                                                           environment);
}

EXPORT int posix_spawn(pid_t *restrict pid, const char *restrict file,
                       const posix_spawn_file_actions_t *actions,
                       const posix_spawnattr_t *restrict attributes, char *const argv[restrict],
                       char *const given[restrict]) {
    return spawn(false, pid, file, actions, attributes, argv, given);
}

EXPORT int posix_spawnp(pid_t *restrict pid, const char *restrict file,
                        const posix_spawn_file_actions_t *actions,
                        const posix_spawnattr_t *restrict attributes, char *const argv[restrict],
                        char *const given[restrict]) {
    return spawn(true, pid, file, actions, attributes, argv, given);
}

static int wait_for(pid_t pid) {
    int status;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) return -1;
    return status;
}

/* `defaults` receives those that the shell is not to ignore. */
static void ignore_interrupts(sigset_t *defaults) {
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    pthread_mutex_lock(&shells.lock);
    if (shells.calls++ == 0) {
        sigaction(SIGINT, &ignore, &shells.interrupt);
        sigaction(SIGQUIT, &ignore, &shells.quit);
    }
    sigemptyset(defaults);
    if (shells.interrupt.sa_handler != SIG_IGN) sigaddset(defaults, SIGINT);
    if (shells.quit.sa_handler != SIG_IGN) sigaddset(defaults, SIGQUIT);
    pthread_mutex_unlock(&shells.lock);
}

static void restore_interrupts(void) {
    pthread_mutex_lock(&shells.lock);
    if (--shells.calls == 0) {
        sigaction(SIGINT, &shells.interrupt, NULL);
        sigaction(SIGQUIT, &shells.quit, NULL);
    }
    pthread_mutex_unlock(&shells.lock);
}

/* The function of POSIX, without cancellation. The shell that the C library's own function starts
 * would not be numbered. */
EXPORT int system(const char *command) {
    char *argv[] = {"sh", "-c", (char *)(uintptr_t)command, NULL};
    if (!command) return system("exit 0") == 0;
    sigset_t child, before, defaults;
    ignore_interrupts(&defaults);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &child, &before);

    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setsigmask(&attributes, &before);
    pid_t pid;
    int error = posix_spawn(&pid, "/bin/sh", NULL, &attributes, argv, environ);
    posix_spawnattr_destroy(&attributes);
    int status = error ? 127 << 8 : wait_for(pid);

    pthread_sigmask(SIG_SETMASK, &before, NULL);
    restore_interrupts();
    return status;
}

EXPORT FILE *popen(const char *command, const char *mode) {
    char path[CAPSULE_PATH_SIZE];
    number_program(path);
    lend_environment(path);
    FILE *file = real.popen(command, mode);
    int error = errno;
    name_unnumbered();
    take_environment_back();
    errno = error;
    return file;
}

/* The shells that wordexp() starts have no numbers. */
EXPORT int wordexp(const char *restrict words, wordexp_t *restrict expanded, int flags) {
    char path[CAPSULE_PATH_SIZE];
    this_thread(); /* a child that was forked unseen has another path from now on */
    capsule_path_unnumbered(path, settings.process);
    lend_environment(path);
    int error = real.wordexp(words, expanded, flags);
    take_environment_back();
    return error;
}

/* ---- threads ---- */

struct started {
    void *(*function)(void *);
    void *argument;
    int64_t passed;
    cpu_set_t affinity;
    char process[CAPSULE_PATH_SIZE];
    char path[CAPSULE_PATH_SIZE];
};

static void *begin_thread(void *argument) {
    struct started started = *(struct started *)argument;
    free(argument);
    become(started.process, started.path);
    this_thread()->passed = started.passed;
    this_thread()->affinity = started.affinity;
    return started.function(started.argument);
}

EXPORT int pthread_create(pthread_t *restrict made, const pthread_attr_t *restrict attributes,
                          void *(*function)(void *), void *restrict argument) {
    struct thread *self = this_thread();
    struct started *started = malloc(sizeof *started);
    if (!started) return EAGAIN;
    started->function = function;
    started->argument = argument;
    started->passed = self->passed;
    started->affinity = self->affinity;
    strcpy(started->process, self->process);
    capsule_path_thread(started->path, self->path, ++self->threads);
    int error = real.pthread_create(made, attributes, begin_thread, started);
    if (error) {
        /* Unlike a fork that fails, a thread that was not created has taken no number. */
        self->threads--;
        free(started);
    }
    return error;
}

struct started_c11 {
    thrd_start_t function;
    void *argument;
};

static void *begin_c11_thread(void *argument) {
    struct started_c11 started = *(struct started_c11 *)argument;
    free(argument);
    return (void *)(uintptr_t)started.function(started.argument); /* as thrd_join takes it */
}

EXPORT int thrd_create(thrd_t *made, thrd_start_t function, void *argument) {
    struct started_c11 *started = malloc(sizeof *started);
    if (!started) return thrd_nomem;
    *started = (struct started_c11){function, argument};
    int error = pthread_create(made, NULL, begin_c11_thread, started);
    if (error) free(started);
    return error == 0 ? thrd_success : error == ENOMEM ? thrd_nomem : thrd_error;
}
