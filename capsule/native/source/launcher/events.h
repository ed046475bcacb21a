/* The descriptors that the launcher waits for. */
#ifndef CAPSULE_EVENTS_H
#define CAPSULE_EVENTS_H

#include <stdint.h>

/* What to do when a descriptor is ready; embedded in the structure that owns the descriptor. */
struct watch {
    void (*ready)(struct watch *watch, uint32_t events);
};

void events_begin(void);

/* Watch a descriptor until it is closed; `events` are those of epoll. */
void events_watch(int descriptor, uint32_t events, struct watch *watch);

/* Wait until a descriptor is ready, and call its watch. */
void events_handle_next(void);

#endif
