/* Scopes: pieces of work whose randomness does not depend on the thread or process that does them.
 *
 * A pool gives a task to any worker that is ready, and an event loop resumes any coroutine that can
 * continue. A scope has the path of the thread that submitted the work, and a number. While a
 * worker executes this work, it draws, forks and creates threads under that path instead of its
 * own. capsule/training/arrivals/scopes.py calls these functions. */
#include <stdlib.h>
#include <string.h>

#include "interposer.h"

/* Number a piece of work of the calling thread's. `process` and `thread` receive its paths,
 * `passed` its calendar clock. */
EXPORT uint32_t capsule_scope_next(char process[CAPSULE_PATH_SIZE], char thread[CAPSULE_PATH_SIZE],
                                   int64_t *passed) {
    struct thread *self = this_thread();
    strcpy(process, self->process);
    strcpy(thread, self->path);
    *passed = self->passed;
    return ++self->works;
}

/* Make the scope of the n-th piece of work of a thread; or of an item of it, counted from one. Its
 * calendar clock begins at `passed`. NULL when there is no memory, or a path is too long. */
EXPORT void *capsule_scope_open(const char *process, const char *thread, uint32_t n, uint32_t item,
                                int64_t passed) {
    char path[CAPSULE_PATH_SIZE];
    if (strlen(process) >= CAPSULE_PATH_SIZE || strlen(thread) >= CAPSULE_PATH_SIZE) return NULL;
    struct thread *scope = malloc(sizeof *scope);
    if (!scope) return NULL;
    capsule_path_work(path, thread, n);
    if (item > 0) capsule_path_work(path, path, item);
    describe_thread(scope, process, path);
    scope->passed = passed;
    return scope;
}

/* Enter or leave a scope: the states of the calling thread and of the scope are exchanged. */
EXPORT void capsule_scope_switch(void *scope) {
    struct thread *self = this_thread(), before = *self;
    *self = *(struct thread *)scope;
    *(struct thread *)scope = before;
}

/* Return how far the calling thread's calendar clock has advanced. If `begun` is not negative, the
 * clock is set first, to the end of a wait that began there and ran to its time-out after
 * `duration`. A repeated run does not wait for a message that never arrived, but its clock must
 * show the same time. */
EXPORT int64_t capsule_scope_clock(int64_t begun, int64_t duration) {
    struct thread *self = this_thread();
    if (begun >= 0) {
        self->passed = begun;
        advance_clock(one_digit(duration));
    }
    return self->passed;
}

EXPORT void capsule_scope_close(void *scope) { free(scope); }
