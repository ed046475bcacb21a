/* What a process executes. */
#ifndef CAPSULE_PROGRAM_H
#define CAPSULE_PROGRAM_H

#include <sys/types.h>

#include "account.h"
#include "options.h"

/* Name the executable and how it is linked. */
void program_describe(struct program *program, pid_t process);

/* Whether the run must not go on without the preloads in this program: the first one, unless its
 * loader knows none. A loader itself goes on without a library that it cannot load. */
bool program_needs_preloads(const struct program *program, const struct options *options);

/* See whether all preloads are mapped; to be called when the loader has been through them. */
void program_check_preloads(struct program *program, pid_t process, const struct options *options);

/* Make sure of it when the program has ended: a loader may give up over a preload. */
void program_check_end(const struct program *program, const struct options *options);

/* Does what program_check_preloads does for the first program of a run without a supervisor, which
 * would say when to look. */
void program_await_preloads(pid_t process, const struct options *options);

#endif
