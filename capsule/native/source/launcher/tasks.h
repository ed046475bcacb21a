/* The creator of every process and thread, and their paths, in order of creation.
 *
 * The supervisor is notified before a task creates another, so the creator and the ordinal are
 * known, but not the id of the new task. At most one creation is open at a time in the whole tree:
 * its child is the only task that is not in the table, whether the child makes a system call first
 * or is found in /proc before the next creation is allowed. */
#ifndef CAPSULE_TASKS_H
#define CAPSULE_TASKS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "account.h"
#include "channel.h"
#include "../shared/entropy.h"

struct task {
    struct task *next; /* of the same bucket */
    pid_t id, process_id;
    uint64_t start; /* clock ticks since boot; differs between two tasks with the same id */
    char process[CAPSULE_PATH_SIZE], thread[CAPSULE_PATH_SIZE];
    uint32_t forks, threads, devices; /* that this thread made or opened */
    struct channel kernel;            /* the stream that answers its system calls */
    struct program *program;          /* the program that its process executes */
    /* For the first thread of a process: it called execve while it had this image. */
    bool executing;
    struct image {
        uint64_t address;   /* of AT_RANDOM's bytes */
        uint8_t random[16]; /* fresh from the kernel for each program */
    } image;
};

/* Begin with the root process. */
void tasks_begin(pid_t root);

/* The task that made a system call; it has not executed another program since its last one, or
 * `executed` is set and its path is the new one. */
struct task *tasks_caller(pid_t id, bool *executed);

/* The caller is about to create a thread or a process; to wait for one, after which it cannot be
 * seen any more; or to execute a program. */
void tasks_creation(struct task *creator, bool thread);
void tasks_wait(struct task *caller);
void tasks_execution(struct task *caller);

/* The launcher is about to reap the children that have ended. */
void tasks_reaping(void);

#endif
