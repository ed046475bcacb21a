#define _GNU_SOURCE
#include "ending.h"

#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/wait.h>

struct run run;

static pid_t any_child(void) {
    pid_t child = 0;
    FILE *children = fopen("/proc/thread-self/children", "re");
    /* Without the list, at least the program itself can be ended. */
    if (children == NULL) return run.root;
    if (fscanf(children, "%d", &child) != 1) child = 0;
    fclose(children);
    return child;
}

/* Each becomes a child of this process, which is their subreaper, when its own parent has ended. */
int kill_descendants(void) {
    int count = 0;
    for (pid_t child; (child = any_child()) != 0; count++) {
        kill(child, SIGKILL);
        if (waitpid(child, NULL, 0) != child) break;
    }
    return count;
}

FILE *begin_document(const char *name, char path[PATH_MAX]) {
    if (run.directory == NULL) return NULL;
    snprintf(path, PATH_MAX, "%s/%s", run.directory, name);
    return fopen(path, "we");
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
    char message[1024], path[PATH_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    fprintf(stderr, "capsule-launch: %s %s\n", code, message);
    FILE *file = begin_document(FAILURE_NAME, path);
    if (file) {
        fprintf(file, "{\"schema\":\"capsule/launch-failure/v1\",\"code\":\"%s\",", code);
        fputs("\"message\":", file);
        json_string(file, message);
        fputs("}\n", file);
        fclose(file);
    }
    kill_descendants();
    exit(FAILURE_STATUS);
}
