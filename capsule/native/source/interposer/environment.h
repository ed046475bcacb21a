/* The environment of children. */
#ifndef CAPSULE_ENVIRONMENT_H
#define CAPSULE_ENVIRONMENT_H

#include <stddef.h>

/* Copy our settings, before the program can change them. */
void keep_environment(void);

/* Name a process path, and the calling thread's clock, in the program's own environment. */
void name_in_environment(const char *path);

/* The number of pointers and of bytes of text that make_environment needs. */
size_t environment_room(char *const given[]);
size_t environment_text_size(char *const given[]);

/* Copy `given`, put our settings back, and set the process path and the clock. `made` and `text`
 * are on a caller's stack, because the child of a fork cannot allocate memory. */
void make_environment(char *made[], char *text, char *const given[], const char *path);

/* For a function of the C library that starts a program with the program's own environment: put the
 * path and our settings, which the program may have removed, into this environment until it is
 * taken back. Only one thread at a time gets past the first of the two functions. */
void lend_environment(const char *path);
void take_environment_back(void);

/* In the child of a fork, while another thread may have been between the two. */
void own_environment(void);

/* Declare `name`, the environment for a program of process path `path`. */
#define ENVIRONMENT(name, given, path)                                                             \
    char *name[environment_room(given)];                                                           \
    char name##_text[environment_text_size(given)];                                                \
    make_environment(name, name##_text, given, path)

#endif
