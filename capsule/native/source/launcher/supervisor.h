/* Answers system calls that ask the kernel for randomness, by seccomp user notification. */
#ifndef CAPSULE_SUPERVISOR_H
#define CAPSULE_SUPERVISOR_H

#include <sys/types.h>

#include "options.h"

/* Serve the notifications that come from `listener` (filter.h) until the process ends. */
void supervisor_begin(const struct options *options, int listener, pid_t root);

/* Complete the account, once no process is left. */
void supervisor_end(void);

#endif
