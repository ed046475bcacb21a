/* Asks the kernel for randomness in every way that no preloaded library sees: linked statically,
 * with a system call instruction of its own. One word says what to do; what was drawn is printed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define DROPPABLE 0x08
#define THREADS 8

static long raw(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

static unsigned long draw(void) {
    unsigned long value = 0;
    raw(SYS_getrandom, (long)&value, sizeof value, 0, 0, 0, 0);
    return value;
}

static void show(const char *name, const void *bytes, size_t size) {
    printf("%s ", name);
    for (size_t i = 0; i < size; i++) printf("%02x", ((const unsigned char *)bytes)[i]);
    printf("\n");
}

static void show_device(const char *name, long descriptor, size_t size) {
    unsigned char bytes[20000];
    for (size_t done = 0; done < size;) {
        ssize_t part = read((int)descriptor, bytes + done, size - done);
        if (part <= 0) exit(1);
        done += (size_t)part;
    }
    show(name, bytes, size);
    close((int)descriptor);
}

static void ask_devices(void) {
    struct {
        unsigned long flags, mode, resolve;
    } how = {O_RDONLY, 0, 0};
    long random = (long)"/dev/random", urandom = (long)"/dev/urandom";
    show_device("open", raw(SYS_open, urandom, O_RDONLY, 0, 0, 0, 0), 48);
    show_device("openat", raw(SYS_openat, AT_FDCWD, random, O_RDONLY | O_CLOEXEC, 0, 0, 0), 48);
    show_device("openat2", raw(SYS_openat2, AT_FDCWD, urandom, (long)&how, sizeof how, 0, 0), 48);
    show_device("long", raw(SYS_open, urandom, O_RDONLY, 0, 0, 0, 0), 20000);
}

/* Each thread draws, makes a thread and a process, and these draw too: all at the same time. */
static pthread_barrier_t barrier;
static unsigned long drawn[THREADS], by_thread[THREADS], by_process[THREADS];

static void *leaf(void *out) {
    *(unsigned long *)out = draw();
    return NULL;
}

static void *branch(void *argument) {
    long i = (long)argument;
    pthread_t thread;
    int ends[2];
    pthread_barrier_wait(&barrier);
    drawn[i] = draw();
    pthread_create(&thread, NULL, leaf, &by_thread[i]);
    pthread_join(thread, NULL);
    if (pipe(ends) != 0) exit(1);
    pid_t child = fork();
    if (child == 0) {
        unsigned long value = draw();
        _exit(write(ends[1], &value, sizeof value) != sizeof value);
    }
    if (read(ends[0], &by_process[i], sizeof *by_process) != sizeof *by_process) exit(1);
    waitpid(child, NULL, 0);
    return NULL;
}

static void ask_threads(void) {
    pthread_t threads[THREADS];
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (long i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, branch, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    show("threads", drawn, sizeof drawn);
    show("their-threads", by_thread, sizeof by_thread);
    show("their-processes", by_process, sizeof by_process);
}

/* Children that end at once, are killed, or execute; only the order of their making may count. */
static void ask_processes(const char *self) {
    fflush(stdout);
    for (int i = 0; i < 6; i++) {
        pid_t child = i % 2 ? vfork() : fork();
        if (child == 0 && i == 2) kill(getpid(), SIGKILL);
        if (child == 0 && i > 2) execl(self, self, "getrandom", NULL);
        if (child == 0) _exit(0);
        waitpid(child, NULL, 0);
    }
    unsigned long value = draw();
    show("parent", &value, sizeof value);
}

/* What glibc 2.41 does before it makes random bytes without system calls. */
static void ask_vdso(void) {
    void *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, DROPPABLE | MAP_ANONYMOUS, -1, 0);
    unsigned long sum = 0;
    printf("mapping %s\n", memory == MAP_FAILED && errno == EINVAL ? "refused" : "made");
    for (int i = 0; i < 100001; i++) sum += draw();
    show("sum", &sum, sizeof sum);
}

static void ask_errors(void) {
    unsigned char byte;
    printf("%ld %ld\n", raw(-1, 0, 0, 0, 0, 0, 0), raw(0xc0000014, 0, 0, 0, 0, 0, 0));
    printf("%ld %ld %ld %ld\n", raw(SYS_getrandom, (long)&byte, 1, 0x80, 0, 0, 0),
           raw(SYS_getrandom, (long)&byte, 1, 2 | 4, 0, 0, 0),
           raw(SYS_getrandom, 8, 16, 0, 0, 0, 0), raw(SYS_getrandom, 8, 0, 0, 0, 0, 0));
}

static void *large(void *size) {
    static unsigned char bytes[40 << 20];
    printf("%ld\n", raw(SYS_getrandom, (long)bytes, (long)size, 0, 0, 0, 0));
    show("last", bytes + 33554431 - 16, 16);
    return NULL;
}

static void ask_uuid(void) {
    long path = (long)"/proc/sys/kernel/random/uuid";
    close((int)raw(SYS_open, path, O_RDONLY, 0, 0, 0, 0));
}

/* Each thread draws and makes the next one: their paths get longer and longer. */
static void *chain(void *left) {
    unsigned long value = draw();
    pthread_t next;
    show("chain", &value, sizeof value);
    if (left == NULL) return NULL;
    pthread_create(&next, NULL, chain, (char *)left - 1);
    pthread_join(next, NULL);
    return NULL;
}

/* The kernel gives a thread that executes a program the id of the process. */
static void *execute(void *self) {
    execl(self, self, "getrandom", NULL);
    exit(1);
}

static void execute_in_thread(char *self) {
    pthread_t thread;
    unsigned long value = draw();
    show("leader", &value, sizeof value);
    pthread_create(&thread, NULL, execute, self);
    pthread_join(thread, NULL);
}

static void *go_on(void *self) {
    unsigned long value;
    usleep(100000); /* the first thread has ended */
    value = draw();
    show("thread", &value, sizeof value);
    if (fork() == 0) execute(self);
    wait(NULL);
    return execute(self);
}

/* The first thread ends, the process does not. */
static void leave_to_thread(char *self) {
    pthread_t thread;
    pthread_create(&thread, NULL, go_on, self);
    pthread_exit(NULL);
}

static void *fail_to_execute(void *nothing) {
    execl("/nonexistent", "", NULL);
    usleep(200000); /* the first thread ends meanwhile */
    unsigned long value = draw();
    show("thread", &value, sizeof value);
    exit(nothing != NULL);
}

static void end_after_a_failed_execution(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, fail_to_execute, NULL);
    usleep(100000);
    pthread_exit(NULL);
}

/* Processes that share descriptors or are their creator's siblings, killed or not. */
static void make_oddly(void) {
    static const long flags[] = {CLONE_FILES, CLONE_PARENT, CLONE_PARENT, CLONE_FS | CLONE_SYSVSEM};
    for (int i = 0; i < 4; i++) {
        long child = raw(SYS_clone, flags[i] | SIGCHLD, 0, 0, 0, 0, 0);
        if (child == 0 && i == 1)
            raw(SYS_kill, raw(SYS_getpid, 0, 0, 0, 0, 0, 0), SIGKILL, 0, 0, 0, 0);
        if (child == 0) {
            unsigned long value = draw();
            show("child", &value, sizeof value);
            _exit(0);
        }
        usleep(50000);
    }
    unsigned long value = draw();
    show("parent", &value, sizeof value);
}

/* A process waits for the killed child of its own child. */
static void wait_for_another_child(void) {
    if (fork() == 0) {
        pid_t killed = (pid_t)raw(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0, 0);
        if (killed == 0) kill(getpid(), SIGKILL);
        while (kill(killed, 0) == 0) usleep(1000); /* until it was waited for */
        if (fork() != 0) _exit(wait(NULL) < 0);
        unsigned long value = draw();
        show("child", &value, sizeof value);
        _exit(0);
    }
    siginfo_t ended;
    waitid(P_ALL, 0, &ended, WEXITED | WNOWAIT); /* until it was killed */
    while (wait(NULL) > 0) {
    }
}

static void write_devices(void) {
    struct {
        unsigned long flags, mode, resolve;
    } how = {O_WRONLY, 0, 0};
    long path = (long)"/dev/urandom";
    long openat2 = raw(SYS_openat2, AT_FDCWD, path, (long)&how, sizeof how, 0, 0);
    printf("%zd %zd\n", write((int)raw(SYS_open, path, O_WRONLY, 0, 0, 0, 0), "seed", 4),
           write((int)openat2, "seed", 4));
}

/* Everything is closed but a random device, which another program goes on reading. */
static void ask_closed(const char *self) {
    long device = raw(SYS_open, (long)"/dev/urandom", O_RDONLY, 0, 0, 0, 0);
    for (int i = 3; i < 64; i++)
        if (i != device) close(i);
    dup2((int)device, 0);
    execl(self, self, "read-standard-input", NULL);
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!strcmp(what, "getrandom")) {
        unsigned long value = draw();
        show("getrandom", &value, sizeof value);
    } else if (!strcmp(what, "devices")) ask_devices();
    else if (!strcmp(what, "threads")) ask_threads();
    else if (!strcmp(what, "processes")) ask_processes(words[0]);
    else if (!strcmp(what, "vdso")) ask_vdso();
    else if (!strcmp(what, "errors")) ask_errors();
    else if (!strcmp(what, "large")) large((void *)(long)(40 << 20));
    else if (!strcmp(what, "closed")) ask_closed(words[0]);
    else if (!strcmp(what, "write-device")) write_devices();
    else if (!strcmp(what, "execute-in-thread")) execute_in_thread(words[0]);
    else if (!strcmp(what, "leave-to-thread")) leave_to_thread(words[0]);
    else if (!strcmp(what, "fail-to-execute")) end_after_a_failed_execution();
    else if (!strcmp(what, "make-oddly")) make_oddly();
    else if (!strcmp(what, "wait-for-another-child")) wait_for_another_child();
    else if (!strcmp(what, "chain")) chain((void *)100);
    else if (!strcmp(what, "read-device"))
        show_device("device", raw(SYS_open, (long)"/dev/urandom", O_RDONLY, 0, 0, 0, 0),
                    (size_t)atoi(words[2]));
    else if (!strcmp(what, "read-standard-input")) show_device("inherited", 0, 48);
    else if (!strcmp(what, "start")) show("start", (void *)getauxval(AT_RANDOM), 16);
    else if (!strcmp(what, "uuid")) ask_uuid();
    else if (!strcmp(what, "undumpable")) {
        prctl(PR_SET_DUMPABLE, 0);
        draw();
    } else if (!strcmp(what, "other-abi")) {
        long result = 20; /* getpid, as 32-bit programs number it */
        __asm__ volatile("int $0x80" : "+a"(result));
    } else if (!strcmp(what, "address")) printf("%p\n", (void *)&count);
    else return 2;
    return 0;
}
