#include "recording.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "entropy.h"

#define HEADER "CAPSPROF\2\0>" /* magic, version, EM_X86_64; with the final zero */
#define HEADER_SIZE 12

static bool is_intact(const uint8_t *data, size_t size) {
    struct capsule_blake2s hash;
    uint8_t digest[CAPSULE_KEY_SIZE];
    if (size < HEADER_SIZE + sizeof digest || memcmp(data, HEADER, HEADER_SIZE) != 0) return false;
    capsule_blake2s_begin(&hash, NULL);
    capsule_blake2s_add(&hash, data, size - sizeof digest);
    capsule_blake2s_end(&hash, digest);
    return memcmp(digest, data + size - sizeof digest, sizeof digest) == 0;
}

bool recording_open(struct recording *recording, const char *directory) {
    struct stat facts;
    char path[4096];
    int length = snprintf(path, sizeof path, "%s/%s", directory, RECORDING_NAME);
    int file = length < (int)sizeof path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return false;
    size_t size = fstat(file, &facts) == 0 ? (size_t)facts.st_size : 0;
    const int flags = MAP_PRIVATE | MAP_FIXED_NOREPLACE;
    const uint8_t *data =
        size > 0 ? mmap(RECORDING_ADDRESS, size, PROT_READ, flags, file, 0) : MAP_FAILED;
    close(file);
    if (data == MAP_FAILED || !is_intact(data, size)) return false;
    *recording = (struct recording){data, data + size - CAPSULE_KEY_SIZE};
    return true;
}

/* Read a number with seven bits in each byte, the lowest bits first. */
static uint64_t read_number(const struct recording *recording, const uint8_t **at) {
    uint64_t number = 0;
    for (int shift = 0; shift < 64 && *at < recording->end; shift += 7) {
        uint8_t byte = *(*at)++;
        number |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) break;
    }
    return number;
}

/* Skip bytes; a size in the file cannot lead past its end. */
static const uint8_t *skip(const struct recording *recording, const uint8_t *at, uint64_t size) {
    return size < (uint64_t)(recording->end - at) ? at + size : recording->end;
}

static bool read_matches(const struct recording *recording, const uint8_t **at, const char *text) {
    uint64_t size = read_number(recording, at);
    const uint8_t *from = *at;
    *at = skip(recording, from, size);
    return (uint64_t)(*at - from) == strlen(text) && memcmp(from, text, strlen(text)) == 0;
}

bool recording_find(const struct recording *recording, const char *process, const char *thread,
                    struct recorded_thread *found) {
    const uint8_t *at = recording->data + HEADER_SIZE;
    /* A program may change the counts while the file is mapped, so both loops end with the file. */
    for (uint64_t libraries = read_number(recording, &at); libraries > 0 && at < recording->end;
         libraries--) {
        uint64_t size = read_number(recording, &at);
        at = skip(recording, at, size);
    }
    for (uint64_t threads = read_number(recording, &at); threads > 0 && at < recording->end;
         threads--) {
        bool matches = read_matches(recording, &at, process);
        matches &= read_matches(recording, &at, thread);
        uint64_t calls = read_number(recording, &at);
        uint64_t list_size = read_number(recording, &at);
        uint64_t byte_count = read_number(recording, &at);
        const uint8_t *bytes = skip(recording, at, list_size);
        const uint8_t *end = skip(recording, bytes, byte_count);
        *found = (struct recorded_thread){calls, at, bytes, end};
        if (matches) return true;
        at = end;
    }
    return false;
}

bool recording_next(const struct recording *recording, struct recorded_thread *thread,
                    struct recorded_call *call) {
    if (thread->calls_left == 0) return false;
    thread->calls_left--;
    call->source = (uint32_t)read_number(recording, &thread->next_call);
    read_number(recording, &thread->next_call); /* the library, which is the report's */
    call->size = read_number(recording, &thread->next_call);
    call->kept = thread->next_byte;
    size_t kept = capsule_kept_size(call->size);
    if (kept > (size_t)(thread->end - thread->next_byte)) return false;
    thread->next_byte += kept;
    return true;
}
