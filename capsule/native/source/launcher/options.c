#define _GNU_SOURCE
#include "options.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../shared/journal.h"
#include "ending.h"

#define MAX_CORES 1024                 /* processors in the C library's sets of them */
#define MAX_TIME_LIMIT 1000000000000ll /* seconds */

static struct options options = {.supervised = true, .fixed_addresses = true};

static const struct option long_options[] = {
    {"entropy", required_argument, NULL, 'e'},
    {"key", required_argument, NULL, 'k'},
    {"directory", required_argument, NULL, 'd'},
    {"on-exhaustion", required_argument, NULL, 'x'},
    {"clock", required_argument, NULL, 'c'},
    {"time-limit", required_argument, NULL, 't'},
    {"preload", required_argument, NULL, 'l'},
    {"sort-listings", no_argument, NULL, 'o'},
    {"cores", required_argument, NULL, 'n'},
    {"no-supervisor", no_argument, NULL, 's'},
    {"keep-address-randomization", no_argument, NULL, 'a'},
    {NULL, 0, NULL, 0},
};

/* Return the position of `value` in a list; any other value is an error of the caller. */
static int choose(const char *option, const char *value, const char *const *choices) {
    for (int i = 0; choices[i]; i++)
        if (strcmp(value, choices[i]) == 0) return i;
    fail("CAP-R101", "'%s' is not a value of --%s", value, option);
}

static void add_preload(const char *path) {
    char *resolved = realpath(path, NULL);
    Elf64_Ehdr header = {0};
    int file = resolved ? open(resolved, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0 || read(file, &header, sizeof header) < 0)
        fail("CAP-R102", "%s cannot be read: %s", path, strerror(errno));
    close(file);
    if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
        header.e_type != ET_DYN || header.e_machine != EM_X86_64)
        fail("CAP-R102", "%s is not a shared library for x86-64", path);
    if (strpbrk(resolved, " :\n"))
        fail("CAP-R102",
             "%s contains a space, a colon or a line feed, which LD_PRELOAD does not support",
             path);
    if (options.preload_count == MAX_PRELOADS) fail("CAP-R101", "--preload is given too often");
    options.preloads[options.preload_count++] = resolved;
}

/* Check a number of processors; it stays text, because programs get it in a variable. */
static const char *number_of_cores(const char *text) {
    char *end;
    long number = strtol(text, &end, 10);
    if (*end || number < 1 || number > MAX_CORES)
        fail("CAP-R101", "'%s' is not a value of --cores", text);
    return text;
}

static int64_t parse_seconds(const char *text) {
    char *end;
    long long seconds = strtoll(text, &end, 10);
    if (end == text || *end || seconds < 1 || seconds > MAX_TIME_LIMIT)
        fail("CAP-R101", "'%s' is not a value of --time-limit", text);
    return seconds;
}

static void set_option(int option) {
    static const char *const modes[] = {"system", "virtual", "record", "replay", NULL};
    static const char *const exhaustions[] = {"fail", "virtual", NULL};
    static const char *const clocks[] = {"system", "fixed", "virtual", NULL};
    switch (option) {
    case 'e':
        options.mode = (enum mode)choose("entropy", optarg, modes);
        options.mode_name = optarg;
        return;
    case 'x':
        choose("on-exhaustion", optarg, exhaustions);
        options.exhaustion = optarg;
        return;
    case 'c':
        choose("clock", optarg, clocks);
        options.clock = optarg;
        return;
    case 'k': options.key = optarg; return;
    case 'o': options.listings = "sorted"; return;
    case 'n': options.cores = number_of_cores(optarg); return;
    case 'd': return; /* find_directory has read it */
    case 'l': add_preload(optarg); return;
    case 't': options.time_limit = parse_seconds(optarg); return;
    case 's': options.supervised = false; return;
    case 'a': options.fixed_addresses = false; return;
    default: fail("CAP-R101", "an option is unknown, or its value is missing");
    }
}

/* Files of an earlier run would be mistaken for those of this run. */
static void refuse_earlier_run(const char *directory) {
    static const char *const names[] = {JOURNAL_NAME, REPORT_NAME, FAILURE_NAME};
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/%s", directory, names[i]);
        if (access(path, F_OK) == 0) fail("CAP-R103", "%s belongs to another run", path);
    }
}

/* Find the directory that --directory names first, so that every later failure is written there. */
static const char *find_directory(int count, char **words) {
    const char *directory = NULL;
    opterr = 0;
    for (int option; (option = getopt_long(count, words, "+", long_options, NULL)) != -1;)
        if (option == 'd') directory = optarg;
    if (directory == NULL) fail("CAP-R101", "--directory is missing");
    return directory;
}

static const char *open_directory(const char *directory) {
    struct stat facts;
    if (stat(directory, &facts) != 0)
        fail("CAP-R103", "%s cannot be used: %s", directory, strerror(errno));
    if (!S_ISDIR(facts.st_mode)) fail("CAP-R103", "%s is not a directory", directory);
    if (access(directory, W_OK | X_OK) != 0)
        fail("CAP-R103", "%s cannot be written: %s", directory, strerror(errno));
    refuse_earlier_run(directory);
    char *resolved = realpath(directory, NULL);
    if (resolved == NULL) fail("CAP-R103", "%s cannot be used: %s", directory, strerror(errno));
    return resolved;
}

const struct options *options_read(int count, char **words) {
    uint8_t key[CAPSULE_KEY_SIZE];
    options.directory = run.directory = open_directory(find_directory(count, words));
    options.mode_name = options.clock = options.listings = "system";
    options.mode = MODE_SYSTEM;
    options.exhaustion = "fail";
    /* With "+", the options of the launcher end at the program, which may have its own options. */
    optind = 0; /* begin again */
    for (int option; (option = getopt_long(count, words, "+", long_options, NULL)) != -1;)
        set_option(option);
    bool needs_key = options.mode == MODE_VIRTUAL ||
                     (options.mode == MODE_REPLAY && strcmp(options.exhaustion, "virtual") == 0);
    if (needs_key && (options.key == NULL || !capsule_key_parse(key, options.key)))
        fail("CAP-R101", "--key is missing or not 64 lower-case hexadecimal digits");
    if (optind == count) fail("CAP-R101", "no program is given");
    options.program = words + optind;
    options.supervised = options.supervised && options.mode != MODE_SYSTEM;
    return &options;
}
