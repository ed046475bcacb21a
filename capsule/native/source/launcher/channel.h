/* Where the supervisor's random bytes come from: a key, the kernel while it is recorded, or a
 * recording. A channel is one stream of them, and has a record of its own in the journal. */
#ifndef CAPSULE_CHANNEL_H
#define CAPSULE_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../shared/entropy.h"
#include "../shared/journal.h"
#include "../shared/recording.h"
#include "options.h"

/* What a channel is read by; the numbers of the same sources in the interposer's journal. */
enum channel_kind { CHANNEL_CALLS = 4, CHANNEL_DEVICE = 5 };

/* A copy reads the same bytes again: an answer that was not delivered is undone by going back to
 * the copy that was made before. */
struct channel {
    bool open;
    enum channel_kind kind;
    char process[CAPSULE_PATH_SIZE], name[CAPSULE_PATH_SIZE];
    struct capsule_stream derived;
    struct recorded_thread recorded;
    bool known; /* in the recording */
    /* Of the last read: how much of it was recorded, or what is kept of it when it is. */
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

/* Read the next bytes; false when a replayed call asks for what was not recorded. */
bool channel_read(struct channel *channel, uint8_t *out, size_t size);

/* `size` bytes of the last read came to be used: they count, and they are recorded. Only now is it
 * known whether a device gave more than was recorded. */
void channel_used(struct channel *channel, const uint8_t *bytes, size_t size);

/* Whether a replay asked for what was not recorded. The journal says what it was, and the run must
 * end with CAPSULE_MISMATCH_STATUS. */
bool channels_mismatch(void);

#endif
