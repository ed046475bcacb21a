/* A recorded random profile: the requests of each thread, and the bytes that it got. The format is
 * that of docs/random-profiles.md; capsule.entropy.profile has checked the contents. */
#ifndef CAPSULE_RECORDING_H
#define CAPSULE_RECORDING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RECORDING_NAME "replayed.profile" /* in the folder of the journal */

/* The address at which it is mapped: far from every address that the kernel chooses, so that a
 * replay has the addresses of the recorded run, in which no recording was mapped. */
#define RECORDING_ADDRESS ((void *)0x210000000000)

struct recording {
    const uint8_t *data,
        *end; /* mapped, without its checksum; past `end` everything reads as zero */
};

/* The rest of a thread's recording. */
struct recorded_thread {
    uint64_t calls_left;
    const uint8_t *next_call, *next_byte, *end; /* `end` is that of the bytes that were kept */
};

struct recorded_call {
    uint32_t source;
    uint64_t size;
    const uint8_t *kept; /* for capsule_expand */
};

/* Open the recording in `directory`. False when the file cannot be read or is not an intact profile
 * of this version and machine. */
bool recording_open(struct recording *recording, const char *directory);

/* Find the recording of a thread; false when there is none. */
bool recording_find(const struct recording *recording, const char *process, const char *thread,
                    struct recorded_thread *found);

/* Move past the next call of the thread; false when there is none. */
bool recording_next(const struct recording *recording, struct recorded_thread *thread,
                    struct recorded_call *call);

#endif
