/* The product in plain C: one group at a time, so any compiler may vectorise the integer sums as it likes. */
#ifndef MF_PORTABLE_BODY_H
#define MF_PORTABLE_BODY_H

#include "body.h"

/* Codes of groups g .. g + count - 1 of a row, each group plane after plane as words are. */
MF_INLINE void mf_unpack(const uint8_t *codes, int64_t g, int64_t count, const int bits, const int bytes, int16_t *out) {
    for (int64_t i = 0; i < count; i++)
        for (int s = 0; s < 8 / bits; s++)
            for (int b = 0; b < bytes; b++)
                *out++ = (int16_t)((codes[(g + i) * bytes + b] >> (s * bits)) & ((1 << bits) - 1));
}

/* Exact dots of one group's codes with words and low digits, joined in float32. */
MF_INLINE float mf_dot(const int16_t *code, const int16_t *word, const int16_t *low, const int group) {
    int32_t upper = 0, lower = 0;
    for (int i = 0; i < group; i++) upper += code[i] * word[i];
    for (int i = 0; i < group; i++) lower += code[i] * low[i];
    return (float)upper * 256.0f + (float)lower;
}

MF_INLINE void mf_outputs(const mf_matrix *w, const mf_layout *l, const mf_rows *rows, int64_t first, int64_t last,
                          const int bits, const int bytes) {
    const int group = bytes * 8 / bits;
    const int64_t companion = l->groups * mf_companion_bytes(w->companions);
    for (int64_t n = first; n < last; n++) {
        const uint8_t *scales = w->scales + n * companion, *biases = w->biases + n * companion;
        float lanes[MF_TILE][MF_LANES];
        memset(lanes, 0, sizeof *lanes * (size_t)rows->count);
        for (int64_t at = 0; at < l->groups; at += MF_LANES) {
            const int64_t count = mf_least(MF_LANES, l->groups - at);
            int16_t code[MF_LANES * MF_MAX_GROUP];
            mf_unpack(w->codes + n * l->row_bytes, at, count, bits, bytes, code);
            for (int64_t r = 0; r < rows->count; r++) {
                const uint8_t *input = rows->inputs[r];
                const int16_t *word = (const int16_t *)input + at * group;
                const int16_t *low = (const int16_t *)(input + l->high) + at * group;
                const float *step = (const float *)(input + l->step) + at, *sum = (const float *)(input + l->sum) + at;
                for (int64_t g = 0; g < count; g++) {
                    const float dot = mf_dot(code + g * group, word + g * group, low + g * group, group);
                    const float scaled = dot * (mf_companion(scales, w->companions, at + g) * step[g]);
                    lanes[r][g] += scaled + mf_companion(biases, w->companions, at + g) * sum[g];
                }
            }
        }
        for (int64_t r = 0; r < rows->count; r++) rows->outputs[r][n - first] = mf_tree(lanes[r]);
    }
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
