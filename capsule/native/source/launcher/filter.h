/* The system calls of which the supervisor is notified. */
#ifndef CAPSULE_FILTER_H
#define CAPSULE_FILTER_H

/* Install the filter for this process and all its descendants. It must have no_new_privs.
 * Returns the descriptor on which the supervisor is notified, or -1 (errno). */
int filter_install(void);

#endif
