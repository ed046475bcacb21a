/* The launcher's parts. See docs/launcher.md. */
#ifndef CAPSULE_LAUNCH_H
#define CAPSULE_LAUNCH_H

#include <stdbool.h>
#include <stdint.h>

#include "../shared/entropy.h"

#define FAILURE_STATUS 87 /* of a launcher that could not do what it was asked */
#define MAX_PRELOADS 8
#define MAX_CORES 1024 /* processors in the C library's sets of them */

struct options {
    enum mode mode;
    const char *mode_name, *key, *directory, *exhaustion, *clock, *listings, *cores;
    const char *preloads[MAX_PRELOADS]; /* as the kernel names them: absolute, without links */
    int preload_count;
    bool supervised, fixed_addresses;
    int64_t time_limit; /* seconds; 0 for none */
    char **program;
};

/* Write the failure to standard error and to launch-failure.json, end every process of the program
 * and exit with FAILURE_STATUS. `code` is one of docs/errors.md. */
_Noreturn void fail(const char *code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Exit with `status`, once no process is left and the report is written. */
_Noreturn void end_run(int status);

/* Something to do when a descriptor is ready; embedded in what it is about. */
struct watch {
    void (*ready)(struct watch *watch, uint32_t events);
};

/* `events` are those of epoll. A descriptor that is closed is no longer watched. */
void watch_descriptor(int descriptor, uint32_t events, struct watch *watch);

#endif
