/* Preloaded under the portable numerics profiles: replacements for functions of oneMKL that no
 * environment variable pins.
 *
 * libtorch_cpu.so contains oneMKL and calls it through its own exported symbols, so a preloaded
 * library can replace single functions of oneMKL.
 *
 * 1. oneMKL accepts MKL_CBWR only on processors with the vendor "GenuineIntel"; on all others every
 *    branch becomes AUTO. The two functions that test the vendor return true here.
 * 2. Some vector functions start from RCPPS or RSQRTPS, whose results Intel and AMD define
 *    differently (within 1.5 * 2^-12; Intel SDM volume 2, AMD APM volume 4), and that shows in the
 *    last bit. They are replaced. In the AVX2 and the SSE branch these are the square root, the
 *    logarithms, the inverse trigonometric functions and the tangent. The natural logarithm in
 *    binary32 does not use these instructions and is not replaced.
 *
 * A replacement is one correctly rounded or one C library operation per element, so that neither
 * the split of an array among threads nor its alignment shows. */

#include <math.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT int mkl_serv_intel_cpu_true(void) { return 1; }
EXPORT int mkl_serv_intel_cpu(void) { return 1; }

/* In binary32 through binary64: correctly rounded, unless an error in the last of 53 binary places
 * decides between two results of 24. That also hides most differences between C libraries. */
#define SINGLE(function, x) (float)function((double)(x))
#define ROOT_SINGLE(function, x) function##f(x)
#define DOUBLE(function, x) function(x)

/* The vector function `name` of oneMKL's interface vm[sd]: n elements from `a` to `r`, which may be
 * the same array. `mode` (accuracy, denormals, error handling) is ignored, because it can request
 * only what these functions do anyway.
 */
#define VECTOR(name, type, apply, function)                                                        \
    EXPORT void name(int n, const type *a, type *r, long long mode) {                              \
        (void)mode;                                                                                \
        for (int i = 0; i < n; i++) r[i] = apply(function, a[i]);                                  \
    }

VECTOR(vmsSqrt, float, ROOT_SINGLE, __builtin_sqrt)
VECTOR(vmsLog2, float, SINGLE, log2)
VECTOR(vmsLog10, float, SINGLE, log10)
VECTOR(vmsAsin, float, SINGLE, asin)
VECTOR(vmsAcos, float, SINGLE, acos)
VECTOR(vmsAtan, float, SINGLE, atan)
VECTOR(vmsTan, float, SINGLE, tan)

VECTOR(vmdSqrt, double, DOUBLE, __builtin_sqrt)
VECTOR(vmdLn, double, DOUBLE, log)
VECTOR(vmdLog2, double, DOUBLE, log2)
VECTOR(vmdLog10, double, DOUBLE, log10)
VECTOR(vmdAsin, double, DOUBLE, asin)
VECTOR(vmdAcos, double, DOUBLE, acos)
VECTOR(vmdAtan, double, DOUBLE, atan)
VECTOR(vmdTan, double, DOUBLE, tan)

/* The interface without a mode, which torch's exponential sampler uses. */
EXPORT void vdLn(int n, const double *a, double *r) { vmdLn(n, a, r, 0); }
