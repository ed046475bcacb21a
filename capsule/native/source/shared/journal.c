#define _DEFAULT_SOURCE
#include "journal.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* Address space and apparent size; memory and disk are used as records are written. */
#define CAPACITY (UINT64_C(1) << 30)

/* Size of this process's mapping. Programs can write to the header, and so to its capacity. */
static uint64_t mapped;

/* The maximum size of a file of the caller: a larger file would cause a fatal signal. */
static uint64_t capacity_allowed(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur > CAPACITY) return CAPACITY;
    return limit.rlim_cur;
}

/* The first process of a run calls this before it has a child, so no other process creates it. */
static uint64_t prepare_file(int fd) {
    struct stat status;
    if (fstat(fd, &status) != 0) return 0;
    if (status.st_size > 0) return (uint64_t)status.st_size;
    uint64_t capacity = capacity_allowed();
    if (capacity < sizeof(struct journal_header)) {
        errno = EFBIG;
        return 0;
    }
    /* Other users can write, too: a program may drop its privileges and then exec. */
    if (fchmod(fd, 0666) != 0 || ftruncate(fd, (off_t)capacity) != 0) return 0;
    return capacity;
}

static struct journal_header *map_file(int fd) {
    uint64_t capacity = prepare_file(fd);
    if (capacity == 0) return NULL;
    struct journal_header *journal = mmap(JOURNAL_ADDRESS, capacity, PROT_READ | PROT_WRITE,
                                          MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0);
    if (journal == MAP_FAILED) return NULL;
    if (atomic_load(&journal->used) == 0) {
        memcpy(journal->magic, JOURNAL_MAGIC, sizeof journal->magic);
        journal->version = JOURNAL_VERSION;
        journal->machine = EM_X86_64;
        journal->capacity = capacity;
        /* This is set last, because zero means that the header is not complete. */
        atomic_store(&journal->used, sizeof *journal);
    }
    mapped = capacity;
    if (journal->version == JOURNAL_VERSION && journal->capacity == capacity) return journal;
    munmap(journal, capacity);
    errno = EINVAL;
    return NULL;
}

struct journal_header *journal_open(const char *directory) {
    char path[4096];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", directory, JOURNAL_NAME) >= sizeof path) {
        errno = ENAMETOOLONG;
        return NULL;
    }
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return NULL;
    struct journal_header *journal = map_file(fd);
    int error = errno;
    close(fd);
    errno = error;
    return journal;
}

#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif
#define PAGE 4096

/* Whether the disk has room for the pages that begin within a record. Without room, a write to such
 * a page would cause a fatal signal. On older kernels, which do not support this test, the result
 * is true. */
static bool has_pages(const struct journal_header *journal, uint64_t at, uint64_t length) {
    uint64_t first = (at + PAGE - 1) / PAGE * PAGE;
    if (first >= at + length) return true;
    int before = errno; /* of the program, which has called a function that succeeds */
    void *page = (char *)journal + first;
    bool has = madvise(page, at + length - first, MADV_POPULATE_WRITE) == 0 || errno != EFAULT;
    errno = before;
    return has;
}

/* Whether a record of `length` bytes fits at `at`. A program may have written both numbers. */
static bool has_room(uint64_t at, uint64_t length) {
    return at >= sizeof(struct journal_header) && at % 8 == 0 && at <= mapped &&
           length >= sizeof(struct journal_record) && length <= mapped - at;
}

void *journal_claim(struct journal_header *journal, enum journal_type type, size_t size) {
    uint64_t length = (size + 7) & ~UINT64_C(7);
    uint64_t at = atomic_load(&journal->used);
    /* `used` is read only once, because a program could set it back again and again. */
    while (has_room(at, length) && has_pages(journal, at, length)) {
        struct journal_record *record = journal_at(journal, at);
        uint64_t claim = 0;
        bool ours =
            atomic_compare_exchange_strong(&record->claim, &claim, (uint64_t)type << 32 | length);
        uint64_t passed = ours ? length : (uint32_t)claim;
        if (!has_room(at, passed)) return NULL;
        uint64_t used = at;
        /* This fails if another process has moved it already, which has the same effect. */
        atomic_compare_exchange_strong(&journal->used, &used, at + passed);
        if (ours) return record;
        at += passed;
    }
    return NULL;
}

void journal_publish(struct journal_record *record) { atomic_store(&record->ready, 1); }
