/* capsule-enclose: starts a program in namespaces of its own, and waits for it.
 *
 *     capsule-enclose [options] -- PROGRAM ARGUMENTS…
 *
 * With --default-signals=FD it makes no namespaces. It closes FD, from which it was executed, and
 * replaces itself by the program, with the default action for every signal: bubblewrap, which
 * starts it, ignores some signals.
 *
 * The program is the first process of its process id namespace: when it ends, for any reason, the
 * kernel kills every process that it started. The program ends when this process ends, and this
 * process ends when its own parent ends. See docs/engines.md. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define REFUSED 88 /* the kernel does not allow this: one line on standard error says what */
#define USAGE 2
#define MAX_BINDS 64
#define PATH_SIZE 4352

#define TEMPORARY "/tmp"    /* of the program; before, where the new root is put together */
#define MACHINE "/.machine" /* the machine's root, until the new one is complete */

#ifndef MOUNT_ATTR_RDONLY
#define MOUNT_ATTR_RDONLY 0x00000001
struct mount_attr {
    unsigned long long attr_set, attr_clr, propagation, userns_fd;
};
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#ifndef AT_RECURSIVE
#define AT_RECURSIVE 0x8000
#endif

static struct {
    const char *temporary;
    const char *signals; /* number of the descriptor to close; NULL: make namespaces */
    bool probe;
    struct bind {
        const char *from, *to;
        bool writable;
    } binds[MAX_BINDS];
    int bind_count;
    char **program;
} options = {.temporary = "64"};

static _Noreturn void give_up(const char *format, ...) __attribute__((format(printf, 1, 2)));
static _Noreturn void give_up(const char *format, ...) {
    int error = errno;
    va_list arguments;
    va_start(arguments, format);
    fputs("capsule-enclose: ", stderr);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, ": %s\n", strerror(error));
    exit(REFUSED);
}

/* ---- options ---- */

static const struct option long_options[] = {
    {"temporary", required_argument, NULL, 't'}, /* size of /tmp, /var/tmp and /dev/shm in MiB */
    {"read-only", required_argument, NULL, 'r'}, /* FROM=TO: a folder, and its path in the run */
    {"writable", required_argument, NULL, 'w'},  /* FROM=TO */
    {"probe", no_argument, NULL, 'p'},           /* execute nothing */
    {"default-signals", required_argument, NULL, 's'},
    {NULL, 0, NULL, 0},
};

static _Noreturn void misused(const char *what) {
    fprintf(stderr, "capsule-enclose: %s\n", what);
    exit(USAGE);
}

/* TO is a folder in the root, whose other entries are those of the machine; or it exists below a
 * folder that was given earlier. */
static void add_bind(char *text, bool writable) {
    char *separator = NULL; /* the last one: only FROM may contain others */
    for (char *at = text; (at = strstr(at, "=/")); at++) separator = at;
    if (!separator || text[0] != '/') misused("a folder must be given as /FROM=/NAME");
    if (options.bind_count == MAX_BINDS) misused("too many folders");
    *separator = 0;
    char *from = realpath(text, NULL);
    if (from == NULL) misused("a folder does not exist");
    options.binds[options.bind_count++] = (struct bind){from, separator + 1, writable};
}

static void read_options(int count, char **words) {
    for (int option; (option = getopt_long(count, words, "+", long_options, NULL)) != -1;) {
        switch (option) {
        case 't': options.temporary = optarg; break;
        case 'r': add_bind(optarg, false); break;
        case 'w': add_bind(optarg, true); break;
        case 'p': options.probe = true; break;
        case 's': options.signals = optarg; break;
        default: exit(USAGE);
        }
    }
    options.program = words + optind;
    if (!options.probe && optind == count) misused("no program is given");
}

/* ---- namespaces ---- */

static void write_file(const char *path, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void write_file(const char *path, const char *format, ...) {
    char text[64];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    int file = open(path, O_WRONLY | O_CLOEXEC);
    if (file < 0 || write(file, text, (size_t)length) != length)
        give_up("%s cannot be written", path);
    close(file);
}

/* Namespaces require a privilege that any user has in a new user namespace, in which the numbers of
 * the user and the group stay the same. */
static void enter_namespaces(void) {
    const int flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET;
    uid_t user = geteuid();
    gid_t group = getegid();
    if (unshare(flags) == 0) return;
    if (unshare(flags | CLONE_NEWUSER) != 0) give_up("namespaces cannot be created");
    /* Without a privilege, the kernel accepts a map of groups only after this
     * (user_namespaces(7)). */
    write_file("/proc/self/setgroups", "deny");
    write_file("/proc/self/uid_map", "%u %u 1", user, user);
    write_file("/proc/self/gid_map", "%u %u 1", group, group);
}

/* The loopback interface of a new namespace is down at first. */
static void raise_loopback(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int descriptor = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (descriptor < 0 || ioctl(descriptor, SIOCSIFFLAGS, &request) != 0)
        give_up("the loopback interface cannot be started");
    close(descriptor);
}

/* ---- file systems ---- */

static void bind_folder(const char *from, const char *to) {
    char path[PATH_SIZE];
    snprintf(path, sizeof path, MACHINE "%s", from);
    if ((mkdir(to, 0755) != 0 && errno != EEXIST) ||
        mount(path, to, NULL, MS_BIND | MS_REC, NULL) != 0)
        give_up("%s cannot be mounted at %s", from, to);
}

/* Whether an entry of the root is not that of the machine. */
static bool is_replaced(const char *name) {
    static const char *const own[] = {".", "..", "tmp", "proc", NULL};
    for (int i = 0; own[i]; i++)
        if (strcmp(name, own[i]) == 0) return true;
    for (int i = 0; i < options.bind_count; i++)
        if (strcmp(name, options.binds[i].to + 1) == 0) return true;
    return false;
}

/* Show a folder or a link of the machine's root; other kinds of files are not needed. */
static void show_entry(const char *name) {
    char from[PATH_SIZE], target[PATH_SIZE];
    struct stat facts;
    snprintf(from, sizeof from, MACHINE "/%s", name);
    if (lstat(from, &facts) != 0) return;
    if (S_ISDIR(facts.st_mode)) bind_folder(from + strlen(MACHINE), from + strlen(MACHINE));
    if (!S_ISLNK(facts.st_mode)) return;
    ssize_t length = readlink(from, target, sizeof target - 1);
    target[length < 0 ? 0 : length] = 0;
    if (symlink(target, from + strlen(MACHINE)) != 0)
        give_up("the link %s cannot be copied", from + strlen(MACHINE));
}

static void show_machine(void) {
    DIR *directory = opendir(MACHINE);
    if (directory == NULL) give_up("the machine's root cannot be read");
    for (struct dirent *entry; (entry = readdir(directory));)
        if (!is_replaced(entry->d_name)) show_entry(entry->d_name);
    closedir(directory);
}

/* Make a mount read-only or writable, together with all mounts below it. */
static void set_read_only(const char *path, bool read_only) {
    /* mount_setattr(2), since Linux 5.12, changes a whole tree. A remount changes a single
     * mount. */
    struct mount_attr change = {.attr_set = read_only ? MOUNT_ATTR_RDONLY : 0,
                                .attr_clr = read_only ? 0 : MOUNT_ATTR_RDONLY};
    if (syscall(SYS_mount_setattr, AT_FDCWD, path, AT_RECURSIVE, &change, sizeof change) != 0)
        give_up("%s cannot be made %s", path, read_only ? "read-only" : "writable");
}

static void mount_temporary(const char *path) {
    char data[64];
    struct stat facts;
    if (lstat(path, &facts) != 0 || !S_ISDIR(facts.st_mode)) return;
    snprintf(data, sizeof data, "size=%sm,mode=1777", options.temporary);
    if (mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, data) != 0)
        give_up("no file system can be mounted at %s", path);
}

/* Replace the machine's root by one in memory, below which the machine's root remains mounted. */
static void replace_root(void) {
    /* In a slave tree, the mounts of this namespace are not visible to the machine. */
    if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) != 0 ||
        mount("tmpfs", TEMPORARY, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755") != 0 ||
        mkdir(TEMPORARY MACHINE, 0700) != 0 ||
        syscall(SYS_pivot_root, TEMPORARY, TEMPORARY MACHINE) != 0 || chdir("/") != 0)
        give_up("the root cannot be replaced");
}

static void build_root(void) {
    replace_root();
    show_machine();
    for (int i = 0; i < options.bind_count; i++)
        bind_folder(options.binds[i].from, options.binds[i].to);
    /* In a user namespace, the kernel mounts a new /proc only while the machine's /proc is still
     * visible, here below MACHINE. */
    if (mkdir("/proc", 0555) != 0 || mkdir(TEMPORARY, 0755) != 0 ||
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) != 0)
        give_up("no new /proc can be mounted");
    if (umount2(MACHINE, MNT_DETACH) != 0 || rmdir(MACHINE) != 0)
        give_up("the machine's root cannot be unmounted");
    set_read_only("/", true);
    set_read_only("/proc", false);
    for (int i = 0; i < options.bind_count; i++)
        if (options.binds[i].writable) set_read_only(options.binds[i].to, false);
    /* These are mounted after the rest was made read-only, so they stay writable. */
    mount_temporary(TEMPORARY);
    mount_temporary("/var/tmp");
    mount_temporary("/dev/shm");
}

/* ---- processes ---- */

/* Have the kernel end this process with its parent, which holds the other end of `alive`. */
static void end_with_parent(int alive) {
    struct pollfd end = {.fd = alive};
    /* The parent may have ended before this call. getppid() returns 0 here, because the parent is
     * in another namespace, so the state of the pipe is used instead. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (poll(&end, 1, 0) != 0) exit(REFUSED);
}

static _Noreturn void execute_enclosed(int alive, const sigset_t *signals) {
    end_with_parent(alive);
    build_root();
    raise_loopback();
    if (sethostname("capsule", strlen("capsule")) != 0) give_up("the host name cannot be set");
    if (chdir(TEMPORARY) != 0) give_up("%s cannot be entered", TEMPORARY);
    if (options.probe) exit(0);
    sigprocmask(SIG_SETMASK, signals, NULL);
    execvp(options.program[0], options.program);
    give_up("%s cannot be executed", options.program[0]);
}

static _Noreturn void execute_with_default_signals(void) {
    for (int number = 1; number < NSIG; number++) signal(number, SIG_DFL);
    close(atoi(options.signals));
    execvp(options.program[0], options.program);
    give_up("%s cannot be executed", options.program[0]);
}

/* Pass signals on to the program until it ends. */
static _Noreturn void wait_for_program(pid_t program, const sigset_t *taken) {
    for (int status;;) {
        int number = sigwaitinfo(taken, NULL);
        if (number > 0 && number != SIGCHLD) kill(program, number);
        if (waitpid(program, &status, WNOHANG) != program) continue;
        exit(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
    }
}

int main(int count, char **words) {
    static const int passed_on[] = {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1};
    sigset_t taken, before;
    int alive[2];
    pid_t parent = getppid();
    read_options(count, words);
    if (options.signals) execute_with_default_signals();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* The parent may have ended before that call. */
    if (getppid() != parent) return REFUSED;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || pipe2(alive, O_CLOEXEC) != 0)
        give_up("the program cannot be restricted");
    sigemptyset(&taken);
    for (unsigned i = 0; i < sizeof passed_on / sizeof *passed_on; i++)
        sigaddset(&taken, passed_on[i]);
    sigprocmask(SIG_BLOCK, &taken, &before);
    enter_namespaces();
    pid_t program = fork();
    if (program < 0) give_up("no process can be started");
    close(alive[program == 0]);
    if (program == 0) execute_enclosed(alive[0], &before);
    wait_for_program(program, &taken);
}
