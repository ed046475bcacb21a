/* The vector instructions of this CPU, and functions compiled for them. */

#ifndef CAPSULE_PROCESSOR_H
#define CAPSULE_PROCESSOR_H

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")))

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* Defines `name` as `body`, compiled for AVX2 and for any CPU. It is only for code that the
 * compiler can turn into vector code without changing a bit: no sums across elements. */
#define DISPATCH(name, body, parameters, arguments)                                                \
    AVX2 static void body##_avx2 parameters { body arguments; }                                    \
    static void body##_plain parameters { body arguments; }                                        \
    EXPORT void name parameters {                                                                  \
        if (instruction_set() >= SET_AVX2) body##_avx2 arguments;                                  \
        else body##_plain arguments;                                                               \
    }

enum { SET_NONE, SET_AVX2, SET_AVX512 };

int instruction_set(void);

#endif
