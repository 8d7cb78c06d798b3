/* Sixteen outputs at once: their codes unpacked so that a vector lane is an output. What costs one unpacking serves many
   rows, and no sum crosses lanes. */
#ifndef MF_AVX512_PANEL_H
#define MF_AVX512_PANEL_H

#include "avx512.h"

#define MF_PANEL 16 /* outputs of a panel, and groups unpacked at a time: one for each accumulator */

/* Up to 16 groups of 16 outputs. codes[(g * per_byte + s) * words + r] holds, for each output, the four codes that lie in
   plane s of word r of group g; companions are float32. */
typedef struct {
    __m512i codes[MF_PANEL * MF_MAX_GROUP / 4];
    __m512 scales[MF_PANEL], biases[MF_PANEL];
} mf_panel;

/* Rows become columns: 16 vectors of 16 dwords. */
MF_AVX512 void mf_transpose512(__m512i *v) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        a[i + 2] = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i low = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88), high = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        const __m512i low2 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        const __m512i high2 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
        v[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        v[i + 4] = _mm512_shuffle_i32x4(high, high2, 0x88);
        v[i + 12] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
}

MF_AVX512 void mf_panel_companions(const uint8_t *rows, int64_t stride, int32_t type, int64_t g, int64_t count,
                                   __m512 *out) {
    __m512i v[16];
    for (int i = 0; i < 16; i++)
        v[i] = _mm512_castps_si512(mf_companions512(rows + i * stride, type, g, (__mmask16)mf_first_bytes(count)));
    mf_transpose512(v);
    for (int i = 0; i < 16; i++) out[i] = _mm512_castsi512_ps(v[i]);
}

/* Unpack groups g .. g + count - 1 of outputs n .. n + 15. */
MF_AVX512 void mf_panel_fill(const mf_matrix *w, const mf_layout *l, int64_t n, int64_t g, int64_t count, const int bits,
                             mf_panel *p) {
    const int64_t companion = l->groups * mf_companion_bytes(w->companions);
    mf_panel_companions(w->scales + n * companion, companion, w->companions, g, count, p->scales);
    mf_panel_companions(w->biases + n * companion, companion, w->companions, g, count, p->biases);
    const int words = l->group * bits / 32, planes = 8 / bits;
    const int64_t bytes = count * words * 4;
    const uint8_t *codes = w->codes + n * l->row_bytes + g * words * 4;
    const __m512i mask = _mm512_set1_epi8((char)((1 << bits) - 1));
    for (int64_t at = 0; at < bytes; at += 64) {
        __m512i v[16];
        for (int i = 0; i < 16; i++) {
            const uint8_t *from = codes + i * l->row_bytes + at;
            _mm_prefetch((const char *)from + 16 * l->row_bytes, _MM_HINT_T0);
            v[i] = at + 64 <= bytes ? _mm512_loadu_si512(from)
                                    : _mm512_maskz_loadu_epi8(mf_first_bytes(bytes - at), from);
        }
        mf_transpose512(v);
        for (int i = 0; i < 16 && at + 4 * i < bytes; i++) {
            const int64_t word = at / 4 + i;
            __m512i *to = p->codes + word / words * planes * words + word % words;
            for (int s = 0; s < planes; s++)
                to[s * words] = bits == 8 ? v[i] : _mm512_and_si512(_mm512_srli_epi16(v[i], (unsigned)(bits * s)), mask);
        }
    }
}

/* One group's float steps: add its exact digit dots, scaled, and its bias to an accumulator. */
MF_AVX512 __m512 mf_panel_add(__m512 lane, __m512i high, __m512i middle, __m512i low, __m512 scale, __m512 bias,
                              float step, float sum) {
    const __m512 dot = mf_join512(_mm512_add_epi32(_mm512_slli_epi32(high, 8), middle), low);
    const __m512 scaled = _mm512_mul_ps(dot, _mm512_mul_ps(scale, _mm512_set1_ps(step)));
    return _mm512_add_ps(lane, _mm512_add_ps(scaled, _mm512_mul_ps(bias, _mm512_set1_ps(sum))));
}

/* The contract's tree over accumulators of sixteen outputs. */
MF_AVX512 __m512 mf_panel_tree(const __m512 *lane) {
    __m512 a[8];
    for (int i = 0; i < 8; i++) a[i] = _mm512_add_ps(lane[i], lane[i + 8]);
    for (int i = 0; i < 4; i++) a[i] = _mm512_add_ps(a[i], a[i + 4]);
    return _mm512_add_ps(_mm512_add_ps(a[0], a[2]), _mm512_add_ps(a[1], a[3]));
}

#endif
