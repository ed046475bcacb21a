/* The options of the launcher. See docs/launcher.md. */
#ifndef CAPSULE_OPTIONS_H
#define CAPSULE_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "../shared/entropy.h"

#define MAX_PRELOADS 8

struct options {
    enum mode mode;
    const char *mode_name, *key, *directory, *exhaustion, *clock, *listings, *cores;
    const char *preloads[MAX_PRELOADS]; /* as the kernel names them: absolute, without links */
    int preload_count;
    bool supervised, fixed_addresses;
    int64_t time_limit; /* seconds; 0 for none */
    char **program;
};

/* Read the command line, and prepare the directory of the run. */
const struct options *options_read(int count, char **words);

#endif
