#define _GNU_SOURCE
#include "account.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ending.h"

static struct program *first, **last = &first;
static uint64_t processes = 1;

struct program *account_program(const char *process, const struct program *like) {
    struct program *row = calloc(1, sizeof *row);
    char *path = strdup(process);
    if (row == NULL || path == NULL) fail("CAP-R110", "the supervisor is out of memory");
    row->process = path;
    row->executable = like ? like->executable : NULL;
    row->linkage = like ? like->linkage : "unknown";
    row->forked = like != NULL;
    row->started = like && like->started;
    row->preloaded = like && like->preloaded;
    row->start_bytes_derived = like && like->start_bytes_derived;
    *last = row;
    last = &row->next;
    processes += row->forked;
    return row;
}

const struct program *account_first(void) { return first; }

static void write_tally(FILE *file, const char *name, struct tally tally) {
    fprintf(file, ",\"%s\":{\"calls\":%" PRIu64 ",\"bytes\":%" PRIu64 "}", name, tally.calls,
            tally.bytes);
}

static void write_row(FILE *file, const struct program *row) {
    fprintf(file, "{\"process\":\"%s\",\"executed\":%s,\"executable\":", row->process,
            row->forked ? "false" : "true");
    if (row->executable) json_string(file, row->executable);
    else fputs("null", file);
    fprintf(file, ",\"linkage\":\"%s\",\"preloaded\":%s,\"start_bytes_derived\":%s", row->linkage,
            row->preloaded ? "true" : "false", row->start_bytes_derived ? "true" : "false");
    write_tally(file, "getrandom", row->getrandom);
    write_tally(file, "inside_libc", row->inside_libc);
    write_tally(file, "devices", row->devices);
    fprintf(file, ",\"unanswered\":%" PRIu64 "}", row->unanswered);
}

static bool is_silent(const struct program *row) {
    return row->forked &&
           row->getrandom.calls + row->inside_libc.calls + row->devices.calls + row->unanswered ==
               0;
}

uint64_t account_processes(void) { return processes; }

void account_write(FILE *file) {
    const char *separator = "";
    fputc('[', file);
    for (const struct program *row = first; row; row = row->next) {
        if (is_silent(row)) continue;
        fputs(separator, file);
        write_row(file, row);
        separator = ",\n";
    }
    fputc(']', file);
}
