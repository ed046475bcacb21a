/* capsule-launch: starts a program under controlled randomness and waits for it.
 *
 *     capsule-launch [options] -- PROGRAM ARGUMENTS…
 *
 * It is the parent of the program and adopts whatever the program leaves behind, so that every
 * process of the run is its descendant. See docs/launcher.md. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "account.h"
#include "channel.h"
#include "ending.h"
#include "events.h"
#include "filter.h"
#include "numbers.h"
#include "options.h"
#include "program.h"
#include "supervisor.h"
#include "tasks.h"

#define READ_PERSONALITY 0xffffffff

static const struct options *options;
static int start_channel; /* what the program's process says until it executes it; then -1 */
static bool own_numbers;  /* only descendants take process numbers */

static const int forwarded[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

/* ---- the end of a run ---- */

static void write_report(int status, int outlived) {
    struct document document;
    if (!begin_document(&document, REPORT_NAME))
        fail("CAP-R103", "%s cannot be written: %s", document.path, strerror(errno));
    fprintf(document.file,
            "{\"schema\":\"capsule/launch/v1\",\"mode\":\"%s\",\"clock\":\"%s\",\"supervised\":%s,"
            "\"fixed_addresses\":%s,\"own_numbers\":%s,\"first_process\":%d,\"status\":%d,"
            "\"processes\":%" PRIu64 ",\"outlived\":%d,\"programs\":",
            options->mode_name, options->clock, options->supervised ? "true" : "false",
            options->fixed_addresses ? "true" : "false", own_numbers ? "true" : "false", run.root,
            status, account_processes(), outlived);
    account_write(document.file);
    fputs("}\n", document.file);
    if (!end_document(&document))
        fail("CAP-R103", "%s cannot be written: %s", document.path, strerror(errno));
}

/* End the launcher with `status`, or with the status of a mismatch. As when a container's first
 * process ends, no process of the run outlives the program. */
static _Noreturn void end_run(int status) {
    int outlived = kill_descendants();
    supervisor_end();
    if (channels_mismatch()) status = CAPSULE_MISMATCH_STATUS;
    write_report(status, outlived);
    exit(status);
}

/* ---- the program's environment ---- */

static void set_variable(const char *name, const char *value) {
    if (value ? setenv(name, value, 1) : unsetenv(name))
        fail("CAP-R110", "%s cannot be set: %s", name, strerror(errno));
}

static void set_preloads(void) {
    char list[MAX_PRELOADS * PATH_MAX] = "";
    for (int i = 0; i < options->preload_count; i++) {
        if (i) strcat(list, ":");
        strcat(list, options->preloads[i]);
    }
    if (options->preload_count) set_variable("LD_PRELOAD", list);
}

static void mask_processor(void) {
    static char entries[][64] = CAPSULE_PROCESSOR_MASKS;
    for (unsigned i = 0; i < sizeof entries / sizeof *entries; i++)
        if (putenv(entries[i]))
            fail("CAP-R110", "%s cannot be set: %s", entries[i], strerror(errno));
}

static void prepare_environment(void) {
    char launcher[16], mode[16];
    /* The value has a fixed length, because the size of the environment moves the stack. */
    snprintf(launcher, sizeof launcher, "%010d", getpid());
    snprintf(mode, sizeof mode, "%-7s", options->mode_name);
    set_variable("CAPSULE_ENTROPY", mode);
    set_variable("CAPSULE_ENTROPY_KEY", options->key);
    set_variable("CAPSULE_ENTROPY_DIRECTORY", options->directory);
    set_variable("CAPSULE_ENTROPY_EXHAUSTION", options->exhaustion);
    set_variable("CAPSULE_ENTROPY_PATH", CAPSULE_ROOT_PATH);
    set_variable("CAPSULE_CLOCK", options->clock);
    set_variable("CAPSULE_CLOCK_PASSED", "0000000000000000000"); /* as long as any */
    set_variable("CAPSULE_LISTINGS", options->listings);
    set_variable("CAPSULE_CORES", options->cores);
    set_variable("CAPSULE_LAUNCHER_PID", launcher);
    set_preloads();
    if (options->mode != MODE_SYSTEM) mask_processor();
}

/* The program inherits it; programs without privileges keep it across execve. */
static void fix_addresses(void) {
    int before = personality(READ_PERSONALITY);
    if (before < 0 || personality((unsigned)before | ADDR_NO_RANDOMIZE) < 0 ||
        !(personality(READ_PERSONALITY) & ADDR_NO_RANDOMIZE))
        fail("CAP-R105", "address randomisation cannot be switched off: %s", strerror(errno));
}

/* ---- starting the program ---- */

/* The message of the child before it executes the program, which closes its end of the channel. */
struct start_message {
    enum start_step { FILTER_INSTALLED, FILTER_FAILED, EXECUTION_FAILED } step;
    int error;
};

static void tell(enum start_step step, int error, int descriptor) {
    struct start_message message = {step, error};
    struct iovec part = {&message, sizeof message};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof descriptor)] = {0};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0) {
        header.msg_control = control;
        header.msg_controllen = sizeof control;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        *rights = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof descriptor),
                                   .cmsg_level = SOL_SOCKET,
                                   .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
    }
    if (sendmsg(start_channel, &header, MSG_NOSIGNAL) < 0) _exit(FAILURE_STATUS);
}

/* Read the next message; false when there is none because the program was executed. */
static bool hear(struct start_message *message, int *descriptor) {
    struct iovec part = {message, sizeof *message};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof *descriptor)];
    struct msghdr header = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = control,
                            .msg_controllen = sizeof control};
    ssize_t length = recvmsg(start_channel, &header, MSG_CMSG_CLOEXEC);
    if (length < 0)
        fail("CAP-R110", "no message from the program's process can be received: %s",
             strerror(errno));
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    if (rights) memcpy(descriptor, CMSG_DATA(rights), sizeof *descriptor);
    return length == sizeof *message;
}

static void install_filter(void) {
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
        tell(FILTER_FAILED, errno, -1);
        _exit(FAILURE_STATUS);
    }
    int listener = filter_install();
    tell(listener < 0 ? FILTER_FAILED : FILTER_INSTALLED, errno, listener);
    if (listener < 0) _exit(FAILURE_STATUS);
    close(listener);
}

static _Noreturn void become_program(const sigset_t *signals, pid_t launcher) {
    prctl(PR_SET_DUMPABLE, 1); /* it was the launcher's */
    /* The kernel ends the program with the launcher, however that ends. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* The launcher may have ended before that call. */
    if (getppid() != launcher) _exit(FAILURE_STATUS);
    if (own_numbers) setsid(); /* programs see the numbers of their session and group, too */
    sigprocmask(SIG_SETMASK, signals, NULL);
    /* This comes last, because from here on the calls of this process wait for the supervisor. */
    if (options->supervised) install_filter();
    execvp(options->program[0], options->program);
    tell(EXECUTION_FAILED, errno, -1);
    _exit(FAILURE_STATUS);
}

static void start_channel_ready(struct watch *watch, uint32_t ready) {
    struct start_message message;
    int descriptor;
    (void)watch, (void)ready;
    if (hear(&message, &descriptor))
        fail("CAP-R106", "%s cannot be executed: %s", options->program[0], strerror(message.error));
    close(start_channel);
    start_channel = -1;
    if (!options->supervised) program_await_preloads(run.root, options);
}

static void begin_supervision(void) {
    struct start_message message;
    int listener = -1;
    if (!hear(&message, &listener))
        fail("CAP-R110", "the program's process ended before it executed the program");
    if (message.step == FILTER_FAILED)
        fail("CAP-R104", "system calls cannot be supervised here: %s", strerror(message.error));
    supervisor_begin(options, listener, run.root);
}

/* Each random device that is open in any program needs a descriptor of the launcher. */
static void allow_descriptors(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static void start_program(const sigset_t *signals) {
    static struct watch watch = {start_channel_ready};
    int ends[2];
    pid_t launcher = getpid();
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
        fail("CAP-R110", "no channel to the program's process can be opened: %s", strerror(errno));
    own_numbers = numbers_are_own();
    if (own_numbers) numbers_advance(CAPSULE_FIRST_PROCESS);
    run.root = fork();
    if (run.root < 0)
        fail("CAP-R110", "no process can be started for the program: %s", strerror(errno));
    start_channel = ends[run.root == 0];
    close(ends[run.root != 0]);
    if (run.root == 0) become_program(signals, launcher);
    /* This comes after the fork, so that the limit of the program does not change. */
    allow_descriptors();
    if (options->supervised) begin_supervision();
    events_watch(start_channel, EPOLLIN, &watch);
}

/* ---- waiting ---- */

static int signal_descriptor;

/* Orphans are adopted and reaped here. The run ends when the program ends. */
static void reap(void) {
    int status, end = 0;
    bool ended = false;
    tasks_reaping();
    /* One signal may announce the end of several children. All those that ended before the program,
     * or with it, are reaped before the processes that outlived it are counted. */
    for (pid_t child; (child = waitpid(-1, &status, WNOHANG)) > 0;) {
        if (child != run.root) continue;
        ended = true;
        end = status;
    }
    if (!ended) return;
    if (start_channel >= 0) start_channel_ready(NULL, 0); /* did it become the program? */
    program_check_end(account_first(), options);
    end_run(WIFSIGNALED(end) ? 128 + WTERMSIG(end) : WEXITSTATUS(end));
}

/* The first process is about to start the user's program, and will start no other task. */
static void prepare_numbers(void) {
    static bool prepared;
    if (prepared) return;
    prepared = true;
    if (own_numbers) numbers_advance(CAPSULE_PROGRAM_PROCESS);
    kill(run.root, CAPSULE_NUMBERS_SIGNAL);
}

/* The interposer of the first process waits until the launcher has checked the preloads. */
static void answer_loaded(const struct signalfd_siginfo *signal) {
    if (start_channel >= 0) start_channel_ready(NULL, 0);
    /* A sender can state any process id with sigqueue(3), and none if the kernel lacks memory. */
    bool known = signal->ssi_code == SI_USER && signal->ssi_pid;
    kill(known ? (pid_t)signal->ssi_pid : run.root, CAPSULE_LOADED_SIGNAL);
}

static void signal_ready(struct watch *watch, uint32_t ready) {
    struct signalfd_siginfo signal;
    (void)watch, (void)ready;
    if (read(signal_descriptor, &signal, sizeof signal) != sizeof signal) return;
    if (signal.ssi_signo == SIGCHLD) reap();
    else if (signal.ssi_signo == CAPSULE_NUMBERS_SIGNAL) prepare_numbers();
    else if (signal.ssi_signo == CAPSULE_LOADED_SIGNAL) answer_loaded(&signal);
    else if (signal.ssi_signo == CAPSULE_MISMATCH_SIGNAL) end_run(CAPSULE_MISMATCH_STATUS);
    else kill(run.root, (int)signal.ssi_signo);
}

/* Block the signals that are handled here; `before` receives the mask that the program gets. */
static void take_signals(sigset_t *before) {
    static struct watch watch = {signal_ready};
    sigset_t taken;
    sigemptyset(&taken);
    for (unsigned i = 0; i < sizeof forwarded / sizeof *forwarded; i++)
        sigaddset(&taken, forwarded[i]);
    sigaddset(&taken, SIGCHLD);
    sigaddset(&taken, CAPSULE_MISMATCH_SIGNAL);
    sigaddset(&taken, CAPSULE_NUMBERS_SIGNAL);
    sigaddset(&taken, CAPSULE_LOADED_SIGNAL);
    sigset_t blocked = taken;
    sigaddset(&blocked, SIGPIPE); /* a device's pipe may lose its reader while it is filled */
    sigprocmask(SIG_BLOCK, &blocked, before);
    signal_descriptor = signalfd(-1, &taken, SFD_CLOEXEC);
    if (signal_descriptor < 0)
        fail("CAP-R110", "no signal descriptor can be opened: %s", strerror(errno));
    events_watch(signal_descriptor, EPOLLIN, &watch);
}

static void time_is_up(struct watch *watch, uint32_t ready) {
    (void)watch, (void)ready;
    fail("CAP-R114", "the run took longer than %" PRId64 " seconds", options->time_limit);
}

/* Capsule ends a run earlier. This limit is for a run whose Capsule process was killed. */
static void limit_time(void) {
    static struct watch watch = {time_is_up};
    struct itimerspec limit = {.it_value.tv_sec = options->time_limit};
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    if (timer < 0 || timerfd_settime(timer, 0, &limit, NULL) != 0)
        fail("CAP-R110", "the time limit cannot be set: %s", strerror(errno));
    events_watch(timer, EPOLLIN, &watch);
}

int main(int count, char **words) {
    sigset_t signals;
    options = options_read(count, words);
    prepare_environment();
    if (options->supervised) channels_begin(options);
    if (options->fixed_addresses) fix_addresses();
    if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0)
        fail("CAP-R110", "the launcher cannot become a subreaper: %s", strerror(errno));
    events_begin();
    take_signals(&signals);
    prctl(PR_SET_DUMPABLE, 0); /* the program cannot stop or change the process that limits it */
    start_program(&signals);
    if (options->time_limit) limit_time();
    while (!channels_mismatch()) events_handle_next();
    end_run(CAPSULE_MISMATCH_STATUS);
}
