/* The environment of children. */
#ifndef CAPSULE_ENVIRONMENT_H
#define CAPSULE_ENVIRONMENT_H

#include <stddef.h>

#define ENVIRONMENT_KEPT 64 /* settings of ours in an environment, at most */

/* Copy our settings, before the program can change them. */
void keep_environment(void);

/* Name a process path, and the calling thread's clock, in the program's own environment. */
void name_in_environment(const char *path);

/* How many strings there are; and a size that is enough for what make_environment adds. */
size_t environment_count(char *const strings[]);
size_t environment_text_size(char *const given[]);

/* `given`, with our settings put back, and process path and clock set. `made` and `text` are on a
 * caller's stack, because the child of a fork cannot allocate. */
void make_environment(char *made[], char *text, char *const given[], const char *path);

/* Declare `name`, the environment for a program of process path `path`. */
#define ENVIRONMENT(name, given, path)                                                             \
    char *name[environment_count(given) + ENVIRONMENT_KEPT + 4];                                   \
    char name##_text[environment_text_size(given)];                                                \
    make_environment(name, name##_text, given, path)

#endif
