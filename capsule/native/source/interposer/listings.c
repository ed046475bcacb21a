/* Folders are listed in the order of names, whatever the order of the file system is.
 *
 * An open folder is a `struct listing` that contains the C library's structure. The first read
 * reads all entries and sorts the names by their bytes, after "." and "..". Entries that are added
 * or removed later become visible when the folder is rewound, as POSIX allows. */
#include <stdlib.h>
#include <string.h>

#include "interposer.h"

#define MARK UINT64_C(0x676e697473696c2e) /* ".listing": no other DIR begins so */

struct listing {
    uint64_t mark;
    DIR *folder;
    pthread_mutex_t lock;
    bool complete;
    int error; /* why the names end early; 0 when they do not */
    struct dirent64 **entries;
    size_t count, next;
};

/* Return the listing of a folder; NULL if the folder was opened without this library. */
static struct listing *listing_of(DIR *folder) {
    struct listing *listing = (struct listing *)folder;
    return listing && listing->mark == MARK ? listing : NULL;
}

/* ---- order ---- */

static int rank(const char *name) {
    return strcmp(name, ".") == 0 ? 0 : strcmp(name, "..") == 0 ? 1 : 2;
}

static int by_name(const struct dirent64 **one, const struct dirent64 **other) {
    int ranks = rank((*one)->d_name) - rank((*other)->d_name);
    return ranks ? ranks : strcmp((*one)->d_name, (*other)->d_name);
}

typedef int compare(const struct dirent64 **, const struct dirent64 **);

static void sort(struct dirent64 **entries, size_t count, compare *by) {
    qsort(entries, count, sizeof *entries, (int (*)(const void *, const void *))by);
}

/* ---- reading all of a folder ---- */

/* A copy of the next entry, or NULL: at the end without an error. */
static struct dirent64 *copy_next(DIR *folder, int *error) {
    errno = 0;
    const struct dirent64 *entry = real.readdir64(folder);
    struct dirent64 *copy = entry ? malloc(entry->d_reclen) : NULL;
    *error = errno;
    return copy ? memcpy(copy, entry, entry->d_reclen) : NULL;
}

static bool make_room(struct listing *listing) {
    size_t count = listing->count;
    if (count && (count & (count - 1))) return true; /* it grows at powers of two */
    size_t room = count ? 2 * count : 1;
    struct dirent64 **grown = realloc(listing->entries, room * sizeof *grown);
    if (grown) listing->entries = grown;
    return grown != NULL;
}

static void complete(struct listing *listing) {
    struct dirent64 *entry;
    int before = errno;
    while ((entry = copy_next(listing->folder, &listing->error))) {
        if (!make_room(listing)) {
            free(entry);
            listing->error = ENOMEM;
            break;
        }
        listing->entries[listing->count++] = entry;
    }
    sort(listing->entries, listing->count, by_name);
    /* The place after the entry, as telldir() gives it and seekdir() takes it. */
    for (size_t i = 0; i < listing->count; i++) listing->entries[i]->d_off = (off64_t)i + 1;
    listing->complete = true;
    COUNT(listings);
    errno = before;
}

static void empty(struct listing *listing) {
    for (size_t i = 0; i < listing->count; i++) free(listing->entries[i]);
    free(listing->entries);
    listing->entries = NULL;
    listing->count = listing->next = 0;
    listing->error = 0;
    listing->complete = false;
}

/* ---- the functions ---- */

static DIR *listed(DIR *folder) {
    if (!folder || settings.listings == LISTINGS_SYSTEM) return folder;
    struct listing *listing = calloc(1, sizeof *listing);
    if (!listing) {
        real.closedir(folder);
        errno = ENOMEM;
        return NULL;
    }
    listing->mark = MARK;
    listing->folder = folder;
    pthread_mutex_init(&listing->lock, NULL);
    return (DIR *)listing;
}

EXPORT DIR *opendir(const char *path) {
    attach();
    return listed(real.opendir(path));
}

EXPORT DIR *fdopendir(int fd) {
    attach();
    return listed(real.fdopendir(fd));
}

EXPORT struct dirent64 *readdir64(DIR *folder) {
    struct listing *listing = listing_of(folder);
    struct dirent64 *entry = NULL;
    attach();
    if (!listing) return real.readdir64(folder);
    pthread_mutex_lock(&listing->lock);
    if (!listing->complete) complete(listing);
    if (listing->next < listing->count) entry = listing->entries[listing->next++];
    else if (listing->error) errno = listing->error;
    pthread_mutex_unlock(&listing->lock);
    return entry;
}

EXPORT int readdir64_r(DIR *folder, struct dirent64 *entry, struct dirent64 **result) {
    int before = errno;
    errno = 0;
    const struct dirent64 *next = readdir64(folder);
    int error = next ? 0 : errno;
    errno = before;
    *result = next ? memcpy(entry, next, next->d_reclen) : NULL;
    return error;
}

/* With 64 bits there is one structure. */
EXPORT struct dirent *readdir(DIR *folder) { return (struct dirent *)readdir64(folder); }

EXPORT int readdir_r(DIR *folder, struct dirent *entry, struct dirent **result) {
    return readdir64_r(folder, (struct dirent64 *)entry, (struct dirent64 **)result);
}

EXPORT void rewinddir(DIR *folder) {
    struct listing *listing = listing_of(folder);
    attach();
    if (!listing) {
        real.rewinddir(folder);
        return;
    }
    pthread_mutex_lock(&listing->lock);
    empty(listing);
    real.rewinddir(listing->folder);
    pthread_mutex_unlock(&listing->lock);
}

EXPORT long telldir(DIR *folder) {
    const struct listing *listing = listing_of(folder);
    attach();
    return listing ? (long)listing->next : real.telldir(folder);
}

EXPORT void seekdir(DIR *folder, long place) {
    struct listing *listing = listing_of(folder);
    attach();
    if (!listing) {
        real.seekdir(folder, place);
        return;
    }
    pthread_mutex_lock(&listing->lock);
    if (!listing->complete) complete(listing);
    listing->next = (size_t)place < listing->count ? (size_t)place : listing->count;
    pthread_mutex_unlock(&listing->lock);
}

EXPORT int dirfd(DIR *folder) {
    const struct listing *listing = listing_of(folder);
    attach();
    return real.dirfd(listing ? listing->folder : folder);
}

/* closedir, for which NULL is an error. In C, its declaration has an attribute that the argument is
 * not NULL, because of which the compiler would remove the tests. */
int close_folder(DIR *folder) __asm__("closedir");

EXPORT int close_folder(DIR *folder) {
    struct listing *listing = listing_of(folder);
    attach();
    if (folder) forget_device(real.dirfd(listing ? listing->folder : folder));
    if (!listing) return real.closedir(folder);
    int result = real.closedir(listing->folder);
    empty(listing);
    pthread_mutex_destroy(&listing->lock);
    listing->mark = 0;
    free(listing);
    return result;
}

/* ---- a whole folder at once ---- */

static __thread compare *chosen;

/* If the caller's order does not distinguish two names, their bytes decide. */
static int by_choice(const struct dirent64 **one, const struct dirent64 **other) {
    int order = chosen ? chosen(one, other) : 0;
    return order ? order : by_name(one, other);
}

static int scan(int at, const char *path, struct dirent64 ***entries,
                int (*filter)(const struct dirent64 *), compare *by) {
    attach();
    if (settings.listings == LISTINGS_SYSTEM)
        return real.scandirat64(at, path, entries, filter, by);
    int count = real.scandirat64(at, path, entries, filter, NULL);
    if (count < 0) return count;
    chosen = by;
    sort(*entries, (size_t)count, by_choice);
    COUNT(listings);
    return count;
}

EXPORT int scandirat64(int at, const char *path, struct dirent64 ***entries,
                       int (*filter)(const struct dirent64 *), compare *by) {
    return scan(at, path, entries, filter, by);
}

EXPORT int scandir64(const char *path, struct dirent64 ***entries,
                     int (*filter)(const struct dirent64 *), compare *by) {
    return scan(AT_FDCWD, path, entries, filter, by);
}

typedef int narrow_compare(const struct dirent **, const struct dirent **);

EXPORT int scandirat(int at, const char *path, struct dirent ***entries,
                     int (*filter)(const struct dirent *), narrow_compare *by) {
    return scan(at, path, (struct dirent64 ***)entries, (int (*)(const struct dirent64 *))filter,
                (compare *)by);
}

EXPORT int scandir(const char *path, struct dirent ***entries, int (*filter)(const struct dirent *),
                   narrow_compare *by) {
    return scandirat(AT_FDCWD, path, entries, filter, by);
}
