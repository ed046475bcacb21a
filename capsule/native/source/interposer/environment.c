/* The environment: children stay under the interposer, whatever environment they are given.
 *
 * In a program's own environment, its path has a '?' at the end: a process that is started from it
 * without a function of lineage.c (by the C library itself, or by a raw system call) has no number,
 * and must not be mistaken for its parent.
 */
#include "environment.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "interposer.h"

extern char **environ;

#define PATH_NAME "CAPSULE_ENTROPY_PATH="
#define CLOCK_NAME "CAPSULE_CLOCK_PASSED="
#define CLOCK_DIGITS 19 /* of any 63-bit number */
#define PRELOAD_NAME "LD_PRELOAD="
#define BLOCK (1 << 16)

static struct {
    size_t count;
    char **entries; /* CAPSULE_…=…, but for the path and the clock; the processor's masks */
    char *preload;  /* LD_PRELOAD=…, or NULL */
    /* The program's own entry: "CAPSULE_ENTROPY_PATH=" and the path of what has no number. */
    char marked[sizeof PATH_NAME + CAPSULE_PATH_SIZE];
    char clock[sizeof CLOCK_NAME + CLOCK_DIGITS]; /* likewise: its creator's clock */
} kept;

static bool starts_with(const char *text, const char *start) {
    return strncmp(text, start, strlen(start)) == 0;
}

static bool same_name(const char *a, const char *b) {
    size_t length = (size_t)(strchr(a, '=') - a) + 1;
    return strncmp(a, b, length) == 0;
}

/* Memory of `size` bytes outside the program's heap, because addresses in the heap must not depend
 * on the length of our settings. */
static void *block(size_t size) {
    void *made = mmap(NULL, (size + BLOCK - 1) / BLOCK * BLOCK, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) refuse("no memory is available for the settings: %s", strerror(errno));
    return made;
}

/* Set by the launcher; a program may have set the variable to another value. */
static bool is_processor_mask(const char *entry) {
    static const char *const entries[] = CAPSULE_PROCESSOR_MASKS;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (strcmp(entry, entries[i]) == 0) return true;
    return false;
}

static bool is_ours(const char *entry) {
    return is_processor_mask(entry) || starts_with(entry, PRELOAD_NAME) ||
           (starts_with(entry, "CAPSULE_") && strchr(entry, '=') &&
            !starts_with(entry, PATH_NAME) && !starts_with(entry, CLOCK_NAME));
}

/* The settings are copied, because programs overwrite the memory of their environment. */
void keep_environment(void) {
    size_t count = 0, size = 1;
    for (char **entry = environ; entry && *entry; entry++) {
        if (!is_ours(*entry)) continue;
        count++;
        size += strlen(*entry) + 1;
    }
    kept.entries = block(count * sizeof *kept.entries + size);
    char *copy = (char *)(kept.entries + count);
    for (char **entry = environ; entry && *entry; entry++) {
        if (!is_ours(*entry)) continue;
        strcpy(copy, *entry);
        if (starts_with(copy, PRELOAD_NAME)) kept.preload = copy;
        else kept.entries[kept.count++] = copy;
        copy += strlen(copy) + 1;
    }
    putenv(kept.marked);
    putenv(kept.clock);
}

static char *clock_entry(char entry[sizeof kept.clock]) {
    snprintf(entry, sizeof kept.clock, CLOCK_NAME "%0*" PRId64, CLOCK_DIGITS,
             this_thread()->passed);
    return entry;
}

static size_t count_strings(char *const strings[]) {
    size_t count = 0;
    while (strings && strings[count]) count++;
    return count;
}

size_t environment_room(char *const given[]) { return count_strings(given) + kept.count + 4; }

static const char *find_entry(char *const given[], const char *name) {
    for (size_t i = 0; given && given[i]; i++)
        if (same_name(name, given[i])) return given[i];
    return NULL;
}

size_t environment_text_size(char *const given[]) {
    const char *preload = find_entry(given, PRELOAD_NAME);
    size_t ours = kept.preload ? strlen(kept.preload) + 1 : 0;
    size_t theirs = preload ? strlen(preload) : 0;
    return sizeof kept.clock + sizeof PATH_NAME + CAPSULE_PATH_SIZE + ours + theirs + 1;
}

/* Our libraries, and then the libraries that the program preloads. */
static char *merge_preload(char *text, const char *given) {
    const char *ours = kept.preload + strlen(PRELOAD_NAME);
    const char *theirs = given ? given + strlen(PRELOAD_NAME) : "";
    strcpy(text, PRELOAD_NAME);
    if (!strstr(theirs, ours)) strcat(text, ours);
    if (*theirs && text[strlen(PRELOAD_NAME)]) strcat(text, ":");
    return strcat(text, theirs);
}

void make_environment(char *made[], char *text, char *const given[], const char *path) {
    size_t count = 0;
    for (size_t i = 0; given && given[i]; i++) {
        bool replaced = starts_with(given[i], PATH_NAME) || starts_with(given[i], CLOCK_NAME) ||
                        (kept.preload && starts_with(given[i], PRELOAD_NAME));
        if (!replaced) made[count++] = given[i];
    }
    /* A setting that the program changed keeps its value; one that it removed is put back. */
    for (size_t i = 0; i < kept.count; i++)
        if (!find_entry(given, kept.entries[i])) made[count++] = kept.entries[i];
    made[count++] = clock_entry(text);
    made[count++] = strcat(strcpy(text + sizeof kept.clock, PATH_NAME), path);
    text += sizeof kept.clock + strlen(path) + sizeof PATH_NAME;
    if (kept.preload) made[count++] = merge_preload(text, find_entry(given, PRELOAD_NAME));
    made[count] = NULL;
}

/* ---- programs that the C library starts with the program's own environment ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread bool lending;

/* `given` is what the program sees, NULL while nothing is lent; `sent` is in its place meanwhile.
 * Both are also kept as they were, because wordexp() assigns variables: setenv() then writes into
 * `given` or `sent`, or replaces them by an array of its own and frees `given`. */
static struct {
    char **given, **sent, **given_before, **sent_before;
    bool active;
} lent;

static bool is_complete(char *const given[]) {
    const char *preload = find_entry(given, PRELOAD_NAME);
    bool complete =
        find_entry(given, PATH_NAME) == kept.marked &&
        find_entry(given, CLOCK_NAME) == kept.clock &&
        (!kept.preload || (preload && strstr(preload, kept.preload + strlen(PRELOAD_NAME))));
    for (size_t i = 0; complete && i < kept.count; i++)
        complete = find_entry(given, kept.entries[i]) != NULL;
    return complete;
}

/* Never freed, because another thread may still be reading it. */
static void make_lendable(const char *path) {
    static char **memory;
    static size_t size;
    size_t room = environment_room(environ), given = count_strings(environ);
    size_t needed = 3 * room * sizeof *memory + environment_text_size(environ);
    if (needed > size) {
        size = 2 * needed;
        memory = block(size);
    }
    lent.given = environ;
    lent.sent = memory;
    lent.sent_before = memory + room;
    lent.given_before = memory + 2 * room;
    make_environment(lent.sent, (char *)(memory + 3 * room), environ, path);
    memcpy(lent.sent_before, lent.sent, room * sizeof *memory);
    if (given > 0) memcpy(lent.given_before, environ, given * sizeof *memory);
    lent.given_before[given] = NULL;
}

void lend_environment(const char *path) {
    pthread_mutex_lock(&lock);
    lending = true;
    name_in_environment(path);
    if (is_complete(environ)) return;
    make_lendable(path);
    environ = lent.sent;
    lent.active = true;
}

static bool is_among(const char *entry, char *const strings[]) {
    for (size_t i = 0; strings[i]; i++)
        if (strings[i] == entry) return true;
    return false;
}

/* Give the program its own environment, with the variables that were assigned meanwhile. */
static void take_back(void) {
    char *assigned[count_strings(environ) + 1];
    size_t count = 0;
    for (size_t i = 0; environ && environ[i]; i++)
        if (!is_among(environ[i], lent.sent_before)) assigned[count++] = environ[i];
    environ = environ == lent.sent ? lent.given : lent.given_before;
    for (size_t i = 0; i < count; i++) putenv(assigned[i]);
}

void take_environment_back(void) {
    if (lent.active) take_back();
    lent.active = lending = false;
    pthread_mutex_unlock(&lock);
}

void own_environment(void) {
    /* If this thread lends, an older C library forks, and the child executes the shell. If another
     * thread lends, its assignments do not belong to this child, and setenv()'s own array is not
     * changed. */
    if (lent.active && !lending) {
        if (environ == lent.sent) environ = lent.given;
        lent.active = false;
    }
    pthread_mutex_init(&lock, NULL);
}

void name_in_environment(const char *path) {
    strcat(strcpy(kept.marked, PATH_NAME), path);
    clock_entry(kept.clock);
}
