/* Functions whose lanes are independent, compiled once for each instruction set: the same operations in the same order, so
   the same bits. Vectors of 16 lanes are split by the compiler where registers are narrower. */
#ifndef MF_LANES_H
#define MF_LANES_H

#include <math.h>

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

/* 1 / root of the mean square plus eps, of `count` values in lanes mod 16. */
MF_INLINE float mf_row_scale(const float *x, int64_t count, float eps) {
    float lane[MF_LANES] = {0};
    int64_t d = 0;
    for (; d + MF_LANES <= count; d += MF_LANES)
        for (int i = 0; i < MF_LANES; i++) lane[i] += x[d + i] * x[d + i];
    for (int64_t i = d; i < count; i++) lane[i - d] += x[i] * x[i];
    return 1.0f / sqrtf(mf_tree(lane) / (float)count + eps);
}

/* 1 / (1 + e^-z). */
MF_INLINE float mf_sigmoid(float z) { return 1.0f / (1.0f + mf_exp(-z)); }

#endif
