#define _GNU_SOURCE
#include "events.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>

#include "ending.h"

static int epoll;

void events_begin(void) {
    epoll = epoll_create1(EPOLL_CLOEXEC);
    if (epoll < 0) fail("CAP-R110", "epoll is not available: %s", strerror(errno));
}

void events_watch(int descriptor, uint32_t events, struct watch *watch) {
    struct epoll_event event = {.events = events, .data.ptr = watch};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event) != 0)
        fail("CAP-R110", "a descriptor cannot be watched: %s", strerror(errno));
}

void events_handle_next(void) {
    /* Only one event is taken, because handling it may close the descriptor of another one. */
    struct epoll_event ready;
    int count = epoll_wait(epoll, &ready, 1, -1);
    if (count < 0 && errno != EINTR)
        fail("CAP-R110", "the launcher cannot wait for events: %s", strerror(errno));
    if (count < 1) return;
    struct watch *watch = ready.data.ptr;
    watch->ready(watch, ready.events);
}
