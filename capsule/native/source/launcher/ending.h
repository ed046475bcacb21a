/* The end of a launcher that fails, and the documents that it writes about a run. */
#ifndef CAPSULE_ENDING_H
#define CAPSULE_ENDING_H

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/types.h>

#define FAILURE_STATUS 87 /* of a launcher that failed */

/* Files of the run's directory. */
#define REPORT_NAME "launch-report.json"
#define FAILURE_NAME "launch-failure.json"

/* The run, as far as it has begun. */
struct run {
    const char *directory; /* NULL until the directory has been checked */
    pid_t root;            /* the program; 0 before it is started */
};

extern struct run run;

/* A file of the run's directory while it is written. */
struct document {
    FILE *file;
    char path[PATH_MAX], unfinished[PATH_MAX]; /* its name in the end, and until then */
};

/* End every process of the program, write the failure to standard error and to launch-failure.json,
 * and exit with FAILURE_STATUS. `code` is one of docs/errors.md. */
_Noreturn void fail(const char *code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Kill all descendants, and return how many there were. */
int kill_descendants(void);

/* Begin a file of the run's directory; false with errno set when that is not possible. The program
 * can write to this directory. So the file is always new: it replaces any file of its name, and no
 * link or pipe is opened. */
bool begin_document(struct document *document, const char *name);

/* Give the file its name; false with errno set, and without the file, when it is incomplete. */
bool end_document(struct document *document);

/* Write a JSON string, with its quotes. UTF-8 is written unchanged. A file name may contain bytes
 * that are not UTF-8, which the reader replaces. */
void json_string(FILE *file, const char *text);

#endif
