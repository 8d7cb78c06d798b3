/* Functions whose lanes are independent, compiled once for each instruction set: the same operations in the same order, so
   the same bits. Vectors of 16 lanes are split by the compiler where registers are narrower. */
#ifndef MF_LANES_H
#define MF_LANES_H

#include "body.h"
#include "work.h"

typedef float mf_v16 __attribute__((vector_size(64), aligned(4), may_alias));

#if defined(MF_X86)
#define MF_FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")))
#if defined(__clang__)
#undef MF_FOR_AVX512
#define MF_FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#endif
#define MF_FOR_AVX2 __attribute__((target("avx2,fma,f16c")))
/* Define `name` as `name##_body` for the variant in use. */
#define MF_VERSIONS(name, parameters, arguments)                                             \
    MF_FOR_AVX512 static void name##_avx512 parameters { name##_body arguments; }            \
    MF_FOR_AVX2 static void name##_avx2 parameters { name##_body arguments; }                \
    static void name##_plain parameters { name##_body arguments; }                           \
    static void name parameters {                                                            \
        if (mf_active == &mf_avx512 || mf_active == &mf_amx)                                 \
            name##_avx512 arguments;                                                         \
        else if (mf_active == &mf_avx2)                                                      \
            name##_avx2 arguments;                                                           \
        else                                                                                 \
            name##_plain arguments;                                                          \
    }
#else
#define MF_VERSIONS(name, parameters, arguments) \
    static void name parameters { name##_body arguments; }
#endif

/* e^z of 16 lanes, and 1 / (1 + e^-z). */
MF_INLINE void mf_exp16(float *z) {
    for (int i = 0; i < MF_LANES; i++) z[i] = mf_exp(z[i]);
}

MF_INLINE float mf_sigmoid(float z) { return 1.0f / (1.0f + mf_exp(-z)); }

#endif
