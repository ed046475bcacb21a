/* The random devices as files.
 *
 * Opening a random device returns a descriptor of /dev/null with a mark. It is a real descriptor,
 * with which select, poll, dup, fork, exec and SCM_RIGHTS work as usual. It discards written bytes,
 * and a read that bypasses this library gets no bytes instead of unnoticed fresh randomness. The
 * mark is O_SYNC, which no other program requests for /dev/null and which no call can remove. A
 * real descriptor of a device (inherited from a process outside) is recognised, too.
 *
 * read() must not ask the kernel for the kind of a descriptor each time. `kinds` remembers the
 * descriptors of other files until their numbers are closed. A random device is checked at every
 * read, because its number may have been closed without our notice and reused for a file. A file
 * that gives no bytes is checked, too, because its number may have been reused for a device. A read
 * draws from the reading thread's stream, so that threads and processes that share a descriptor do
 * not depend on each other.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "interposer.h"

#define MARK O_SYNC

enum kind { KIND_UNKNOWN, KIND_OTHER, KIND_DEVICE };

/* Descriptors with numbers beyond this array are inspected at each read. */
static uint8_t kinds[1 << 16];

void forget_device(int fd) {
    if (fd >= 0 && (size_t)fd < sizeof kinds) kinds[fd] = KIND_UNKNOWN;
}

static void forget_range(unsigned first, unsigned last) {
    for (size_t fd = first; fd <= last && fd < sizeof kinds; fd++) kinds[fd] = KIND_UNKNOWN;
}

static bool is_readable_device(int fd) {
    struct stat status;
    if (fd < 0) return false;
    long flags = system_call(SYS_fcntl, fd, F_GETFL, 0, 0, 0, 0);
    if (flags < 0 || (flags & O_ACCMODE) == O_WRONLY || (flags & O_PATH)) return false;
    if (fstat(fd, &status) != 0 || !S_ISCHR(status.st_mode) || major(status.st_rdev) != 1)
        return false;
    unsigned minor_number = minor(status.st_rdev);
    bool marked_null = minor_number == 3 && (flags & MARK) == MARK;
    return marked_null || minor_number == 8 || minor_number == 9;
}

static bool inspect(int fd) {
    int error = errno;
    bool device = settings.mode != MODE_SYSTEM && is_readable_device(fd);
    errno = error;
    /* The child of a vfork has the parent's memory, but descriptors of its own. */
    if (fd >= 0 && (size_t)fd < sizeof kinds && !this_thread()->vforked)
        kinds[fd] = device ? KIND_DEVICE : KIND_OTHER;
    return device;
}

static inline bool is_device(int fd) {
    if (fd >= 0 && (size_t)fd < sizeof kinds && kinds[fd] == KIND_OTHER) return false;
    attach();
    return inspect(fd);
}

/* ---- opening and closing ---- */

static bool names_device(const char *path) {
    return settings.mode != MODE_SYSTEM && path &&
           (strcmp(path, "/dev/urandom") == 0 || strcmp(path, "/dev/random") == 0);
}

static int open_any(int directory, const char *path, int flags, mode_t mode) {
    attach();
    if (names_device(path)) {
        path = "/dev/null";
        flags |= MARK;
    }
    /* attach() opens the journal with this function before it has resolved any of `real`. */
    int fd = real.openat
                 ? real.openat(directory, path, flags, mode)
                 : (int)checked(system_call(SYS_openat, directory, (long)path, flags, mode, 0, 0));
    forget_device(fd);
    return fd;
}

/* The mode is an argument only when a file may be created. */
#define OPEN_WITH_MODE(directory, path, flags)                                                     \
    mode_t mode = 0;                                                                               \
    if ((flags) & O_CREAT || ((flags) & O_TMPFILE) == O_TMPFILE) {                                 \
        va_list arguments;                                                                         \
        va_start(arguments, flags);                                                                \
        mode = va_arg(arguments, mode_t);                                                          \
        va_end(arguments);                                                                         \
    }                                                                                              \
    return open_any(directory, path, flags, mode)

EXPORT int open(const char *path, int flags, ...) { OPEN_WITH_MODE(AT_FDCWD, path, flags); }
EXPORT int open64(const char *path, int flags, ...) { OPEN_WITH_MODE(AT_FDCWD, path, flags); }
EXPORT int openat(int at, const char *path, int flags, ...) { OPEN_WITH_MODE(at, path, flags); }
EXPORT int openat64(int at, const char *path, int flags, ...) { OPEN_WITH_MODE(at, path, flags); }

/* The compiler replaces the functions above by these when it fortifies a program. */
EXPORT int __open_2(const char *path, int flags) { return open_any(AT_FDCWD, path, flags, 0); }
EXPORT int __open64_2(const char *path, int flags) { return open_any(AT_FDCWD, path, flags, 0); }
EXPORT int __openat_2(int at, const char *path, int flags) { return open_any(at, path, flags, 0); }
EXPORT int __openat64_2(int at, const char *path, int flags) {
    return open_any(at, path, flags, 0);
}

EXPORT int close(int fd) {
    forget_device(fd);
    return (int)checked(system_call(SYS_close, fd, 0, 0, 0, 0, 0));
}

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

EXPORT int close_range(unsigned first, unsigned last, int flags) {
    forget_range(first, last);
    return (int)checked(system_call(SYS_close_range, first, last, flags, 0, 0, 0));
}

EXPORT void closefrom(int first) {
    attach();
    forget_range(first > 0 ? (unsigned)first : 0, ~0U);
    real.closefrom(first);
}

/* A number that was closed inside the C library may be reused for a device. */
EXPORT int dup(int fd) {
    int made = (int)checked(system_call(SYS_dup, fd, 0, 0, 0, 0, 0));
    forget_device(made);
    return made;
}

static int control(int fd, int command, long argument) {
    attach();
    int result = real.fcntl ? real.fcntl(fd, command, argument)
                            : (int)checked(system_call(SYS_fcntl, fd, command, argument, 0, 0, 0));
    if (command == F_DUPFD || command == F_DUPFD_CLOEXEC) forget_device(result);
    return result;
}

/* If the caller gave no argument, this argument is arbitrary, and the kernel does not read it. */
#define CONTROL(fd, command)                                                                       \
    va_list arguments;                                                                             \
    va_start(arguments, command);                                                                  \
    long argument = va_arg(arguments, long);                                                       \
    va_end(arguments);                                                                             \
    return control(fd, command, argument)

EXPORT int fcntl(int fd, int command, ...) { CONTROL(fd, command); }
EXPORT int fcntl64(int fd, int command, ...) { CONTROL(fd, command); }

EXPORT int dup2(int fd, int to) {
    if (fd != to) forget_device(to);
    return (int)checked(system_call(SYS_dup2, fd, to, 0, 0, 0, 0));
}

EXPORT int dup3(int fd, int to, int flags) {
    forget_device(to);
    return (int)checked(system_call(SYS_dup3, fd, to, flags, 0, 0, 0));
}

/* ---- reading ---- */

static ssize_t read_device(void *buffer, size_t size, const void *caller) {
    return draw_checked(SOURCE_DEVICE, buffer, size, caller);
}

/* Whether a file that gave no bytes is a device that reuses a number closed without our notice. */
static bool is_late_device(int fd, ssize_t got) { return got == 0 && inspect(fd); }

static ssize_t read_any(int fd, void *buffer, size_t size, const void *caller) {
    if (is_device(fd)) return read_device(buffer, size, caller);
    ssize_t got = real.read ? real.read(fd, buffer, size)
                            : checked(system_call(SYS_read, fd, (long)buffer, (long)size, 0, 0, 0));
    return is_late_device(fd, got) ? read_device(buffer, size, caller) : got;
}

static ssize_t read_at(int fd, void *buffer, size_t size, off_t offset, const void *caller) {
    if (is_device(fd)) return read_device(buffer, size, caller);
    ssize_t got = real.pread(fd, buffer, size, offset);
    return is_late_device(fd, got) ? read_device(buffer, size, caller) : got;
}

EXPORT ssize_t read(int fd, void *buffer, size_t size) {
    return read_any(fd, buffer, size, CALLER);
}

EXPORT ssize_t pread(int fd, void *buffer, size_t size, off_t offset) {
    return read_at(fd, buffer, size, offset, CALLER);
}

EXPORT ssize_t pread64(int fd, void *buffer, size_t size, off_t offset) {
    return read_at(fd, buffer, size, offset, CALLER);
}

static ssize_t read_parts(const struct iovec *parts, int count, const void *caller) {
    ssize_t total = 0;
    for (int i = 0; i < count; i++) {
        ssize_t got = read_device(parts[i].iov_base, parts[i].iov_len, caller);
        if (got < 0) return total > 0 ? total : got;
        total += got;
        if ((size_t)got < parts[i].iov_len) break;
    }
    return total;
}

EXPORT ssize_t readv(int fd, const struct iovec *parts, int count) {
    ssize_t got = is_device(fd) ? 0 : real.readv(fd, parts, count);
    return is_late_device(fd, got) ? read_parts(parts, count, CALLER) : got;
}

EXPORT ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) {
    ssize_t got = is_device(fd) ? 0 : real.preadv(fd, parts, count, offset);
    return is_late_device(fd, got) ? read_parts(parts, count, CALLER) : got;
}

EXPORT ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset) {
    ssize_t got = is_device(fd) ? 0 : real.preadv(fd, parts, count, offset);
    return is_late_device(fd, got) ? read_parts(parts, count, CALLER) : got;
}

/* Unlike preadv, preadv2 reads at the descriptor's position if the offset is -1. */
EXPORT ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    ssize_t got = is_device(fd) ? 0 : real.preadv2(fd, parts, count, offset, flags);
    return is_late_device(fd, got) ? read_parts(parts, count, CALLER) : got;
}

EXPORT ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    ssize_t got = is_device(fd) ? 0 : real.preadv2(fd, parts, count, offset, flags);
    return is_late_device(fd, got) ? read_parts(parts, count, CALLER) : got;
}

long read_by_number(long number, const long a[6], const void *caller) {
    int fd = (int)a[0];
    bool whole = number == SYS_read || number == SYS_pread64;
    long got = is_device(fd) ? 0 : checked(system_call(number, a[0], a[1], a[2], a[3], a[4], a[5]));
    if (!is_late_device(fd, got)) return got;
    return whole ? read_device((void *)a[1], (size_t)a[2], caller)
                 : read_parts((const struct iovec *)a[1], (int)a[2], caller);
}

void __chk_fail(void) __attribute__((noreturn));

EXPORT ssize_t __read_chk(int fd, void *buffer, size_t size, size_t room) {
    if (size > room) __chk_fail();
    return read_any(fd, buffer, size, CALLER);
}

EXPORT ssize_t __pread_chk(int fd, void *buffer, size_t size, off_t offset, size_t room) {
    if (size > room) __chk_fail();
    return read_at(fd, buffer, size, offset, CALLER);
}

EXPORT ssize_t __pread64_chk(int fd, void *buffer, size_t size, off_t offset, size_t room) {
    if (size > room) __chk_fail();
    return read_at(fd, buffer, size, offset, CALLER);
}

/* ---- standard input and output, which reads inside the C library ---- */

/* Closed streams stay in the list and are reused, so that threads can follow the list at any time.
 */
static struct stream {
    struct stream *next;
    FILE *file;
    const void *caller; /* in the library that opened it */
    int fd;
    _Atomic bool used;
} *_Atomic streams;

static ssize_t stream_read(void *cookie, char *buffer, size_t size) {
    const struct stream *stream = cookie;
    return read_device(buffer, size, stream->caller);
}

static ssize_t stream_write(void *cookie, const char *buffer, size_t size) {
    (void)cookie, (void)buffer;
    return (ssize_t)size;
}

static int stream_seek(void *cookie, off64_t *offset, int whence) {
    (void)cookie, (void)whence;
    *offset = 0;
    return 0;
}

static int stream_close(void *cookie) {
    struct stream *stream = cookie;
    int fd = stream->fd;
    stream->file = NULL;
    stream->used = false;
    return close(fd);
}

static struct stream *free_stream(void) {
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (!atomic_exchange(&stream->used, true)) return stream;
    struct stream *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    made->used = true;
    made->next = streams;
    while (!atomic_compare_exchange_weak(&streams, &made->next, made)) continue;
    return made;
}

static FILE *stream_of(int fd, const char *mode, const void *caller) {
    static const cookie_io_functions_t functions = {stream_read, stream_write, stream_seek,
                                                    stream_close};
    struct stream *stream = free_stream();
    if (!stream) return NULL;
    stream->fd = fd;
    stream->caller = caller;
    stream->file = fopencookie(stream, mode, functions);
    if (!stream->file) {
        stream->used = false;
        return NULL;
    }
    setvbuf(stream->file, NULL, _IONBF, 0); /* draw what is asked for, and no more */
    return stream->file;
}

static FILE *open_stream(const char *mode, const void *caller) {
    bool updates = strchr(mode, '+') != NULL;
    int access = updates ? O_RDWR : mode[0] == 'r' ? O_RDONLY : O_WRONLY;
    int fd = open("/dev/urandom", access | (strchr(mode, 'e') ? O_CLOEXEC : 0));
    if (fd < 0) return NULL;
    FILE *file = stream_of(fd, mode, caller);
    if (!file) close(fd);
    return file;
}

/* Reads of standard input count as requests of the program. */
void open_standard_input(void) {
    if (settings.mode == MODE_SYSTEM || !is_readable_device(STDIN_FILENO)) return;
    FILE *file = stream_of(STDIN_FILENO, "r", (const void *)getauxval(AT_ENTRY));
    if (file) stdin = file;
}

EXPORT FILE *fopen(const char *path, const char *mode) {
    attach();
    return names_device(path) ? open_stream(mode, CALLER) : real.fopen(path, mode);
}

EXPORT FILE *fopen64(const char *path, const char *mode) {
    attach();
    return names_device(path) ? open_stream(mode, CALLER) : real.fopen(path, mode);
}

EXPORT FILE *fdopen(int fd, const char *mode) {
    return is_device(fd) ? stream_of(fd, mode, CALLER) : real.fdopen(fd, mode);
}

/* One of our streams has no descriptor in the C library, but libstdc++ requests it. */
static int descriptor_of(FILE *file) {
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->file == file) return stream->fd;
    return real.fileno(file);
}

EXPORT int fileno(FILE *file) {
    attach();
    return descriptor_of(file);
}

EXPORT int fileno_unlocked(FILE *file) {
    attach();
    return descriptor_of(file);
}

/* Its descriptor is closed inside the C library. */
static void forget_stream(FILE *file) {
    attach();
    int error = errno;
    forget_device(real.fileno(file));
    errno = error;
}

EXPORT int fclose(FILE *file) {
    forget_stream(file);
    return real.fclose(file);
}

EXPORT int pclose(FILE *file) {
    forget_stream(file);
    return real.pclose(file);
}

EXPORT FILE *freopen(const char *path, const char *mode, FILE *file) {
    forget_stream(file);
    return real.freopen(path, mode, file);
}

EXPORT FILE *freopen64(const char *path, const char *mode, FILE *file) {
    forget_stream(file);
    return real.freopen(path, mode, file);
}
