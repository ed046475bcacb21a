/* The source of the supervisor's random bytes: a key, the kernel (when recording), or a recording.
 * A channel is one stream of these bytes, and has its own record in the journal. */
#ifndef CAPSULE_CHANNEL_H
#define CAPSULE_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../shared/entropy.h"
#include "../shared/journal.h"
#include "../shared/recording.h"
#include "options.h"

/* The way in which a channel is read; the numbers are those of the interposer's sources. */
enum channel_kind { CHANNEL_CALLS = 4, CHANNEL_DEVICE = 5 };

/* A copy gives the same bytes again: an answer that was not delivered is undone by restoring the
 * copy that was made before. */
struct channel {
    bool open;
    enum channel_kind kind;
    char process[CAPSULE_PATH_SIZE], name[CAPSULE_PATH_SIZE];
    struct capsule_stream derived;
    struct recorded_thread recorded;
    bool known; /* in the recording */
    /* About the last read: the number of recorded bytes, or the bytes that a recording keeps. */
    size_t recorded_part;
    uint8_t kept[CAPSULE_KEPT_SIZE];
    uint64_t calls, bytes;         /* that were used */
    struct journal_thread *record; /* from the first use on */
    struct journal_counter *counter;
};

/* Begin the journal; and the recording, when it is replayed. */
void channels_begin(const struct options *options);

/* The stream `label` of a thread: key and name in the journal. Its name there is
 * capsule_path_stream's. */
void channel_open(struct channel *channel, enum channel_kind kind, const char *process,
                  const char *thread, const char *label);

/* Read the next bytes; false when a replayed call requests bytes that were not recorded. */
bool channel_read(struct channel *channel, uint8_t *out, size_t size);

/* `size` bytes of the last read were used, so they are counted and recorded. Only now is it known
 * whether a device gave more than was recorded. */
void channel_used(struct channel *channel, const uint8_t *bytes, size_t size);

/* Whether a replay requested bytes that were not recorded. The journal describes the request, and
 * the run must end with CAPSULE_MISMATCH_STATUS. */
bool channels_mismatch(void);

#endif
