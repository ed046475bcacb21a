/* The program that a process executes. */
#ifndef CAPSULE_PROGRAM_H
#define CAPSULE_PROGRAM_H

#include <sys/types.h>

#include "account.h"
#include "options.h"

/* Name the executable and how it is linked. */
void program_describe(struct program *program, pid_t process);

/* Whether the run must not continue without the preloads in this program. This applies to the first
 * program, unless its loader does not support them. A loader continues without a library that it
 * cannot load. */
bool program_needs_preloads(const struct program *program, const struct options *options);

/* Check whether all preloads are mapped; to be called when the loader has processed them. */
void program_check_preloads(struct program *program, pid_t process, const struct options *options);

/* Check it again when the program has ended: a preload can make the loader fail. */
void program_check_end(const struct program *program, const struct options *options);

/* Wait for the preloads of the first program of a run without a supervisor, and check them as
 * program_check_preloads does. */
void program_await_preloads(pid_t process, const struct options *options);

#endif
