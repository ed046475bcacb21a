#define _GNU_SOURCE
#include "ending.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define POLL_NANOSECONDS 1000000

struct run run;

/* Kill all children; false if there are none. */
static bool kill_children(void) {
    bool any = false;
    FILE *children = fopen("/proc/thread-self/children", "re");
    /* Without the list, at least the program itself can be ended. */
    if (children == NULL) return run.root && kill(run.root, SIGKILL) == 0;
    for (pid_t child; fscanf(children, "%d", &child) == 1; any = true) kill(child, SIGKILL);
    fclose(children);
    return any;
}

/* Each descendant becomes a child of this process, its subreaper, when its own parent has ended. A
 * process that is traced can be waited for only after its tracer, which may itself become a child
 * only now, has ended. So the loop does not wait for a particular process. */
int kill_descendants(void) {
    const struct timespec pause = {0, POLL_NANOSECONDS};
    int count = 0;
    for (pid_t child = 0; child >= 0 && kill_children(); nanosleep(&pause, NULL))
        while ((child = waitpid(-1, NULL, WNOHANG)) > 0) count++;
    return count;
}

bool begin_document(struct document *document, const char *name) {
    if (run.directory == NULL) return false;
    snprintf(document->path, PATH_MAX, "%s/%s", run.directory, name);
    snprintf(document->unfinished, PATH_MAX, "%s/.%s", run.directory, name);
    unlink(document->unfinished);
    int descriptor =
        open(document->unfinished, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (descriptor < 0) return false;
    document->file = fdopen(descriptor, "w");
    return document->file != NULL;
}

bool end_document(struct document *document) {
    /* Not ||, because the file is closed in either case. */
    if (!(ferror(document->file) | fclose(document->file)) &&
        rename(document->unfinished, document->path) == 0)
        return true;
    int error = errno;
    unlink(document->unfinished); /* the disk may be full */
    errno = error;
    return false;
}

void json_string(FILE *file, const char *text) {
    fputc('"', file);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\') fprintf(file, "\\%c", *c);
        else if (*c < 0x20) fprintf(file, "\\u%04x", *c);
        else fputc(*c, file);
    }
    fputc('"', file);
}

void fail(const char *code, const char *format, ...) {
    char message[1024];
    struct document document;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    /* This comes first, so that no process of the run can delay the rest or change the files. */
    kill_descendants();
    fprintf(stderr, "capsule-launch: %s %s\n", code, message);
    if (begin_document(&document, FAILURE_NAME)) {
        fprintf(document.file, "{\"schema\":\"capsule/launch-failure/v1\",\"code\":\"%s\",", code);
        fputs("\"message\":", document.file);
        json_string(document.file, message);
        fputs("}\n", document.file);
        end_document(&document);
    }
    exit(FAILURE_STATUS);
}
