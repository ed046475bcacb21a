/* The number of processors that programs see, whatever this machine has and allows. A thread may
 * set its affinity to some of these processors and reads it back; this has no other effect. */
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "interposer.h"

/* ---- how many there are ---- */

static int told(void) {
    COUNT(cores);
    return (int)settings.cores;
}

EXPORT long sysconf(int name) {
    attach();
    bool counts = name == _SC_NPROCESSORS_ONLN || name == _SC_NPROCESSORS_CONF;
    return settings.cores && counts ? told() : real.sysconf(name);
}

EXPORT int get_nprocs(void) { return (int)sysconf(_SC_NPROCESSORS_ONLN); }
EXPORT int get_nprocs_conf(void) { return (int)sysconf(_SC_NPROCESSORS_CONF); }

/* ---- which of them a thread may use ---- */

/* The size in bytes of a set of all processors: whole words, as in the kernel. */
static size_t set_size(void) { return (settings.cores + 63) / 64 * sizeof(uint64_t); }

static bool is_own(pid_t id) {
    return id == 0 || id == getpid() || id == system_call(SYS_gettid, 0, 0, 0, 0, 0, 0);
}

static void all_cores(cpu_set_t *set) {
    CPU_ZERO(set);
    for (unsigned i = 0; i < settings.cores; i++) CPU_SET(i, set);
}

/* Whether whole words can be written. The kernel tests this when it copies a signal mask to them,
 * except at address 0. */
static bool is_writable(uint64_t *words, size_t size) {
    if (!words) return false;
    for (size_t i = 0; i < size / sizeof *words; i++)
        if (system_call(SYS_rt_sigprocmask, SIG_BLOCK, 0, (long)&words[i], sizeof *words, 0, 0) < 0)
            return false;
    return true;
}

/* Return the set that the calling thread chose; the choices of other threads are not known. */
static long give(bool own, size_t size, void *out) {
    cpu_set_t set = this_thread()->affinity;
    if (!own || CPU_COUNT(&set) == 0) all_cores(&set);
    if (size < set_size() || size % sizeof(uint64_t)) return -EINVAL;
    if (!is_writable(out, set_size())) return -EFAULT;
    memcpy(out, &set, set_size());
    told();
    return (long)set_size();
}

/* The kernel is called for its errors only: the process may not exist. */
static long ask_kernel(pid_t id) {
    cpu_set_t set;
    return system_call(SYS_sched_getaffinity, id, sizeof set, (long)&set, 0, 0, 0);
}

static long get_affinity(pid_t id, size_t size, void *out) {
    long found = ask_kernel(id);
    return found < 0 ? found : give(is_own(id), size, out);
}

static long set_affinity(pid_t id, size_t size, const void *wanted) {
    cpu_set_t set, all;
    /* The kernel reads the set before it finds that the process does not exist. */
    long readable = system_call(SYS_sched_setaffinity, INT_MAX, (long)size, (long)wanted, 0, 0, 0);
    if (readable == -EFAULT) return readable;
    long found = ask_kernel(id);
    if (found < 0) return found;
    CPU_ZERO(&set);
    memcpy(&set, wanted, size < set_size() ? size : set_size());
    all_cores(&all);
    CPU_AND(&set, &set, &all);
    if (CPU_COUNT(&set) == 0) return -EINVAL;
    if (is_own(id)) this_thread()->affinity = set;
    return 0;
}

long affinity_by_number(long number, const long a[6]) {
    attach();
    if (!settings.cores) return system_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    return number == SYS_sched_getaffinity ? get_affinity((pid_t)a[0], (size_t)a[1], (void *)a[2])
                                           : set_affinity((pid_t)a[0], (size_t)a[1], (void *)a[2]);
}

static long by_number(long number, pid_t id, size_t size, const void *set) {
    return affinity_by_number(number, (long[]){id, (long)size, (long)set, 0, 0, 0});
}

/* Clear the part of a set that the kernel does not write, as the C library does. */
static long emptied(long filled, size_t size, cpu_set_t *set) {
    if (filled >= 0) memset((char *)set + filled, 0, size - (size_t)filled);
    return filled < 0 ? filled : 0;
}

EXPORT int sched_getaffinity(pid_t id, size_t size, cpu_set_t *set) {
    return (int)checked(emptied(by_number(SYS_sched_getaffinity, id, size, set), size, set));
}

EXPORT int sched_setaffinity(pid_t id, size_t size, const cpu_set_t *set) {
    return (int)checked(by_number(SYS_sched_setaffinity, id, size, set));
}

EXPORT int pthread_getaffinity_np(pthread_t thread, size_t size, cpu_set_t *set) {
    attach();
    if (!settings.cores) return real.pthread_getaffinity_np(thread, size, set);
    return (int)-emptied(give(pthread_equal(thread, pthread_self()), size, set), size, set);
}

EXPORT int pthread_setaffinity_np(pthread_t thread, size_t size, const cpu_set_t *set) {
    attach();
    if (!settings.cores) return real.pthread_setaffinity_np(thread, size, set);
    bool own = pthread_equal(thread, pthread_self());
    return own ? (int)-by_number(SYS_sched_setaffinity, 0, size, set) : 0;
}

/* If this machine does not have the processor, the creation of the thread would fail. */
EXPORT int pthread_attr_setaffinity_np(pthread_attr_t *attributes, size_t size,
                                       const cpu_set_t *set) {
    attach();
    return settings.cores ? 0 : real.pthread_attr_setaffinity_np(attributes, size, set);
}

/* ---- where a thread runs ---- */

EXPORT int sched_getcpu(void) {
    attach();
    return settings.cores ? 0 : real.sched_getcpu();
}

EXPORT int getcpu(unsigned *cpu, unsigned *node) {
    attach();
    if (!settings.cores) return real.getcpu(cpu, node);
    if (cpu) *cpu = 0;
    if (node) *node = 0;
    return 0;
}
