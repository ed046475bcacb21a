#include "interposer.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "environment.h"

struct settings settings;
struct real_functions real;

static struct recording recording; /* what is replayed */
static __thread struct thread thread;

/* ---- the end of a run ---- */

void end_whole_run(void) {
    if (settings.launcher == 0) kill(0, SIGKILL); /* no launcher: end the process group */
    /* Sleep without being woken up; by number, because attach() may not have set `real` yet. */
    const struct timespec pause = {.tv_sec = 10};
    if (kill(settings.launcher, CAPSULE_MISMATCH_SIGNAL) == 0)
        system_call(SYS_nanosleep, (long)&pause, 0, 0, 0, 0, 0);
    _exit(CAPSULE_MISMATCH_STATUS);
}

void refuse(const char *format, ...) {
    char message[512] = "capsule-entropy: ";
    size_t length = strlen(message);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message + length, sizeof message - length - 1, format, arguments);
    va_end(arguments);
    strcat(message, "\n");
    system_call(SYS_write, STDERR_FILENO, (long)message, (long)strlen(message), 0, 0, 0);
    end_whole_run();
}

static _Noreturn void fail_with(enum journal_failure failure) {
    atomic_store(&settings.journal->failed, failure);
    end_whole_run();
}

/* ---- what is told in place of the machine ---- */

static struct journal_told *_Atomic told;

/* Two threads may make a record at the same time; the second one stays empty. */
static struct journal_told *begin_telling(void) {
    struct journal_told *made = journal_claim(settings.journal, JOURNAL_TOLD, sizeof *made);
    struct journal_told *none = NULL;
    if (!made) return NULL;
    made->clock = settings.clock;
    made->sorted = settings.listings == LISTINGS_SORTED;
    made->core_count = settings.cores;
    strcpy(made->process, settings.process);
    journal_publish(&made->record);
    return atomic_compare_exchange_strong(&told, &none, made) ? made : none;
}

void tell_once_more(size_t count) {
    struct journal_told *record = atomic_load_explicit(&told, memory_order_relaxed);
    if (!record && settings.journal) record = begin_telling();
    if (record) atomic_fetch_add((_Atomic uint64_t *)((char *)record + count), 1);
}

void stop_telling(void) { atomic_store(&told, NULL); }

/* ---- settings ---- */

/* The launcher pads values that differ between a run and its replay to the same length. */
static bool matches(const char *value, const char *word) {
    size_t length = strlen(word);
    if (strncmp(value, word, length) != 0) return false;
    for (value += length; *value == ' ';) value++;
    return *value == '\0';
}

static int choice(const char *name, int otherwise, const char *const *words) {
    const char *value = getenv(name);
    if (!value) return otherwise;
    for (int i = 0; words[i]; i++)
        if (matches(value, words[i])) return i;
    refuse("'%s' is not a value of %s", value, name);
}

static void open_journal(void) {
    const char *directory = getenv("CAPSULE_ENTROPY_DIRECTORY");
    bool needed = settings.mode == MODE_RECORD || settings.mode == MODE_REPLAY;
    if (directory) settings.journal = journal_open(directory);
    if (!settings.journal && needed)
        refuse("the journal in %s cannot be opened: %s",
               directory ? directory : "CAPSULE_ENTROPY_DIRECTORY",
               directory ? strerror(errno) : "the variable is not set");
    if (settings.journal && atomic_load(&settings.journal->failed)) end_whole_run();
}

static void open_recording(void) {
    const char *directory = getenv("CAPSULE_ENTROPY_DIRECTORY");
    if (!recording_open(&recording, directory))
        refuse("%s/%s is not an intact profile of this version and architecture", directory,
               RECORDING_NAME);
}

/* A number of at most `most`; 0 when the variable is not set. */
static int64_t number(const char *name, int64_t most) {
    const char *value = getenv(name);
    if (!value) return 0;
    char *end;
    errno = 0;
    long long read = strtoll(value, &end, 10);
    if (*end || errno || read < 0 || read > most)
        refuse("%s is '%s', which is not a number from 0 to %lld", name, value, (long long)most);
    return read;
}

static void read_settings(void) {
    static const char *const modes[] = {"system", "virtual", "record", "replay", NULL};
    static const char *const clocks[] = {"system", "fixed", "virtual", NULL};
    static const char *const listings[] = {"system", "sorted", NULL};
    static const char *const exhaustions[] = {"fail", "virtual", NULL};
    const char *launcher = getenv("CAPSULE_LAUNCHER_PID");
    settings.launcher = launcher ? (pid_t)strtol(launcher, NULL, 10) : 0;
    settings.mode = (enum mode)choice("CAPSULE_ENTROPY", MODE_SYSTEM, modes);
    settings.clock = (enum clock)choice("CAPSULE_CLOCK", CLOCK_SYSTEM, clocks);
    settings.clock_passed = number("CAPSULE_CLOCK_PASSED", INT64_MAX);
    settings.listings = (enum listings)choice("CAPSULE_LISTINGS", LISTINGS_SYSTEM, listings);
    settings.cores = (unsigned)number("CAPSULE_CORES", CPU_SETSIZE);
    settings.derive_when_exhausted = choice("CAPSULE_ENTROPY_EXHAUSTION", 0, exhaustions) == 1;
    const char *key = getenv("CAPSULE_ENTROPY_KEY");
    bool derives = settings.mode == MODE_VIRTUAL ||
                   (settings.mode == MODE_REPLAY && settings.derive_when_exhausted);
    if (derives && (!key || !capsule_key_parse(settings.key, key)))
        refuse("CAPSULE_ENTROPY_KEY is not a key of 64 hexadecimal digits");
    open_journal();
    if (settings.mode == MODE_REPLAY) open_recording();
}

/* The replacement for a function that this C library does not have. */
static long lacking(void) {
    errno = ENOSYS;
    return -1;
}

static void *resolve(const char *name) {
    void *function = dlsym(RTLD_NEXT, name);
    return function ? function : (void *)lacking;
}

void attach(void) {
    if (settings.attached) return;
    settings.attached = true; /* now: what follows may call wrappers */
    read_settings();
    const char *process = getenv("CAPSULE_ENTROPY_PATH");
    if (!process) process = CAPSULE_ROOT_PATH;
    if (strlen(process) >= CAPSULE_PATH_SIZE) refuse("CAPSULE_ENTROPY_PATH is too long");
    thread.passed = settings.clock_passed;
    become_process(process);
#define RESOLVE(type, name, arguments) real.name = (type(*) arguments)resolve(#name);
    REAL_FUNCTIONS(RESOLVE)
#undef RESOLVE
    keep_environment();
    watch_forks();
    if (settings.journal) begin_telling(); /* the settings, whether or not anything is asked */
    open_standard_input();
}

/* Let the launcher check the libraries that are mapped here before the program can end. Without a
 * supervisor, the launcher gets no other notification of this moment. */
static void await_launcher(void) {
    const uint64_t answer = UINT64_C(1) << (CAPSULE_LOADED_SIGNAL - 1);
    const long size = sizeof answer;
    uint64_t before;
    /* Without a launcher, its number is 0, like that of a parent in another namespace. */
    if (settings.launcher == 0 || getppid() != settings.launcher) return;
    if (strcmp(settings.process, CAPSULE_ROOT_PATH) != 0) return;
    system_call(SYS_rt_sigprocmask, SIG_BLOCK, (long)&answer, (long)&before, size, 0, 0);
    if (system_call(SYS_kill, settings.launcher, CAPSULE_LOADED_SIGNAL, 0, 0, 0, 0) == 0) {
        long taken;
        do taken = system_call(SYS_rt_sigtimedwait, (long)&answer, 0, 0, size, 0, 0);
        while (taken == -EINTR);
    }
    system_call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&before, 0, size, 0, 0);
}

__attribute__((constructor)) static void begin(void) {
    attach();
    await_launcher();
}

/* ---- threads ---- */

struct thread *this_thread(void) {
    if (!thread.ready) {
        attach();
        /* Started around pthread_create (by the C library itself): it has no number. */
        if (!thread.ready) {
            thread.passed = settings.clock_passed;
            become(settings.process, "?");
        }
    }
    if (was_forked_unseen()) {
        char process[CAPSULE_PATH_SIZE];
        capsule_path_unnumbered(process, settings.process);
        become_process(process);
    }
    return &thread;
}

void describe_thread(struct thread *described, const char *process, const char *path) {
    memset(described, 0, sizeof *described);
    strcpy(described->process, process);
    strcpy(described->path, path);
    described->phase = -1;
    described->ready = true;
}

void become(const char *process, const char *path) {
    struct thread made;
    describe_thread(&made, process, path); /* either path may lie in `thread` */
    /* The child of a fork keeps its creator's clock, and the processors that this one chose. */
    made.passed = thread.passed;
    made.monotonic = thread.monotonic;
    made.affinity = thread.affinity;
    thread = made;
}

/* ---- writing down ---- */

static void *record(enum journal_type type, size_t size) {
    if (!settings.journal) return NULL;
    void *claimed = journal_claim(settings.journal, type, size);
    /* Counts may be incomplete if the journal is full, but a recording must be complete. */
    if (!claimed && (settings.mode == MODE_RECORD || settings.mode == MODE_REPLAY))
        fail_with(JOURNAL_IS_FULL);
    return claimed;
}

static void begin_drawing(struct thread *self) {
    self->drawing = true;
    capsule_stream_open(&self->stream, settings.key, self->process, self->path, "libc");
    if (settings.mode == MODE_REPLAY)
        self->known = recording_find(&recording, self->process, self->path, &self->recorded);
    struct journal_thread *entry = record(JOURNAL_THREAD, sizeof *entry);
    if (!entry) return;
    strcpy(entry->process, self->process);
    strcpy(entry->thread, self->path);
    journal_publish(&entry->record);
    self->record = entry;
}

static const char *library_of(const void *address) {
    Dl_info info;
    if (!dladdr(address, &info) || !info.dli_fname) return "?";
    const char *slash = strrchr(info.dli_fname, '/');
    return slash ? slash + 1 : info.dli_fname;
}

static struct journal_counter *find_counter(struct thread *self, enum source source,
                                            const void *caller) {
    char library[JOURNAL_CALLER_SIZE] = {0};
    strncpy(library, library_of(caller), sizeof library - 1);
    for (uint64_t at = self->counters; at;) {
        struct journal_counter *counter = journal_at(settings.journal, at);
        if (counter->source == source && strcmp(counter->caller, library) == 0) return counter;
        at = counter->next;
    }
    struct journal_counter *counter = record(JOURNAL_COUNTER, sizeof *counter);
    if (!counter) return NULL;
    counter->thread = journal_offset(settings.journal, self->record);
    counter->next = self->counters;
    counter->source = source;
    memcpy(counter->caller, library, sizeof library);
    journal_publish(&counter->record);
    self->counters = journal_offset(settings.journal, counter);
    return counter;
}

/* The counter of a call. Finding a library is slow, so the last few callers are remembered. */
static struct journal_counter *counter_of(struct thread *self, enum source source,
                                          const void *caller) {
    size_t place = ((uintptr_t)caller >> 2 ^ (size_t)source) % CALLERS;
    if (self->callers[place].caller != caller || self->callers[place].source != source) {
        self->callers[place].counter = find_counter(self, source, caller);
        self->callers[place].caller = caller;
        self->callers[place].source = source;
    }
    return self->callers[place].counter;
}

static void count(struct thread *self, struct journal_counter *counter, size_t size) {
    self->calls++;
    self->bytes += size;
    if (self->record) {
        self->record->calls = self->calls;
        self->record->bytes = self->bytes;
    }
    if (counter) {
        counter->calls++;
        counter->bytes += size;
    }
}

/* ---- where bytes come from ---- */

static void fresh(void *buffer, size_t size) {
    uint8_t *to = buffer;
    while (size > 0) {
        long got =
            system_call(SYS_getrandom, (long)to, (long)size, 0, (long)CAPSULE_OWN_CALL, 0, 0);
        if (got == -EINTR) continue;
        if (got <= 0) refuse("getrandom failed: %s", strerror((int)-got));
        to += got;
        size -= (size_t)got;
    }
}

static void fresh_and_recorded(struct journal_counter *counter, void *buffer, size_t size) {
    size_t kept = capsule_kept_size(size);
    struct journal_call *call = record(JOURNAL_CALL, sizeof *call + kept);
    /* The kernel writes into the record itself, which does not count before it is published. */
    fresh(call + 1, kept);
    capsule_expand(buffer, size, (const uint8_t *)(call + 1));
    call->counter = journal_offset(settings.journal, counter);
    call->size = size;
    journal_publish(&call->record);
}

static _Noreturn void mismatch(const struct thread *self, enum source source, size_t size,
                               const struct recorded_call *recorded) {
    struct journal_mismatch *entry = record(JOURNAL_MISMATCH, sizeof *entry);
    entry->reason = recorded ? MISMATCH_OTHER : self->known ? MISMATCH_MORE : MISMATCH_THREAD;
    entry->requested_source = source;
    entry->requested_size = size;
    entry->recorded_source = recorded ? recorded->source : 0;
    entry->recorded_size = recorded ? recorded->size : 0;
    entry->call = self->calls;
    entry->offset = self->bytes;
    strcpy(entry->process, self->process);
    strcpy(entry->thread, self->path);
    journal_publish(&entry->record);
    fail_with(JOURNAL_HOLDS_MISMATCH);
}

/* Give the recorded bytes; false when the profile does not fit and the settings allow derived ones.
 */
static bool replay(struct thread *self, enum source source, void *buffer, size_t size) {
    /* If another process has found a mismatch, no answer may follow. */
    if (atomic_load_explicit(&settings.journal->failed, memory_order_relaxed)) end_whole_run();
    if (self->exhausted) return false;
    struct recorded_call call;
    bool found = self->known && recording_next(&recording, &self->recorded, &call);
    bool fits = found && call.source == (uint32_t)source && call.size == size;
    if (!fits && !settings.derive_when_exhausted)
        mismatch(self, source, size, found ? &call : NULL);
    if (fits) capsule_expand(buffer, size, call.kept);
    self->exhausted = !fits;
    return fits;
}

static void replay_or_derive(struct thread *self, enum source source, void *buffer, size_t size) {
    if (replay(self, source, buffer, size)) return;
    capsule_stream_read(&self->stream, buffer, size);
    self->record->derived_calls++;
    self->record->derived_bytes += size;
}

void draw(enum source source, void *buffer, size_t size, const void *caller) {
    struct thread *self = this_thread();
    if (settings.mode == MODE_SYSTEM) {
        fresh(buffer, size);
        return;
    }
    if (!self->drawing) begin_drawing(self);
    struct journal_counter *counter = self->record ? counter_of(self, source, caller) : NULL;
    if (settings.mode == MODE_VIRTUAL) capsule_stream_read(&self->stream, buffer, size);
    if (settings.mode == MODE_RECORD) fresh_and_recorded(counter, buffer, size);
    if (settings.mode == MODE_REPLAY) replay_or_derive(self, source, buffer, size);
    count(self, counter, size);
}

/* The number of bytes, of `size`, that can be written; the kernel tests one byte of each page. */
static size_t writable_size(const uint8_t *buffer, size_t size) {
    const uintptr_t page = 4096;
    size_t fits = 0;
    while (fits < size && system_call(SYS_getrandom, (long)(buffer + fits), 1, 0,
                                      (long)CAPSULE_OWN_CALL, 0, 0) != -EFAULT)
        fits += page - (uintptr_t)(buffer + fits) % page;
    return fits < size ? fits : size;
}

ssize_t draw_checked(enum source source, void *buffer, size_t size, const void *caller) {
    if (size > MOST_BYTES) size = MOST_BYTES;
    size_t fits = writable_size(buffer, size);
    if (fits > 0) draw(source, buffer, fits, caller);
    return checked(fits == 0 && size > 0 ? -EFAULT : (long)fits);
}
