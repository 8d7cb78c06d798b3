/* Attention in compiler vector types: 16 lanes whatever the machine's registers hold, so every variant gives the same bits.

   Contract: q is multiplied by `scale` first; a score sums products of features in lanes d mod 16, then by the tree; the
   largest visible score is subtracted; exponentials are summed in lanes (token position mod 16), then by the tree; values
   are summed in the order of positions and divided once. So neither the buffer's start nor other queries matter. */
#ifndef MF_ATTENTION_BODY_H
#define MF_ATTENTION_BODY_H

#include "body.h"

#ifndef MF_VECTOR
#define MF_VECTOR 16 /* bytes of a register; wider types would live in memory */
#define MF_SLICE 1   /* times 16 outputs summed at once per pair: as many as the registers hold */
#endif
#define MF_WIDTH (MF_VECTOR / 4)
#define MF_PARTS (MF_LANES / MF_WIDTH) /* registers that make 16 lanes */

typedef float mf_vector __attribute__((vector_size(MF_VECTOR), aligned(4), may_alias));
typedef float mf_v4 __attribute__((vector_size(16), aligned(4), may_alias));

typedef struct {
    int64_t first, last; /* keys seen, as rows of k: first .. last - 1 */
    const float *q;
    float *out;
} mf_pair;

/* mf_tree, four lanes at a time. */
MF_INLINE float mf_tree4(const float *lane) {
    const mf_v4 *part = (const mf_v4 *)lane;
    const mf_v4 sum = (part[0] + part[2]) + (part[1] + part[3]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* Dots of `count` scaled queries with key row j, put at scores[i * stride]. */
MF_INLINE void mf_scores(const float *q, const float *k, int64_t dim, int64_t padded, float *scores, int64_t stride,
                         const int count) {
    mf_vector lane[MF_PAIRS][MF_PARTS] = {{{0}}};
    for (int64_t d = 0; d < dim; d += MF_LANES) {
        float copy[MF_LANES] = {0};
        const float *key = k + d;
        if (d + MF_LANES > dim) key = memcpy(copy, key, (size_t)(dim - d) * 4);
        for (int p = 0; p < MF_PARTS; p++) {
            const mf_vector part = *(const mf_vector *)(key + p * MF_WIDTH);
            for (int i = 0; i < count; i++)
                lane[i][p] += *(const mf_vector *)(q + i * padded + d + p * MF_WIDTH) * part;
        }
    }
    for (int i = 0; i < count; i++) {
        float lanes[MF_LANES];
        memcpy(lanes, lane[i], sizeof lanes);
        scores[i * stride] = mf_tree4(lanes);
    }
}

/* Add key rows first .. last - 1, weighted, to 16 * MF_SLICE outputs of `count` pairs. */
MF_INLINE void mf_weigh(const float *weights, int64_t stride, const float *v, int64_t first, int64_t last,
                        int64_t value_stride, mf_vector (*sums)[MF_SLICE * MF_PARTS], const int count) {
    mf_vector held[MF_PAIRS][MF_SLICE * MF_PARTS];
    for (int i = 0; i < count; i++)
        for (int s = 0; s < MF_SLICE * MF_PARTS; s++) held[i][s] = sums[i][s];
    for (int64_t j = first; j < last; j++)
        for (int s = 0; s < MF_SLICE * MF_PARTS; s++) {
            const mf_vector value = *(const mf_vector *)(v + j * value_stride + s * MF_WIDTH);
            for (int i = 0; i < count; i++) held[i][s] += value * weights[i * stride + j];
        }
    for (int i = 0; i < count; i++)
        for (int s = 0; s < MF_SLICE * MF_PARTS; s++) sums[i][s] = held[i][s];
}

MF_INLINE void mf_values(const mf_pair *pairs, const float *weights, int64_t stride, const float *totals, const float *v,
                         int64_t value_stride, int64_t at, const int count) {
    mf_vector sums[MF_PAIRS][MF_SLICE * MF_PARTS] = {{{0}}};
    int64_t from = 0, to = INT64_MAX; /* rows that every pair sees */
    for (int i = 0; i < count; i++) {
        from = mf_most(from, pairs[i].first);
        to = mf_least(to, pairs[i].last);
    }
    from = mf_least(from, to);
    for (int i = 0; i < count; i++)
        mf_weigh(weights + i * stride, stride, v, pairs[i].first, from, value_stride, sums + i, 1);
    mf_weigh(weights, stride, v, from, to, value_stride, sums, count);
    for (int i = 0; i < count; i++) {
        mf_weigh(weights + i * stride, stride, v, mf_most(to, pairs[i].first), pairs[i].last, value_stride, sums + i, 1);
        for (int s = 0; s < MF_SLICE * MF_PARTS; s++) sums[i][s] /= totals[i];
        memcpy(pairs[i].out + at, sums[i], sizeof sums[i]);
    }
}

/* The last outputs of a row, one at a time where no whole vector is left. */
MF_INLINE void mf_values_rest(const mf_pair *pairs, const float *weights, int64_t stride, const float *totals,
                              const float *v, int64_t value_dim, int64_t at, const int count) {
    for (int i = 0; i < count; i++)
        for (int64_t e = at; e < value_dim; e++) {
            float sum = 0.0f;
            for (int64_t j = pairs[i].first; j < pairs[i].last; j++) sum += v[j * value_dim + e] * weights[i * stride + j];
            pairs[i].out[e] = sum / totals[i];
        }
}

/* Softmax of scores[first .. last - 1] in place; returns the sum. `phase` is the position of row 0 mod 16. */
MF_INLINE float mf_softmax(float *scores, int64_t first, int64_t last, int64_t phase) {
    float largest = scores[first];
    for (int64_t j = first; j < last; j++) largest = scores[j] > largest ? scores[j] : largest;
    for (int64_t j = first; j < last; j++) scores[j] = mf_exp(scores[j] - largest);
    float lane[MF_LANES] = {0};
    int64_t j = first;
    for (; j < last && (j + phase) % MF_LANES; j++) lane[(j + phase) % MF_LANES] += scores[j];
    for (; j + MF_LANES <= last; j += MF_LANES)
        for (int i = 0; i < MF_LANES; i++) lane[i] += scores[j + i];
    for (; j < last; j++) lane[(j + phase) % MF_LANES] += scores[j];
    return mf_tree4(lane);
}

MF_INLINE void mf_attend_pairs(const mf_attention *a, int64_t group, int64_t pair, float *scratch, const int count) {
    const int64_t share = a->heads / a->groups, padded = mf_round_up(a->dim, MF_LANES);
    const int64_t stride = mf_round_up(a->span, MF_LANES);
    const float *k = a->k + group * a->k_stride, *v = a->v + group * a->v_stride;
    float *q = scratch, *scores = scratch + MF_PAIRS * padded, totals[MF_PAIRS];
    mf_pair pairs[MF_PAIRS];
    int64_t from = INT64_MAX, to = 0;
    for (int i = 0; i < count; i++) {
        const int64_t query = (pair + i) / share, row = (group * share + (pair + i) % share) * a->length + query;
        const int64_t position = a->query_start + query;
        pairs[i].last = position + 1 - a->key_start;
        pairs[i].first = a->window ? mf_most(0, pairs[i].last - a->window) : 0;
        pairs[i].out = a->out + row * a->value_dim;
        for (int64_t d = 0; d < padded; d++) q[i * padded + d] = d < a->dim ? a->q[row * a->dim + d] * a->scale : 0.0f;
        from = mf_least(from, pairs[i].first);
        to = mf_most(to, pairs[i].last);
    }
    for (int64_t j = from; j < to; j++)
        mf_scores(q, k + j * a->dim, a->dim, padded, scores + j, stride, count);
    for (int i = 0; i < count; i++)
        totals[i] = mf_softmax(scores + i * stride, pairs[i].first, pairs[i].last, a->key_start % MF_LANES);
    const int64_t step = MF_SLICE * MF_LANES;
    int64_t at = 0;
    for (; at + step <= a->value_dim; at += step)
        mf_values(pairs, scores, stride, totals, v + at, a->value_dim, at, count);
    mf_values_rest(pairs, scores, stride, totals, v, a->value_dim, at, count);
}

MF_INLINE void mf_attend_body(const mf_attention *a, int64_t group, int64_t first, int64_t last, float *scratch) {
    int64_t pair = first;
    for (; pair + MF_PAIRS <= last; pair += MF_PAIRS) mf_attend_pairs(a, group, pair, scratch, MF_PAIRS);
    for (; pair + 2 <= last; pair += 2) mf_attend_pairs(a, group, pair, scratch, 2);
    for (; pair < last; pair++) mf_attend_pairs(a, group, pair, scratch, 1);
}

#endif
