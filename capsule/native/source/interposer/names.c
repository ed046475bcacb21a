/* Names of temporary files. The C library derives them from the monotonic clock and an address,
 * without requesting randomness, so they would differ between any two runs. Here they are drawn. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "interposer.h"

#define LETTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
#define BASE 62
#define DRAWN 6                       /* letters of a name */
#define ATTEMPTS (BASE * BASE * BASE) /* as many as the C library makes */

/* A function that makes a file of a name: it returns at least 0, or -1 and errno. */
typedef int maker(const char *path, int flags);

static int make_file(const char *path, int flags) {
    return open(path, (flags & ~O_ACCMODE) | O_RDWR | O_CREAT | O_EXCL, S_IRUSR | S_IWUSR);
}

static int make_folder(const char *path, int flags) {
    (void)flags;
    return mkdir(path, S_IRWXU);
}

/* Only check that no file has the name. */
static int make_nothing(const char *path, int flags) {
    struct stat facts;
    (void)flags;
    if (lstat(path, &facts) != 0) return errno == ENOENT ? 0 : -1;
    errno = EEXIST;
    return -1;
}

static void draw_letters(char *letters, const void *caller) {
    uint64_t number;
    draw(SOURCE_NAME, &number, sizeof number, caller);
    for (int i = 0; i < DRAWN; i++, number /= BASE) letters[i] = LETTERS[number % BASE];
}

static int make(char *path, int suffix, int flags, maker *try, const void *caller) {
    size_t length = strlen(path);
    if (suffix < 0 || length < (size_t)suffix + DRAWN ||
        memcmp(path + length - suffix - DRAWN, "XXXXXX", DRAWN) != 0) {
        errno = EINVAL;
        return -1;
    }
    int error = errno;
    for (int i = 0; i < ATTEMPTS; i++) {
        draw_letters(path + length - suffix - DRAWN, caller);
        int made = try(path, flags);
        if (made >= 0) errno = error;
        if (made >= 0 || errno != EEXIST) return made;
    }
    return -1;
}

EXPORT int mkstemp(char *path) { return make(path, 0, 0, make_file, CALLER); }
EXPORT int mkstemp64(char *path) { return make(path, 0, 0, make_file, CALLER); }
EXPORT int mkostemp(char *path, int flags) { return make(path, 0, flags, make_file, CALLER); }
EXPORT int mkostemp64(char *path, int flags) { return make(path, 0, flags, make_file, CALLER); }
EXPORT int mkstemps(char *path, int suffix) { return make(path, suffix, 0, make_file, CALLER); }
EXPORT int mkstemps64(char *path, int suffix) { return make(path, suffix, 0, make_file, CALLER); }

EXPORT int mkostemps(char *path, int suffix, int flags) {
    return make(path, suffix, flags, make_file, CALLER);
}

EXPORT int mkostemps64(char *path, int suffix, int flags) {
    return make(path, suffix, flags, make_file, CALLER);
}

EXPORT char *mkdtemp(char *path) { return make(path, 0, 0, make_folder, CALLER) < 0 ? NULL : path; }

EXPORT char *mktemp(char *path) {
    if (make(path, 0, 0, make_nothing, CALLER) < 0) *path = '\0';
    return path;
}
