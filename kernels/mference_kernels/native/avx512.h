/* Pieces the AVX-512 and AMX variants share. */
#ifndef MF_AVX512_H
#define MF_AVX512_H

#include <immintrin.h>

#include "mference.h"

#define MF_AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define MF_AVX512 MF_AVX512_TARGET MF_INLINE
#define MF_AHEAD 4096 /* bytes: the hardware's own prefetch stops at pages; worth 20 to 35 % from memory */

#define MF_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define MF_UNROLL(n) MF_PRAGMA(unroll n)
#else
#define MF_UNROLL(n) MF_PRAGMA(GCC unroll n)
#endif

#define MF_PANEL_ROWS 4 /* from here on unpacking sixteen outputs at once pays */

void mf_avx512_few(const mf_matrix *w, const mf_layout *l, const mf_rows *r, int64_t first, int64_t last);
void mf_avx512_many(const mf_matrix *w, const mf_layout *l, const mf_rows *r, int64_t first, int64_t last);
void mf_avx512_prepare(const float *x, const mf_layout *layout, uint8_t *row);
void mf_avx512_activate(int32_t kind, const float *gate, const float *up, float *out, int64_t count);
void mf_avx512_attend(const mf_attention *call, int64_t group, int64_t first, int64_t last, float *scratch);

/* A mask of the first `count` of 64, none if it is not positive. */
MF_INLINE uint64_t mf_first_bytes(int64_t count) {
    return count >= 64 ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1;
}

MF_AVX512 __m512 mf_companions512(const uint8_t *row, int32_t type, int64_t g, __mmask16 here) {
    if (type == MF_FLOAT32) return _mm512_maskz_loadu_ps(here, row + 4 * g);
    const __m256i half = _mm256_maskz_loadu_epi16(here, row + 2 * g);
    if (type == MF_FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Lane sums of four vectors: in each quarter, element i is the sum of that quarter of v[i]. */
MF_AVX512 __m512i mf_quad512(const __m512i *v) {
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

/* Add neighbouring quarters: of a into the lower half, of b into the upper. */
MF_AVX512 __m512i mf_pair512(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

/* Vectors v[0 ..] hold 16 groups of `words` lanes, at most 16, one after another; return the 16 sums in order. */
MF_AVX512 __m512i mf_reduce512(__m512i *v, const int words) {
    if (words == 2) {
        const __m512 a = _mm512_castsi512_ps(v[0]), b = _mm512_castsi512_ps(v[1]);
        const __m512i even = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
        const __m512i odd = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
        const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        return _mm512_permutexvar_epi32(order, _mm512_add_epi32(even, odd));
    }
    if (words == 4) {
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return _mm512_permutexvar_epi32(order, mf_quad512(v));
    }
    if (words == 8) {
        const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        return _mm512_permutexvar_epi32(order, mf_pair512(mf_quad512(v), mf_quad512(v + 4)));
    }
    return mf_pair512(mf_pair512(mf_quad512(v), mf_quad512(v + 4)), mf_pair512(mf_quad512(v + 8), mf_quad512(v + 12)));
}

/* A dot from its exact parts: 256 * upper + lower, in float32. */
MF_AVX512 __m512 mf_join512(__m512i upper, __m512i lower) {
    return _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(upper), _mm512_set1_ps(256.0f)), _mm512_cvtepi32_ps(lower));
}

/* The contract's tree over 16 accumulators. */
MF_AVX512 float mf_tree512(__m512 lanes) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

#endif
