#define _GNU_SOURCE
#include "channel.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/random.h>

#include "ending.h"

#define CALLER "(kernel)" /* in the place of a library's name */

static const struct options *options;
static uint8_t root_key[CAPSULE_KEY_SIZE];
static struct recording recording;
static struct journal_header *journal;
static bool mismatched;

/* The program can shorten the files that are mapped here, and the disk may have no room for a page
 * of a sparse file. Only an access to these files is interrupted here, so fail() can be called. */
static void file_is_shorter(int number, siginfo_t *cause, void *context) {
    (void)number, (void)context;
    if (cause->si_code > 0) /* not sent by a process */
        fail("CAP-R112", "a page of the journal or of %s cannot be read or written",
             RECORDING_NAME);
}

void channels_begin(const struct options *given) {
    const struct sigaction action = {.sa_sigaction = file_is_shorter, .sa_flags = SA_SIGINFO};
    options = given;
    sigaction(SIGBUS, &action, NULL);
    if (options->key) capsule_key_parse(root_key, options->key); /* was checked */
    journal = journal_open(options->directory);
    if (journal == NULL)
        fail("CAP-R103", "no journal can be created in %s: %s", options->directory,
             strerror(errno));
    if (options->mode == MODE_REPLAY && !recording_open(&recording, options->directory))
        fail("CAP-R111", "%s/%s is not an intact profile of this version and architecture",
             options->directory, RECORDING_NAME);
}

static void *claim(enum journal_type type, size_t size) {
    void *record = journal_claim(journal, type, size);
    if (record == NULL) fail("CAP-R112", "the journal of the run's randomness is full or damaged");
    return record;
}

static void open_records(struct channel *channel) {
    channel->record = claim(JOURNAL_THREAD, sizeof *channel->record);
    strcpy(channel->record->process, channel->process);
    strcpy(channel->record->thread, channel->name);
    journal_publish(&channel->record->record);
    channel->counter = claim(JOURNAL_COUNTER, sizeof *channel->counter);
    channel->counter->thread = journal_offset(journal, channel->record);
    channel->counter->source = channel->kind;
    strcpy(channel->counter->caller, CALLER);
    journal_publish(&channel->counter->record);
}

void channel_open(struct channel *channel, enum channel_kind kind, const char *process,
                  const char *thread, const char *label) {
    *channel = (struct channel){.open = true, .kind = kind};
    strcpy(channel->process, process);
    capsule_path_stream(channel->name, thread, label);
    capsule_stream_open(&channel->derived, root_key, process, thread, label);
    if (options->mode == MODE_REPLAY)
        channel->known = recording_find(&recording, process, channel->name, &channel->recorded);
}

/* ---- replaying ---- */

bool channels_mismatch(void) { return mismatched; }

/* The journal contains the reason; capsule.entropy.journal reads and explains it. */
static void channel_mismatch(const struct channel *channel, size_t size,
                             const struct recorded_call *recorded) {
    struct journal_mismatch *entry = claim(JOURNAL_MISMATCH, sizeof *entry);
    entry->reason = recorded ? MISMATCH_OTHER : channel->known ? MISMATCH_MORE : MISMATCH_THREAD;
    entry->requested_source = channel->kind;
    entry->requested_size = size;
    entry->recorded_source = recorded ? recorded->source : 0;
    entry->recorded_size = recorded ? recorded->size : 0;
    entry->call = channel->calls;
    entry->offset = channel->bytes;
    strcpy(entry->process, channel->process);
    strcpy(entry->thread, channel->name);
    journal_publish(&entry->record);
    atomic_store(&journal->failed, JOURNAL_HOLDS_MISMATCH);
    mismatched = true;
}

static bool may_derive(void) { return strcmp(options->exhaustion, "virtual") == 0; }

/* Give the recorded bytes, and derived bytes when the recording has ended. A call must equal the
 * recorded one, unless the spec allows derived bytes instead. A device is filled again when it was
 * read: each filling was recorded, the last one as far as it was read. */
static bool channel_replay(struct channel *channel, uint8_t *out, size_t size) {
    struct recorded_call call;
    bool is_call = channel->kind == CHANNEL_CALLS;
    bool found = channel->known && recording_next(&recording, &channel->recorded, &call);
    bool fits = found && call.source == (uint32_t)channel->kind &&
                (is_call ? call.size == size : call.size <= size);
    if (!fits && is_call && !may_derive()) {
        channel_mismatch(channel, size, found ? &call : NULL);
        return false;
    }
    size_t part = fits ? call.size : 0;
    if (fits) capsule_expand(out, part, call.kept);
    capsule_stream_read(&channel->derived, out + part, size - part);
    channel->recorded_part = part;
    if (!fits) channel->known = false; /* from here on everything is derived */
    return true;
}

static void read_fresh(uint8_t *out, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t length = getrandom(out + done, size - done, 0);
        if (length < 0 && errno != EINTR)
            fail("CAP-R110", "the kernel returns no random bytes: %s", strerror(errno));
        if (length > 0) done += (size_t)length;
    }
}

bool channel_read(struct channel *channel, uint8_t *out, size_t size) {
    channel->recorded_part = size; /* unless it is replayed */
    if (options->mode == MODE_REPLAY) return channel_replay(channel, out, size);
    if (options->mode == MODE_VIRTUAL) capsule_stream_read(&channel->derived, out, size);
    else {
        read_fresh(channel->kept, capsule_kept_size(size));
        capsule_expand(out, size, channel->kept);
    }
    return true;
}

/* ---- what was used ---- */

/* The used part of a device's filling may be short enough to be kept unchanged. */
static void record_call(const struct channel *channel, const uint8_t *bytes, size_t size) {
    size_t kept = capsule_kept_size(size);
    struct journal_call *call = claim(JOURNAL_CALL, sizeof *call + kept);
    memcpy(call + 1, size > CAPSULE_KEPT_SIZE ? channel->kept : bytes, kept);
    call->counter = journal_offset(journal, channel->counter);
    call->size = size;
    journal_publish(&call->record);
}

/* A device is filled in advance. Whether the program read more than was recorded is known only
 * after it has read. */
static bool count_derived(struct channel *channel, size_t size) {
    struct recorded_call recorded = {.source = channel->kind, .size = channel->recorded_part};
    if (!may_derive()) {
        channel_mismatch(channel, size, channel->recorded_part ? &recorded : NULL);
        return false;
    }
    channel->record->derived_calls++;
    channel->record->derived_bytes += size - channel->recorded_part;
    return true;
}

void channel_used(struct channel *channel, const uint8_t *bytes, size_t size) {
    if (size == 0) return;
    if (channel->record == NULL) open_records(channel);
    if (size > channel->recorded_part && !count_derived(channel, size)) return;
    if (options->mode == MODE_RECORD) record_call(channel, bytes, size);
    channel->record->calls = channel->counter->calls = ++channel->calls;
    channel->record->bytes = channel->counter->bytes = channel->bytes += size;
}
