/* Products of several rows with byte dot products over panels of sixteen outputs. */
#include "mference.h"
#if defined(MF_X86)
#include "avx512_panel.h"
#include "work.h"

MF_INLINE int32_t four(const uint8_t *at) {
    int32_t value;
    memcpy(&value, at, 4);
    return value;
}

/* Groups of one filled panel against `count` rows; lanes[m] are row m's 16 accumulators. */
MF_AVX512 void panel_rows(const mf_panel *p, const mf_layout *l, const uint8_t *const *inputs, int64_t first,
                          int64_t groups, const int bits, const int count, __m512 (*lanes)[MF_LANES]) {
    const int words = l->group * bits / 32, planes = 8 / bits;
    for (int64_t g = 0; g < groups; g++) {
        __m512i high[4], middle[4], low[4];
        for (int m = 0; m < count; m++) high[m] = middle[m] = low[m] = _mm512_setzero_si512();
        for (int s = 0; s < planes; s++) {
            const __m512i *codes = p->codes + (g * planes + s) * words;
            const int64_t at = s * l->plane + (first + g) * words * 4;
            for (int r = 0; r < words; r++) {
                for (int m = 0; m < count; m++) {
                    const uint8_t *input = inputs[m] + at + 4 * r;
                    high[m] = _mm512_dpbusd_epi32(high[m], codes[r], _mm512_set1_epi32(four(input + l->high)));
                    middle[m] = _mm512_dpbusd_epi32(middle[m], codes[r], _mm512_set1_epi32(four(input + l->middle)));
                    low[m] = _mm512_dpbusd_epi32(low[m], codes[r], _mm512_set1_epi32(four(input + l->low)));
                }
            }
        }
        for (int m = 0; m < count; m++) {
            const float *step = (const float *)(inputs[m] + l->step), *sum = (const float *)(inputs[m] + l->sum);
            lanes[m][g] = mf_panel_add(lanes[m][g], high[m], middle[m], low[m], p->scales[g], p->biases[g],
                                       step[first + g], sum[first + g]);
        }
    }
}

MF_AVX512 void many(const mf_matrix *w, const mf_layout *l, const mf_rows *r, int64_t first, int64_t last,
                    const int bits) {
    mf_panel panel;
    __m512 lanes[MF_TILE][MF_LANES];
    int64_t n = first;
    for (; n + MF_PANEL <= last; n += MF_PANEL) {
        memset(lanes, 0, sizeof *lanes * (size_t)r->count);
        for (int64_t g = 0; g < l->groups; g += MF_PANEL) {
            const int64_t groups = mf_least(MF_PANEL, l->groups - g);
            mf_panel_fill(w, l, n, g, groups, bits, &panel);
            int64_t m = 0;
            for (; m + 4 <= r->count; m += 4) panel_rows(&panel, l, r->inputs + m, g, groups, bits, 4, lanes + m);
            for (; m + 2 <= r->count; m += 2) panel_rows(&panel, l, r->inputs + m, g, groups, bits, 2, lanes + m);
            if (m < r->count) panel_rows(&panel, l, r->inputs + m, g, groups, bits, 1, lanes + m);
        }
        for (int64_t m = 0; m < r->count; m++) _mm512_storeu_ps(r->outputs[m] + n - first, mf_panel_tree(lanes[m]));
    }
    if (n == last) return;
    float *outputs[MF_TILE];
    for (int64_t m = 0; m < r->count; m++) outputs[m] = r->outputs[m] + n - first;
    const mf_rows rest = {r->inputs, outputs, r->count};
    mf_avx512_few(w, l, &rest, n, last);
}

MF_AVX512_TARGET void mf_avx512_many(const mf_matrix *w, const mf_layout *l, const mf_rows *r, int64_t first,
                                     int64_t last) {
    if (l->bits == 4)
        many(w, l, r, first, last, 4);
    else if (l->bits == 8)
        many(w, l, r, first, last, 8);
    else
        many(w, l, r, first, last, 2);
}
#endif
