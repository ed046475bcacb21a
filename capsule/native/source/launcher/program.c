#define _GNU_SOURCE
#include "program.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ending.h"
#include "proc.h"

#define POLL_NANOSECONDS 100000

static bool is_glibc_loader(const char *path) {
    const char *name = path ? strrchr(path, '/') : NULL;
    return name && strncmp(name + 1, "ld-linux", 8) == 0;
}

/* A loader that was executed with the program as its argument counts as that program. */
static const char *linkage_of(pid_t process, const char *executable) {
    uint64_t loader = proc_auxiliary(process, AT_BASE);
    if (loader == 0) return is_glibc_loader(executable) ? "glibc" : "static";
    char *path = proc_mapped_at(process, loader);
    bool glibc = is_glibc_loader(path);
    free(path);
    return glibc ? "glibc" : "other";
}

void program_describe(struct program *program, pid_t process) {
    program->executable = proc_executable(process);
    program->linkage = linkage_of(process, program->executable);
}

bool program_needs_preloads(const struct program *program, const struct options *options) {
    return options->preload_count > 0 && !strcmp(program->process, CAPSULE_ROOT_PATH) &&
           !strcmp(program->linkage, "glibc");
}

static const char *program_name(const struct program *program) {
    return program && program->executable ? program->executable : "the program";
}

void program_check_preloads(struct program *program, pid_t process, const struct options *options) {
    bool needed = program_needs_preloads(program, options);
    program->preloaded = options->preload_count > 0;
    for (int i = 0; i < options->preload_count; i++) {
        bool mapped = proc_is_mapped(process, options->preloads[i]);
        if (needed && !mapped)
            fail("CAP-R107", "%s did not load %s", program_name(program), options->preloads[i]);
        program->preloaded = program->preloaded && mapped;
    }
}

void program_check_end(const struct program *program, const struct options *options) {
    if (program ? program_needs_preloads(program, options) && !program->started
                : options->preload_count > 0)
        fail("CAP-R107", "%s ended before it had loaded %s", program_name(program),
             options->preloads[0]);
}

/* Whether /proc shows the new program's memory; before, it shows the launcher's or nothing. */
static bool is_executed(pid_t process) { return proc_auxiliary(process, AT_ENTRY) != 0; }

/* A loader maps the preloads first, and then the libraries of the program. */
void program_await_preloads(pid_t process, const struct options *options) {
    const struct timespec pause = {0, POLL_NANOSECONDS};
    struct program *program = account_program(CAPSULE_ROOT_PATH, NULL);
    struct proc_stat stat;
    if (options->preload_count == 0) return;
    do {
        if (!proc_stat(process, &stat) || strchr("ZX", stat.state))
            fail("CAP-R107", "the program ended before the launcher could check that it loaded %s",
                 options->preloads[0]);
        nanosleep(&pause, NULL);
        program_describe(program, process);
    } while (!is_executed(process) ||
             (program_needs_preloads(program, options) && !proc_is_mapped(process, "libc.so.6")));
    program_check_preloads(program, process, options);
    program->started = true;
}
