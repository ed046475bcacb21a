/* Facts of /proc about other processes. process_vm_readv would be simpler, but container engines
 * do not allow it by default; /proc/<id>/mem requires only the same user. */
#ifndef CAPSULE_PROC_H
#define CAPSULE_PROC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct proc_stat {
    char state;
    pid_t parent;
    bool kernel_worker; /* a thread of the kernel (io_uring) inside a process */
    uint64_t start;     /* clock ticks since boot */
};

/* False when the task is gone. */
bool proc_stat(pid_t id, struct proc_stat *stat);

/* Whether the task may still be inside a clone or fork. The state of a running task is unknown. */
bool proc_may_be_creating(pid_t id);

/* An entry of the auxiliary vector; 0 when there is none or it cannot be read. */
uint64_t proc_auxiliary(pid_t process, uint64_t type);

/* A descriptor for pread and pwrite, or -1 (errno). */
int proc_open_memory(pid_t id, int mode);

/* The executable's path, allocated; NULL when it cannot be read. */
char *proc_executable(pid_t process);

/* The path of the file that is mapped at an address, allocated, or NULL. */
char *proc_mapped_at(pid_t process, uint64_t address);

/* Whether a file is mapped; `wanted` is a full path or only a file name. */
bool proc_is_mapped(pid_t process, const char *wanted);

#endif
