#include "processor.h"

#include <cpuid.h>
#include <stdatomic.h>

static atomic_int chosen = -1;

/* Intel SDM volume 1, sections 14.7.1 and 15.2 to 15.4: the CPU has it and the system saves it. */
static int best(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA)) return SET_NONE;
    /* Bits 1 and 2 of XCR0 are the state of SSE and AVX, bits 5 to 7 that of AVX-512. */
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2))
        return SET_NONE;
    const unsigned wide = bit_AVX512F | bit_AVX512VL | bit_AVX512DQ | bit_AVX512BW;
    return (low & 0xe6) == 0xe6 && (b & wide) == wide ? SET_AVX512 : SET_AVX2;
}

int instruction_set(void) {
    int set = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (set < 0) atomic_store_explicit(&chosen, set = best(), memory_order_relaxed);
    return set;
}

EXPORT int capsule_instruction_set(void) { return instruction_set(); }

/* Limit the instruction set to `most` from now on; return the set that is used. */
EXPORT int capsule_limit_instruction_set(int most) {
    int set = best();
    if (most < set) set = most;
    atomic_store_explicit(&chosen, set, memory_order_relaxed);
    return set;
}
