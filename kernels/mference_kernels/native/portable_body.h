/* The product in plain C: one group at a time, so any compiler may vectorise the integer sums as it likes. */
#ifndef MF_PORTABLE_BODY_H
#define MF_PORTABLE_BODY_H

#include "body.h"

/* Exact dots of one group's codes at `c` with its words and low bytes, joined in float32. */
MF_INLINE float mf_dot(const uint8_t *c, const int16_t *word, const int8_t *low, const int bits, const int bytes) {
    int16_t code[MF_MAX_GROUP], fine[MF_MAX_GROUP];
    int32_t upper = 0, lower = 0;
    for (int s = 0; s < 8 / bits; s++)
        for (int b = 0; b < bytes; b++) code[s * bytes + b] = (int16_t)((c[b] >> (s * bits)) & ((1 << bits) - 1));
    for (int i = 0; i < bytes * 8 / bits; i++) fine[i] = low[i];
    for (int i = 0; i < bytes * 8 / bits; i++) upper += code[i] * word[i];
    for (int i = 0; i < bytes * 8 / bits; i++) lower += code[i] * fine[i];
    return (float)upper * 256.0f + (float)lower;
}

MF_INLINE float mf_output(const uint8_t *codes, const uint8_t *scales, const uint8_t *biases, int32_t companions,
                          const mf_layout *l, const uint8_t *input, const int bits, const int bytes) {
    const int16_t *word = (const int16_t *)input;
    const float *step = (const float *)(input + l->step), *sum = (const float *)(input + l->sum);
    float lane[MF_LANES] = {0};
    for (int64_t g = 0; g < l->groups; g++) {
        const int8_t *low = (const int8_t *)(input + l->low) + g * l->group;
        const float dot = mf_dot(codes + g * bytes, word + g * l->group, low, bits, bytes);
        const float scaled = dot * (mf_companion(scales, companions, g) * step[g]);
        lane[g % MF_LANES] += scaled + mf_companion(biases, companions, g) * sum[g];
    }
    return mf_tree(lane);
}

MF_INLINE void mf_outputs(const mf_matrix *w, const mf_layout *l, const mf_rows *rows, int64_t first, int64_t last,
                          const int bits, const int bytes) {
    const int64_t companion = l->groups * mf_companion_bytes(w->companions);
    for (int64_t n = first; n < last; n++)
        for (int64_t r = 0; r < rows->count; r++)
            rows->outputs[r][n - first] = mf_output(w->codes + n * l->row_bytes, w->scales + n * companion,
                                            w->biases + n * companion, w->companions, l, rows->inputs[r], bits, bytes);
}

MF_INLINE void mf_product_body(const mf_matrix *w, const mf_layout *l, const mf_rows *rows, int64_t first,
                               int64_t last) {
    switch (l->bits * 1000 + l->group) {
        case 2032: mf_outputs(w, l, rows, first, last, 2, 8); break;
        case 2064: mf_outputs(w, l, rows, first, last, 2, 16); break;
        case 2128: mf_outputs(w, l, rows, first, last, 2, 32); break;
        case 4032: mf_outputs(w, l, rows, first, last, 4, 16); break;
        case 4064: mf_outputs(w, l, rows, first, last, 4, 32); break;
        case 4128: mf_outputs(w, l, rows, first, last, 4, 64); break;
        case 8032: mf_outputs(w, l, rows, first, last, 8, 32); break;
        case 8064: mf_outputs(w, l, rows, first, last, 8, 64); break;
        default: mf_outputs(w, l, rows, first, last, 8, 128); break;
    }
}

#endif
