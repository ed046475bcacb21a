/* The system calls that the supervisor is told about. */
#ifndef CAPSULE_FILTER_H
#define CAPSULE_FILTER_H

/* Install the filter on this process and all that it will create. It must have no_new_privs.
 * Returns the descriptor on which the supervisor is notified, or -1 (errno). */
int filter_install(void);

#endif
