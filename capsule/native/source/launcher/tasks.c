#define _GNU_SOURCE
#include "tasks.h"

#include <dirent.h>
#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ending.h"
#include "proc.h"

#define BUCKETS 1024 /* a power of two */
#define POLL_NANOSECONDS 50000
#define MAX_POLLS 200000 /* ten seconds of a creator that neither creates nor sleeps */

static struct task *buckets[BUCKETS];
static unsigned task_count, sweep_at = BUCKETS;

/* The creation that was let through and whose child has not been seen yet. */
static struct {
    bool open, thread;
    pid_t creator, creator_process, creator_parent;
    char process[CAPSULE_PATH_SIZE], path[CAPSULE_PATH_SIZE];
    struct program *program;
} creation;

/* ---- the table ---- */

static struct task **bucket_of(pid_t id) { return &buckets[(unsigned)id % BUCKETS]; }

static struct task *find_task(pid_t id) {
    struct task *task = *bucket_of(id);
    while (task && task->id != id) task = task->next;
    return task;
}

static void forget_task(pid_t id) {
    for (struct task **link = bucket_of(id); *link; link = &(*link)->next) {
        struct task *task = *link;
        if (task->id != id) continue;
        *link = task->next;
        free(task);
        task_count--;
        return;
    }
}

/* Forget the tasks that have left /proc. A task that is still there must not be mistaken for a new
 * one. `sweep_at` keeps the cost per task constant. */
static void sweep(void) {
    for (unsigned i = 0; i < BUCKETS; i++) {
        for (struct task *task = buckets[i], *next; task; task = next) {
            struct proc_stat stat;
            next = task->next;
            if (!proc_stat(task->id, &stat) || stat.start != task->start) forget_task(task->id);
        }
    }
    sweep_at = 2 * task_count > BUCKETS ? 2 * task_count : BUCKETS;
}

static struct task *remember(pid_t id, uint64_t start, pid_t process_id, const char *process,
                             const char *thread, struct program *program) {
    if (task_count >= sweep_at) sweep();
    /* The kernel may have assigned the id of a task that ended to a new task. */
    forget_task(id);
    struct task *task = calloc(1, sizeof *task);
    if (task == NULL) fail("CAP-R110", "the supervisor is out of memory");
    task->id = id;
    task->process_id = process_id;
    task->start = start;
    task->program = program;
    memcpy(task->process, process, CAPSULE_PATH_SIZE);
    memcpy(task->thread, thread, CAPSULE_PATH_SIZE);
    task->next = *bucket_of(id);
    *bucket_of(id) = task;
    task_count++;
    return task;
}

/* With `thorough`, an id is not known if the kernel assigned it to a new task after the known task
 * had ended. */
static bool is_known(pid_t id, bool thorough) {
    struct task *task = find_task(id);
    struct proc_stat stat;
    return task && (!thorough || (proc_stat(id, &stat) && stat.start == task->start));
}

/* ---- creation ---- */

static struct task *adopt(pid_t id, uint64_t start) {
    static const char main_thread[CAPSULE_PATH_SIZE] = CAPSULE_ROOT_PATH;
    creation.open = false;
    if (creation.thread)
        return remember(id, start, creation.creator_process, creation.process, creation.path,
                        creation.program);
    return remember(id, start, id, creation.path, main_thread,
                    account_program(creation.path, creation.program));
}

/* Adopt the first unknown task of those that a directory or a file of /proc names. */
static bool adopt_candidate(pid_t id, bool thorough) {
    struct proc_stat stat;
    if (is_known(id, thorough) || !proc_stat(id, &stat) || stat.kernel_worker) return false;
    adopt(id, stat.start);
    return true;
}

static bool adopt_child_of(pid_t process, pid_t thread, bool thorough) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", process, thread);
    FILE *file = fopen(path, "re");
    bool found = false;
    for (pid_t child; file && !found && fscanf(file, "%d", &child) == 1;)
        found = adopt_candidate(child, thorough);
    if (file) fclose(file);
    return found;
}

/* Calls `adopt_child_of` for each thread of a process, or adopts one of the threads. */
static bool adopt_among_threads(pid_t process, bool children, bool thorough) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", process);
    DIR *directory = opendir(path);
    bool found = false;
    for (struct dirent *entry; directory && !found && (entry = readdir(directory)) != NULL;) {
        pid_t thread = (pid_t)atoi(entry->d_name);
        if (thread == 0) continue;
        found = children ? adopt_child_of(process, thread, thorough)
                         : adopt_candidate(thread, thorough);
    }
    if (directory) closedir(directory);
    return found;
}

/* A new task is a child of the thread that created it; with CLONE_PARENT, of that thread's parent;
 * and of another thread, or of the launcher, if the creator or its process has ended meanwhile. */
static bool adopt_created(bool thorough) {
    if (creation.thread) return adopt_among_threads(creation.creator_process, false, thorough);
    return adopt_child_of(creation.creator_process, creation.creator, thorough) ||
           adopt_among_threads(creation.creator_process, true, thorough) ||
           adopt_among_threads(creation.creator_parent, true, thorough) ||
           adopt_among_threads(getpid(), true, thorough);
}

/* The creation failed, or a signal interrupted it and the call will be repeated. */
static void withdraw_creation(void) {
    struct task *creator = find_task(creation.creator);
    creation.open = false;
    if (creator == NULL) return;
    if (creation.thread) creator->threads--;
    else creator->forks--;
}

/* Determine the result of the open creation. If the call of its creator has not returned yet, wait
 * for it. */
static void settle_creation(bool returned) {
    const struct timespec pause = {0, POLL_NANOSECONDS};
    for (int polls = 0; creation.open; polls++) {
        if (!returned) returned = polls >= MAX_POLLS || !proc_may_be_creating(creation.creator);
        if (adopt_created(false)) return;
        if (!returned) nanosleep(&pause, NULL);
        else if (!adopt_created(true)) withdraw_creation();
    }
}

void tasks_creation(struct task *creator, bool thread) {
    struct proc_stat stat;
    settle_creation(false);
    creation.thread = thread;
    creation.creator = creator->id;
    creation.creator_process = creator->process_id;
    creation.creator_parent = proc_stat(creator->process_id, &stat) ? stat.parent : 0;
    creation.program = creator->program;
    memcpy(creation.process, creator->process, CAPSULE_PATH_SIZE);
    if (thread) capsule_path_thread(creation.path, creator->thread, ++creator->threads);
    else capsule_path_child(creation.path, creator->process, creator->thread, ++creator->forks);
    creation.open = true;
}

/* A child that was killed by a signal may have made no call. It can be seen here for the last
 * time. */
void tasks_wait(struct task *caller) {
    pid_t process = caller->process_id;
    if (!creation.open) return;
    if (creation.creator_process == process || creation.creator_parent == process)
        settle_creation(false);
}

/* The same applies to a child that the launcher has adopted. */
void tasks_reaping(void) {
    if (creation.open) adopt_created(true);
}

/* ---- execution ---- */

/* The memory is read through the calling thread, because the first thread of the process may have
 * ended, after which it has no memory. */
static void read_image(pid_t thread, struct image *image) {
    memset(image, 0, sizeof *image);
    image->address = proc_auxiliary(thread, AT_RANDOM);
    int memory = proc_open_memory(thread, O_RDONLY);
    if (memory < 0) return;
    if (pread(memory, image->random, sizeof image->random, (off_t)image->address) < 0)
        image->address = 0;
    close(memory);
}

void tasks_execution(struct task *caller) {
    struct task *leader = find_task(caller->process_id);
    if (leader == NULL || leader->executing) return;
    leader->executing = true;
    read_image(caller->id, &leader->image);
}

/* The start bytes differ only after a program was executed: the kernel makes new ones for each. */
static bool has_executed(const struct task *leader, pid_t caller) {
    struct image now;
    if (!leader->executing) return false;
    read_image(caller, &now);
    return memcmp(&now, &leader->image, sizeof now) != 0;
}

/* Only the first thread survives an execution. The first program of the run is the root itself. */
static void become_image(struct task *leader) {
    bool first = leader->program == NULL;
    if (!first) capsule_path_exec(leader->process, leader->process);
    leader->forks = leader->threads = leader->devices = 0;
    leader->kernel.open = leader->executing = false;
    leader->program = account_program(leader->process, NULL);
}

/* ---- what the supervisor calls ---- */

void tasks_begin(pid_t root) {
    static const char path[CAPSULE_PATH_SIZE] = CAPSULE_ROOT_PATH;
    struct proc_stat stat;
    if (access("/proc/thread-self/children", R_OK) != 0 || !proc_stat(root, &stat))
        fail("CAP-R104", "this kernel does not list the children of a process in /proc");
    remember(root, stat.start, root, path, path, NULL);
}

static struct task *known_caller(pid_t id) {
    struct proc_stat stat;
    if (!proc_stat(id, &stat)) return NULL; /* it was killed */
    if (creation.open && creation.creator == id) settle_creation(true);
    struct task *task = find_task(id);
    if (task && task->start == stat.start) return task;
    if (!creation.open)
        fail("CAP-R110", "task %d was created without a notification to the supervisor", id);
    return adopt(id, stat.start);
}

struct task *tasks_caller(pid_t id, bool *executed) {
    struct task *task = known_caller(id);
    *executed = false;
    if (task == NULL) return NULL;
    struct task *leader = find_task(task->process_id);
    if (leader && has_executed(leader, id)) {
        become_image(leader);
        *executed = true;
        return leader;
    }
    return task;
}
