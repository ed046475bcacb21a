/* The journal: one file for a whole run, to which every process of the run appends through a
 * mapping.
 *
 * Once a mapping exists, it requires no descriptor, path or privilege: it remains if the program
 * closes all its descriptors, forks, changes its directory or drops privileges, and the written
 * data survive SIGKILL. Only an exec opens the file again.
 *
 * The file is sparse and of fixed size: a header, then records, each a multiple of eight bytes.
 * Space is claimed without locks: the process that changes the word at `used` from zero to a
 * record's claim owns that space, and every process moves `used` past a claim that it finds there,
 * so that a process that is killed in between does not block others. A record is valid once `ready`
 * is set.
 * capsule/entropy/journal.py reads it.
 */
#ifndef CAPSULE_JOURNAL_H
#define CAPSULE_JOURNAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "entropy.h"

#define JOURNAL_NAME "journal"
#define JOURNAL_MAGIC "CAPSJRNL"
#define JOURNAL_VERSION 3
#define JOURNAL_CALLER_SIZE 64

/* The address at which it is mapped, in every mode: far from every address that the kernel chooses,
 * so that no address of the program depends on the journal's size or presence. */
#define JOURNAL_ADDRESS ((void *)0x200000000000)

enum journal_type {
    JOURNAL_THREAD = 1,
    JOURNAL_COUNTER,
    JOURNAL_CALL,
    JOURNAL_MISMATCH,
    JOURNAL_TOLD
};

enum journal_failure { JOURNAL_HOLDS_MISMATCH = 1, JOURNAL_IS_FULL };

struct journal_header {
    char magic[8];
    uint32_t version;
    uint32_t machine; /* e_machine of ELF */
    uint64_t capacity;
    _Atomic uint64_t used;   /* where the next record goes */
    _Atomic uint32_t failed; /* enum journal_failure: the run is to end */
    uint32_t reserved[7];
};

struct journal_record {
    _Atomic uint64_t claim; /* length in the low half, enum journal_type in the high half */
    _Atomic uint32_t ready;
    uint32_t reserved;
};

/* A thread that requested randomness; only that thread writes the record. */
struct journal_thread {
    struct journal_record record;
    uint64_t calls, bytes;
    uint64_t derived_calls, derived_bytes; /* of them, those beyond what was recorded */
    char process[CAPSULE_PATH_SIZE];
    char thread[CAPSULE_PATH_SIZE];
};

/* The requests of a thread to one source, made by one library. */
struct journal_counter {
    struct journal_record record;
    uint64_t thread; /* offset of its record */
    uint64_t next;   /* offset of the thread's counter before this one, or zero */
    uint64_t calls, bytes;
    uint32_t source;
    uint32_t reserved;
    char caller[JOURNAL_CALLER_SIZE];
};

/* One recorded call; the bytes that are kept of it follow (capsule_expand in entropy.h). */
struct journal_call {
    struct journal_record record;
    uint64_t counter; /* offset of the counter that it went to */
    uint64_t size;
};

enum journal_reason { MISMATCH_THREAD = 1, MISMATCH_MORE, MISMATCH_OTHER };

/* A replayed thread requested bytes that were not recorded. */
struct journal_mismatch {
    struct journal_record record;
    uint32_t reason;
    uint32_t requested_source, recorded_source;
    uint32_t reserved;
    uint64_t call, offset; /* calls and bytes of the thread before this request */
    uint64_t requested_size, recorded_size;
    char process[CAPSULE_PATH_SIZE];
    char thread[CAPSULE_PATH_SIZE];
};

/* The answers to a process that replace those of the machine, and their numbers. */
struct journal_told {
    struct journal_record record;
    _Atomic uint64_t readings; /* of the calendar clock */
    _Atomic uint64_t waits;    /* that advanced the clock */
    _Atomic uint64_t listings; /* of folders, sorted */
    _Atomic uint64_t cores;    /* questions for the number of processors */
    uint32_t clock;            /* enum clock of interposer.h */
    uint32_t sorted;           /* whether listings are */
    uint32_t core_count;       /* 0: the machine's */
    uint32_t reserved;
    char process[CAPSULE_PATH_SIZE];
};

/* Map the journal in `directory`, creating it if it does not exist; NULL with errno set. */
struct journal_header *journal_open(const char *directory);

/* Claim a record of `size` bytes, which are zero except for the claim; NULL when the journal is
 * full or damaged. */
void *journal_claim(struct journal_header *journal, enum journal_type type, size_t size);
void journal_publish(struct journal_record *record);

static inline uint64_t journal_offset(const struct journal_header *journal, const void *record) {
    return (uint64_t)((const char *)record - (const char *)journal);
}

static inline void *journal_at(struct journal_header *journal, uint64_t offset) {
    return (char *)journal + offset;
}

#endif
