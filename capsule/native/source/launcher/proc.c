#define _GNU_SOURCE
#include "proc.h"

#include <elf.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define IO_WORKER 0x10 /* PF_IO_WORKER and PF_USER_WORKER of the kernel's sched.h */
#define USER_WORKER 0x4000

static ssize_t read_file(pid_t id, const char *name, char *out, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", id, name);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    ssize_t length = read(file, out, size - 1);
    close(file);
    if (length >= 0) out[length] = '\0';
    return length;
}

bool proc_stat(pid_t id, struct proc_stat *stat) {
    char text[1024];
    unsigned flags;
    if (read_file(id, "stat", text, sizeof text) <= 0) return false;
    /* The name, in parentheses, may contain any characters, including parentheses. */
    const char *rest = strrchr(text, ')');
    if (rest == NULL) return false;
    int fields = sscanf(rest + 1,
                        " %c %d %*d %*d %*d %*d %u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d"
                        " %" SCNu64,
                        &stat->state, &stat->parent, &flags, &stat->start);
    stat->kernel_worker = flags & (IO_WORKER | USER_WORKER);
    return fields == 4;
}

bool proc_may_be_creating(pid_t id) {
    char text[256];
    struct proc_stat stat;
    if (!proc_stat(id, &stat) || strchr("TtZXx", stat.state)) return false;
    /* An unknown state counts as possible: settle_creation() asks again, for a limited time. */
    if (read_file(id, "syscall", text, sizeof text) <= 0) return true;
    if (strncmp(text, "running", 7) == 0) return true;
    long number = strtol(text, NULL, 10);
    return number == SYS_clone || number == SYS_clone3 || number == SYS_fork || number == SYS_vfork;
}

uint64_t proc_auxiliary(pid_t process, uint64_t type) {
    _Alignas(Elf64_auxv_t) char bytes[1024];
    ssize_t length = read_file(process, "auxv", bytes, sizeof bytes);
    const Elf64_auxv_t *entries = (const Elf64_auxv_t *)bytes;
    for (ssize_t i = 0; (i + 1) * (ssize_t)sizeof *entries <= length; i++)
        if (entries[i].a_type == type) return entries[i].a_un.a_val;
    return 0;
}

int proc_open_memory(pid_t id, int mode) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/mem", id);
    return open(path, mode | O_CLOEXEC);
}

char *proc_executable(pid_t process) {
    char path[64], target[PATH_MAX];
    snprintf(path, sizeof path, "/proc/%d/exe", process);
    ssize_t length = readlink(path, target, sizeof target);
    return length < 0 ? NULL : strndup(target, (size_t)length);
}

/* The next line of /proc/<id>/maps with a file: its addresses, and its path at the line's end. */
static bool next_mapping(FILE *maps, char **line, size_t *room, uint64_t *from, uint64_t *to,
                         char **path) {
    while (getline(line, room, maps) > 0) {
        *path = strchr(*line, '/');
        if (*path == NULL || sscanf(*line, "%" SCNx64 "-%" SCNx64, from, to) != 2) continue;
        char *end = strchr(*path, '\n');
        if (end) *end = '\0';
        return true;
    }
    return false;
}

static bool is_named(const char *path, const char *wanted) {
    return strcmp(*wanted == '/' ? path : strrchr(path, '/') + 1, wanted) == 0;
}

/* The first mapped file that has a name or, without one, that holds an address. */
static char *find_mapping(pid_t process, uint64_t address, const char *wanted) {
    char name[64], *line = NULL, *path, *found = NULL;
    size_t room = 0;
    uint64_t from, to;
    snprintf(name, sizeof name, "/proc/%d/maps", process);
    FILE *maps = fopen(name, "re");
    while (maps && !found && next_mapping(maps, &line, &room, &from, &to, &path))
        if (wanted ? is_named(path, wanted) : from <= address && address < to) found = strdup(path);
    if (maps) fclose(maps);
    free(line);
    return found;
}

char *proc_mapped_at(pid_t process, uint64_t address) {
    return find_mapping(process, address, NULL);
}

bool proc_is_mapped(pid_t process, const char *wanted) {
    char *found = find_mapping(process, 0, wanted);
    free(found);
    return found != NULL;
}
