#include <sys/random.h>
#include <sys/syscall.h>

#include "interposer.h"

#define GRND_FLAGS (GRND_NONBLOCK | GRND_RANDOM | 4 /* GRND_INSECURE */)

ssize_t checked_getrandom(enum source source, void *buffer, size_t size, unsigned flags,
                          const void *caller) {
    attach();
    if (settings.mode == MODE_SYSTEM)
        return checked(system_call(SYS_getrandom, (long)buffer, (long)size, flags, 0, 0, 0));
    bool both = (flags & GRND_RANDOM) && (flags & 4);
    if (flags & ~(unsigned)GRND_FLAGS || both) {
        errno = EINVAL;
        return -1;
    }
    return draw_checked(source, buffer, size, caller);
}

EXPORT ssize_t getrandom(void *buffer, size_t size, unsigned flags) {
    return checked_getrandom(SOURCE_GETRANDOM, buffer, size, flags, CALLER);
}

EXPORT int getentropy(void *buffer, size_t size) {
    if (size > 256) {
        errno = EIO;
        return -1;
    }
    return draw_checked(SOURCE_GETENTROPY, buffer, size, CALLER) == (ssize_t)size ? 0 : -1;
}

static uint32_t draw_word(enum source source, const void *caller) {
    uint32_t word;
    draw(source, &word, sizeof word, caller);
    return word;
}

EXPORT uint32_t arc4random(void) { return draw_word(SOURCE_ARC4RANDOM, CALLER); }

EXPORT void arc4random_buf(void *buffer, size_t size) {
    if (size > 0) draw(SOURCE_ARC4RANDOM, buffer, size, CALLER);
}

EXPORT uint32_t arc4random_uniform(uint32_t bound) {
    if (bound < 2) return 0;
    uint32_t uneven = -bound % bound; /* 2^32 mod bound: the words that some results have extra */
    uint32_t word;
    do word = draw_word(SOURCE_ARC4RANDOM, CALLER);
    while (word < uneven);
    return word % bound;
}

/* std::random_device of libstdc++, which may use an instruction instead of the system. */
EXPORT unsigned _ZNSt13random_device9_M_getvalEv(void *device) {
    (void)device;
    return draw_word(SOURCE_RANDOM_DEVICE, CALLER);
}
