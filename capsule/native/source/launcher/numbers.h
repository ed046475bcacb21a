/* Process and thread numbers that depend on the program alone. */
#ifndef CAPSULE_NUMBERS_H
#define CAPSULE_NUMBERS_H

#include <stdbool.h>
#include <sys/types.h>

/* Whether the process id namespace contains only this process and its ancestors, so that from now
 * on only its descendants take numbers. */
bool numbers_are_own(void);

/* Let tasks that end at once take the numbers before `next`. The kernel assigns numbers in
 * ascending order, so the next task gets `next`, unless the namespace is already past it. */
void numbers_advance(pid_t next);

#endif
