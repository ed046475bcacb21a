/* What programs rarely do, and must be able to do under the interposer. One word says what; each
 * way prints "well" or what it drew. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <threads.h>
#include <unistd.h>
#include <wordexp.h>

#include "descriptors.h"

#define THREADS 8

static uint64_t draw(void) {
    uint64_t value = 0;
    if (getrandom(&value, sizeof value, 0) != sizeof value) abort();
    return value;
}

static void show(const char *name, uint64_t value) { printf("%s %016lx\n", name, value); }

static bool ended_well(pid_t child) {
    int status;
    return waitpid(child, &status, 0) == child && status == 0;
}

/* ---- processes ---- */

static void *call_system(void *command) {
    if (system(command) != 0) abort();
    return NULL;
}

/* The first call ends before the second one does. */
static void many_systems(void) {
    pthread_t thread;
    struct sigaction interrupt, quit;
    signal(SIGINT, SIG_DFL); /* ignored by whoever is started in the background of a shell */
    signal(SIGQUIT, SIG_DFL);
    pthread_create(&thread, NULL, call_system, "sleep 0.4");
    usleep(200000);
    call_system("sleep 0.4");
    pthread_join(thread, NULL);
    sigaction(SIGINT, NULL, &interrupt);
    sigaction(SIGQUIT, NULL, &quit);
    bool well = interrupt.sa_handler == SIG_DFL && quit.sa_handler == SIG_DFL;
    puts(well ? "well" : "interrupts stay ignored");
}

/* A fork that no library can see. */
static void hidden_fork(void) {
    long child = SYS_fork;
    int ends[2];
    uint64_t theirs;
    show("before", draw());
    fflush(stdout);
    if (pipe(ends) != 0) abort();
    __asm__ volatile("syscall" : "+a"(child) : : "rcx", "r11", "memory");
    if (child == 0) {
        theirs = draw();
        _exit(write(ends[1], &theirs, sizeof theirs) != sizeof theirs);
    }
    if (read(ends[0], &theirs, sizeof theirs) != sizeof theirs || !ended_well((pid_t)child))
        abort();
    show("child", theirs);
    show("parent", draw());
}

#define ASK "od -An -v -tx1 -N8 /dev/urandom | tr -d ' '"

static void ask_shell(const char *name) {
    char line[64];
    FILE *pipe = popen(ASK, "r");
    if (!fgets(line, sizeof line, pipe) || pclose(pipe) != 0) abort();
    printf("%s %s", name, line);
}

/* Shells that the C library starts, of a program that has removed our settings. */
static void lost_environment(void) {
    wordexp_t words;
    unsetenv("LD_PRELOAD");
    ask_shell("unset");
    if (wordexp("$(" ASK ")", &words, 0) != 0) abort();
    printf("words %s\n", words.we_wordv[0]);
    if (getenv("LD_PRELOAD") || !getenv("CAPSULE_ENTROPY")) abort();
    clearenv();
    ask_shell("cleared");
    if (environ) abort();
}

static bool has(const char *name, const char *value) {
    return getenv(name) && !strcmp(getenv(name), value);
}

/* Variables that the C library sets while its shells have our settings. */
static void assigned_words(void) {
    wordexp_t words;
    setenv("EMPTY", "", 1);
    setenv("KEPT", "kept", 1);
    unsetenv("LD_PRELOAD");
    if (wordexp("${EMPTY:=full}", &words, 0) != 0) abort();
    bool well = has("EMPTY", "full");
    if (wordexp("${KEPT:=lost} ${NEW:=new} $(echo \"$NEW\")", &words, 0) != 0) abort();
    well = well && words.we_wordc == 3 && !strcmp(words.we_wordv[2], "new");
    well = well && has("NEW", "new") && has("KEPT", "kept") && !getenv("LD_PRELOAD");
    setenv("AFTER", "after", 1);
    well = well && has("NEW", "new") && has("AFTER", "after");
    clearenv();
    if (wordexp("${NEW:=x}", &words, 0) != 0) abort();
    well = well && has("NEW", "x") && environ[0] && !environ[1];
    puts(well ? "well" : "a variable is lost");
}

/* ---- threads ---- */

static int draw_in_thread(void *value) {
    *(uint64_t *)value = draw();
    return 7;
}

static void c11_threads(void) {
    thrd_t made[THREADS];
    uint64_t values[THREADS];
    for (int i = 0; i < THREADS; i++)
        if (thrd_create(&made[i], draw_in_thread, &values[i]) != thrd_success) abort();
    for (int i = 0, result; i < THREADS; i++)
        if (thrd_join(made[i], &result) != thrd_success || result != 7) abort();
    for (int i = 0; i < THREADS; i++) show("thread", values[i]);
}

/* ---- descriptors and arguments ---- */

/* The number of a file that was read, and was closed unseen, becomes that of a device. */
static void reused_number(const char *self) {
    uint64_t value;
    int device = open("/dev/urandom", O_RDONLY), file = open(self, O_RDONLY);
    if (read(file, &value, sizeof value) != sizeof value) abort();
    if (syscall(SYS_close, file) != 0 || dup(device) != file) abort();
    if (read(file, &value, sizeof value) != sizeof value) abort();
    show("read", value);
    if (pread(file, &value, sizeof value, 0) != sizeof value) abort();
    show("pread", value);
}

static void read_number(const char *name, int fd) {
    uint64_t value = 0;
    ssize_t size = read(fd, &value, sizeof value);
    if (name && size != sizeof value) abort();
    if (name) show(name, value);
}

/* The number of something else, which the C library closed, becomes that of a device that was
 * opened under another name. */
static void stale_numbers(const char *self) {
    char link[] = "link-XXXXXX";
    if (!mktemp(link) || symlink("/dev/urandom", link) != 0) abort();
    int device = open(link, O_RDONLY), number;
    FILE *file = popen("true", "r");
    read_number(NULL, number = fileno(file));
    if (pclose(file) != 0 || pass(device) != number) abort();
    read_number("pclose", number);
    close(number);

    DIR *folder = opendir(".");
    read_number(NULL, number = dirfd(folder));
    if (closedir(folder) != 0 || pass(device) != number) abort();
    read_number("closedir", number);
    close(number);

    file = fopen(self, "r");
    read_number(NULL, number = fileno(file));
    if (!(file = freopen(link, "r", file)) || fileno(file) != number) abort();
    read_number("freopen", number);
    fclose(file);

    for (int i = 0; i < 2; i++) {
        number = open(self, O_RDONLY);
        read_number(NULL, number);
        if (syscall(SYS_close, number) != 0) abort();
        if ((i ? fcntl(device, F_DUPFD, number) : dup(device)) != number) abort();
        read_number(i ? "F_DUPFD" : "dup", number);
        close(number);
    }
    unlink(link);
}

static void many_streams(void) {
    FILE *streams[200];
    for (int i = 0; i < 200; i++)
        if (!(streams[i] = fopen("/dev/urandom", "r")) || fgetc(streams[i]) == EOF) abort();
    for (int i = 0; i < 200; i++)
        for (int j = 0; j < i; j++)
            if (fileno(streams[i]) == fileno(streams[j])) abort();
    for (int i = 0; i < 200; i++) fclose(streams[i]);
    puts("well");
}

static void zone_alone(void) {
    struct timeval *volatile nothing = NULL;
    struct timezone zone = {1, 1};
    bool well = gettimeofday(nothing, &zone) == 0 && syscall(SYS_gettimeofday, nothing, &zone) == 0;
    puts(well ? "well" : "it is an error");
}

static void no_folder(void) {
    DIR *volatile none = NULL;
    bool well = closedir(none) == -1 && errno == EINVAL;
    well = well && !fdopendir(-1) && errno == EBADF && !opendir("") && errno == ENOENT;
    puts(well ? "well" : "it was closed");
}

static void own_position(const char *self) {
    char bytes[8];
    struct iovec part = {bytes, sizeof bytes};
    int fd = open(self, O_RDONLY);
    bool well = preadv2(fd, &part, 1, -1, 0) == 8 && preadv2(fd, &part, 1, -1, 0) == 8 &&
                lseek(fd, 0, SEEK_CUR) == 16 && preadv2(fd, &part, 1, 4, 0) == 8 &&
                !memcmp(bytes, "\2\1\1", 3); /* of an ELF file */
    well = well && preadv(fd, &part, 1, -1) == -1 && errno == EINVAL;
    puts(well ? "well" : "it was read elsewhere");
}

/* Linux before 5.14 has no MADV_POPULATE_WRITE, by which the journal asks for room. */
static void old_kernel(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 23, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        abort();
    errno = 0;
    for (int i = 0; i < 1000; i++) draw();
    puts(errno ? strerror(errno) : "well");
}

static void bad_pointer(void) {
    char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *bad = (void *)8;
    int device = open("/dev/urandom", O_RDONLY);
    struct iovec parts[] = {{pages, 8}, {bad, 8}};
    bool well = getrandom(bad, 16, 0) == -1 && errno == EFAULT;
    errno = 0;
    well = well && getentropy(bad, 16) == -1 && errno == EFAULT;
    errno = 0;
    well = well && syscall(SYS_getrandom, bad, 16, 0) == -1 && errno == EFAULT;
    errno = 0;
    well = well && read(device, bad, 16) == -1 && errno == EFAULT;
    errno = 0;
    well = well && readv(device, parts + 1, 1) == -1 && errno == EFAULT;
    well = well && readv(device, parts, 2) == 8 && getrandom(bad, 0, 0) == 0;
    if (mprotect(pages + 4096, 4096, PROT_READ) != 0) abort();
    well = well && getrandom(pages + 4080, 64, 0) == 16;
    puts(well ? "well" : "it was written to");
}

#define FAULT(...)                                                                                 \
    if (errno = 0, syscall(__VA_ARGS__) != -1 || errno != EFAULT)                                  \
    printf("%s gives error %d\n", #__VA_ARGS__, errno)

static void read_from(const void *bad) {
    static int word;
    static struct epoll_event event;
    sigset_t none;
    sigemptyset(&none);
    int timer = timerfd_create(CLOCK_REALTIME, 0), set = epoll_create1(0);
    FAULT(SYS_clock_nanosleep, CLOCK_REALTIME, TIMER_ABSTIME, bad, NULL);
    FAULT(SYS_ppoll, NULL, 0, bad, NULL, 8);
    FAULT(SYS_select, 0, NULL, NULL, NULL, bad);
    FAULT(SYS_pselect6, 0, NULL, NULL, NULL, bad, NULL);
    FAULT(SYS_epoll_pwait2, set, &event, 1, bad, NULL, 8);
    FAULT(SYS_rt_sigtimedwait, &none, NULL, bad, 8);
    FAULT(SYS_futex, &word, FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME, 0, bad, NULL, 1);
    FAULT(SYS_timerfd_settime, timer, TFD_TIMER_ABSTIME, bad, NULL);
    FAULT(SYS_clone3, bad, 64);
    close(timer);
    close(set);
}

static void write_to(void *bad) {
    struct timeval now;
    FAULT(SYS_clock_gettime, CLOCK_REALTIME, bad);
    FAULT(SYS_clock_gettime, CLOCK_MONOTONIC, bad);
    FAULT(SYS_gettimeofday, bad, NULL);
    FAULT(SYS_gettimeofday, &now, bad);
    FAULT(SYS_time, bad);
    FAULT(SYS_getcpu, bad, NULL);
}

/* The kernel tests the pointers of calls by number; the functions of the same names use them. */
static void bad_times(void) {
    char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct timespec now;
    if (pages == MAP_FAILED || mprotect(pages + 4096, 4096, PROT_NONE) != 0) abort();
    read_from((void *)8);
    read_from(pages + 4096);
    read_from(pages + 4096 - 8); /* the first half can be read */
    if (mprotect(pages, 4096, PROT_READ) != 0) abort();
    write_to((void *)8);
    write_to(pages);
    bool well = syscall(SYS_clock_gettime, CLOCK_REALTIME, &now) == 0 &&
                syscall(SYS_gettimeofday, NULL, NULL) == 0 && syscall(SYS_time, NULL) > 0;
    well = well && syscall(SYS_clock_gettime, 99, &now) == -1 && errno == EINVAL;
    puts(well ? "well" : "good pointers are an error");
}

static void *open_pipe(void *path) {
    open(path, O_RDONLY);
    return NULL;
}

/* A thread that waits until a pipe has a writer can be cancelled. */
static void cancel_open(void) {
    char path[] = "pipe-XXXXXX";
    pthread_t thread;
    void *result;
    if (!mktemp(path) || mkfifo(path, 0600) != 0) abort();
    pthread_create(&thread, NULL, open_pipe, path);
    usleep(100000);
    pthread_cancel(thread);
    alarm(5);
    pthread_join(thread, &result);
    unlink(path);
    puts(result == PTHREAD_CANCELED ? "well" : "it was opened");
}

/* How programs find out whether the kernel has clone3. */
static void probe_clone3(void) {
    long result = syscall(SYS_clone3, NULL, 0);
    puts(result == -1 && (errno == EINVAL || errno == ENOSYS) ? "well" : "it was made");
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!strcmp(what, "many-systems")) many_systems();
    else if (!strcmp(what, "hidden-fork")) hidden_fork();
    else if (!strcmp(what, "c11-threads")) c11_threads();
    else if (!strcmp(what, "reused-number")) reused_number(words[0]);
    else if (!strcmp(what, "stale-numbers")) stale_numbers(words[0]);
    else if (!strcmp(what, "lost-environment")) lost_environment();
    else if (!strcmp(what, "assigned-words")) assigned_words();
    else if (!strcmp(what, "many-streams")) many_streams();
    else if (!strcmp(what, "zone-alone")) zone_alone();
    else if (!strcmp(what, "no-folder")) no_folder();
    else if (!strcmp(what, "bad-pointer")) bad_pointer();
    else if (!strcmp(what, "bad-times")) bad_times();
    else if (!strcmp(what, "own-position")) own_position(words[0]);
    else if (!strcmp(what, "old-kernel")) old_kernel();
    else if (!strcmp(what, "cancel-open")) cancel_open();
    else if (!strcmp(what, "probe-clone3")) probe_clone3();
    else return 2;
    return 0;
}
