/* Asks the kernel for randomness in every way that no preloaded library sees: linked statically,
 * with a system call instruction of its own. One word says what to do; what was drawn is printed. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
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
