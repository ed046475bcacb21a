/* Asks for randomness in every way that the interposer covers; one line each. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <wordexp.h>

#include "descriptors.h"

#define SIZE 8

extern char **environ;
static const char *self;

static void show(const char *name, const void *bytes) {
    char line[128];
    int length = snprintf(line, sizeof line, "%s ", name);
    for (int i = 0; i < SIZE; i++)
        length += snprintf(line + length, 3, "%02x", ((const uint8_t *)bytes)[i]);
    line[length++] = '\n';
    if (write(1, line, (size_t)length) != length) abort();
}

static void show_getrandom(const char *name) {
    uint8_t bytes[SIZE] = {0};
    if (getrandom(bytes, SIZE, 0) != SIZE) abort();
    show(name, bytes);
}

static void show_read(const char *name, int fd) {
    uint8_t bytes[SIZE] = {0};
    if (fd < 0 || read(fd, bytes, SIZE) != SIZE) {
        printf("%s failed\n", name);
        abort();
    }
    show(name, bytes);
}

/* ---- functions ---- */

static void functions(void) {
    uint8_t bytes[SIZE];
    show_getrandom("getrandom");
    if (getentropy(bytes, SIZE) != 0) abort();
    show("getentropy", bytes);
    if (syscall(SYS_getrandom, bytes, SIZE, 0) != SIZE) abort();
    show("syscall", bytes);

    void *(*buffer)(void *, size_t) =
        (void *(*)(void *, size_t))dlsym(RTLD_DEFAULT, "arc4random_buf");
    uint32_t (*word)(void) = (uint32_t (*)(void))dlsym(RTLD_DEFAULT, "arc4random");
    uint32_t (*below)(uint32_t) = (uint32_t (*)(uint32_t))dlsym(RTLD_DEFAULT, "arc4random_uniform");
    buffer(bytes, SIZE);
    show("arc4random_buf", bytes);
    uint32_t words[2] = {word(), below(UINT32_MAX)};
    show("arc4random", words);
    if (below(10) >= 10 || below(1) != 0) abort();

    unsigned (*device)(void *) =
        (unsigned (*)(void *))dlsym(RTLD_DEFAULT, "_ZNSt13random_device9_M_getvalEv");
    words[0] = device(NULL);
    words[1] = device(NULL);
    show("random_device", words);
}

/* ---- devices ---- */

int __open_2(const char *, int);
int __openat64_2(int, const char *, int);
ssize_t __read_chk(int, void *, size_t, size_t);
ssize_t __pread64_chk(int, void *, size_t, off_t, size_t);

static void descriptors(void) {
    uint8_t bytes[SIZE];
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    show_read("open", fd);
    show_read("open random", open("/dev/random", O_RDONLY));
    show_read("open64", open64("/dev/urandom", O_RDONLY));
    show_read("openat", openat(AT_FDCWD, "/dev/urandom", O_RDONLY));
    show_read("openat64", openat64(AT_FDCWD, "/dev/urandom", O_RDONLY));
    show_read("__open_2", __open_2("/dev/urandom", O_RDONLY));
    show_read("__openat64_2", __openat64_2(AT_FDCWD, "/dev/urandom", O_RDONLY));
    show_read("relative", openat(open("/dev", O_RDONLY | O_DIRECTORY), "urandom", O_RDONLY));
    if (pread(fd, bytes, SIZE, 100) != SIZE) abort();
    show("pread", bytes);
    if (__read_chk(fd, bytes, SIZE, sizeof bytes) != SIZE) abort();
    show("__read_chk", bytes);
    if (__pread64_chk(fd, bytes, SIZE, 0, sizeof bytes) != SIZE) abort();
    show("__pread64_chk", bytes);
    struct iovec parts[2] = {{bytes, 3}, {bytes + 3, SIZE - 3}};
    if (readv(fd, parts, 2) != SIZE) abort();
    show("readv", bytes);
    if (preadv(fd, parts, 2, 0) != SIZE) abort();
    show("preadv", bytes);
    if (preadv2(fd, parts, 2, -1, RWF_HIPRI) != SIZE) abort();
    show("preadv2", bytes);
    if (syscall(SYS_read, fd, bytes, SIZE) != SIZE) abort();
    show("SYS_read", bytes);
    if (syscall(SYS_pread64, fd, bytes, SIZE, 0) != SIZE) abort();
    show("SYS_pread64", bytes);
    if (syscall(SYS_readv, fd, parts, 2) != SIZE) abort();
    show("SYS_readv", bytes);
    show_read("dup", dup(fd));
    show_read("F_DUPFD", fcntl(fd, F_DUPFD, 100));
    show_read("SCM_RIGHTS", pass(fd)); /* through a socket: nobody told the library */

    struct stat status;
    struct pollfd readable = {.fd = fd, .events = POLLIN};
    if (fstat(fd, &status) != 0 || !S_ISCHR(status.st_mode)) abort();
    if (poll(&readable, 1, 0) != 1 || write(open("/dev/urandom", O_WRONLY), "seed", 4) != 4)
        abort();
    if (fork() == 0) {
        show_read("device after fork", fd);
        _exit(0);
    }
    wait(NULL);
    dup2(fd, 0);
    show_read("dup2", 0);
    close(fd);
    if (open(self, O_RDONLY) != fd || read(fd, bytes, 4) != 4 || memcmp(bytes, "\177ELF", 4))
        abort();
    close(fd);
}

static void streams(void) {
    uint8_t bytes[SIZE];
    FILE *file = fopen("/dev/urandom", "rb");
    if (fread(bytes, 1, SIZE, file) != SIZE) abort();
    show("fread", bytes);
    show_read("fileno", fileno(file)); /* as std::ifstream does */
    bytes[0] = (uint8_t)fgetc(file);
    show("fgetc", bytes);
    fclose(file);
    file = fopen64("/dev/random", "r");
    if (fread(bytes, 1, SIZE, file) != SIZE) abort();
    show("fopen64", bytes);
    fclose(file);
    file = fdopen(open("/dev/urandom", O_RDONLY), "r");
    if (fread(bytes, 1, SIZE, file) != SIZE) abort();
    show("fdopen", bytes);
    fclose(file);
    for (int i = 0; i < 200; i++) fclose(fopen("/dev/urandom", "r"));
}

static void names(void) {
    char file[] = "/tmp/XXXXXX.end", folder[] = "/tmp/XXXXXX", unused[] = "/tmp/XXXXXX";
    struct stat status;
    int fd = mkstemps(file, 4);
    if (fd < 0 || fstat(fd, &status) != 0 || (status.st_mode & 0777) != 0600) abort();
    if (unlink(file) != 0) abort();
    show("mkstemps", file + 3);
    if (!mkdtemp(folder) || rmdir(folder) != 0) abort();
    show("mkdtemp", folder + 3);
    if (!mktemp(unused) || !*unused || access(unused, F_OK) == 0) abort();
    show("mktemp", unused + 3);
    if (mkstemp(unused) != -1 || mkdtemp(strcpy(file, "/no/XXXXXX"))) abort();
}

static void refusals(void) {
    uint8_t bytes[300];
    if (getrandom(bytes, 1, 0x100) != -1) abort();
    if (getrandom(bytes, 1, GRND_RANDOM | 4) != -1) abort();
    if (getentropy(bytes, 257) != -1 || getrandom(bytes, 0, 0) != 0) abort();
    if (read(-1, bytes, 1) != -1 || read(open("/dev/urandom", O_WRONLY), bytes, 1) != -1) abort();
    if (read(open("/dev/null", O_RDONLY), bytes, 1) != 0) abort();
}

/* ---- processes ---- */

static void finish_child(pid_t pid) {
    int status;
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0) abort();
}

static int in_clone(void *name) {
    show_getrandom(name);
    _exit(0);
}

static pid_t by_vfork(const char *name, char *const environment[]) {
    pid_t pid = vfork();
    if (pid == 0) {
        execle(self, self, "one", name, (char *)NULL, environment);
        _exit(1);
    }
    return pid;
}

static void processes(void) {
    static char stack[1 << 16];
    char *nothing[] = {NULL},
         *arguments[] = {(char *)self, "one", "posix_spawn, nothing kept", NULL};
    pid_t pid = fork();
    if (pid == 0) {
        show_getrandom("fork");
        finish_child(by_vfork("vfork in fork", environ));
        _exit(0);
    }
    finish_child(pid);
    pid = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (pid == 0) in_clone("clone by number");
    finish_child(pid);
    finish_child(clone(in_clone, stack + sizeof stack, SIGCHLD, "clone"));
    finish_child(by_vfork("vfork", environ));
    finish_child(by_vfork("vfork, nothing kept", nothing));
    show_getrandom("parent after vfork");
    if ((pid = fork()) == 0) {
        arguments[2] = "execve by number, nothing kept";
        _exit((int)syscall(SYS_execve, self, arguments, nothing));
    }
    finish_child(pid);
    if (posix_spawn(&pid, self, NULL, NULL, arguments, nothing) != 0) abort();
    finish_child(pid);
    if (posix_spawnp(&pid, self, NULL, NULL, arguments, environ) != 0) abort();
    finish_child(pid);

    char command[4096];
    snprintf(command, sizeof command, "%s one system; exit 3", self);
    if (WEXITSTATUS(system(command)) != 3 || !system(NULL)) abort();
    snprintf(command, sizeof command, "%s one popen", self);
    FILE *pipe = popen(command, "r");
    if (!fgets(command, sizeof command, pipe) || pclose(pipe) != 0) abort();
    if (write(1, command, strlen(command)) < 0) abort();

    wordexp_t words; /* a shell that the C library starts itself: it has no number */
    snprintf(command, sizeof command, "\"$(%s one wordexp)\"", self);
    if (wordexp(command, &words, 0) != 0) abort();
    snprintf(command, sizeof command, "%s\n", words.we_wordv[0]);
    if (write(1, command, strlen(command)) < 0) abort();

    if ((pid = fork()) == 0) {
        if (chdir("/") != 0 || clearenv() != 0) abort();
        close_range(3, ~0U, 0);
        closefrom(0 + 3);
        show_getrandom("all descriptors closed");
        execl(self, self, "one", "execl, nothing kept", (char *)NULL);
        _exit(1);
    }
    finish_child(pid);
}

/* ---- threads ---- */

static void *in_thread(void *name) {
    show_getrandom(name);
    pid_t pid = fork();
    if (pid == 0) {
        show_getrandom("fork in thread");
        _exit(0);
    }
    finish_child(pid);
    return NULL;
}

static void threads(void) {
    pthread_t made;
    for (int i = 0; i < 3; i++) {
        pthread_create(&made, NULL, in_thread, "thread");
        pthread_join(made, NULL);
    }
}

int main(int count, char **arguments) {
    self = arguments[0];
    if (count == 3 && strcmp(arguments[1], "one") == 0) {
        show_getrandom(arguments[2]);
        return 0;
    }
    functions();
    descriptors();
    streams();
    names();
    refusals();
    processes();
    threads();
    return 0;
}
