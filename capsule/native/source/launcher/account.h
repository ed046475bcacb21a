/* The answers of the supervisor, counted for each program that a process executed. */
#ifndef CAPSULE_ACCOUNT_H
#define CAPSULE_ACCOUNT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "../shared/entropy.h"

struct tally {
    uint64_t calls, bytes;
};

struct program {
    struct program *next;
    char *process;            /* path */
    char *executable;         /* NULL when it cannot be read */
    const char *linkage;      /* "glibc", "other" (dynamic), "static", "unknown" */
    bool forked;              /* it continues its creator's program */
    bool started;             /* its loader, if any, has finished */
    bool preloaded;           /* every preload is mapped */
    bool start_bytes_derived; /* AT_RANDOM */
    struct tally getrandom;   /* answered */
    struct tally inside_libc; /* answered: calls that glibc hides from every interposer */
    struct tally devices;     /* opens of random devices, and what was read from them */
    uint64_t unanswered;      /* opens of other random files, let through */
};

/* Add a row; the rows are in the order in which processes began and programs were executed. `like`
 * is the row of the creator if the process was forked and continues its program, or else NULL. */
struct program *account_program(const char *process, const struct program *like);

/* The row of the run's first program; NULL if the program was not executed. */
const struct program *account_first(void);

/* The number of processes; and the programs that they executed, as a JSON array, without processes
 * that neither executed a program nor made a request. */
uint64_t account_processes(void);
void account_write(FILE *file);

#endif
