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

#define MF_FAINT -64.0f /* scores so far below the largest weigh nothing; subnormal products would be slow */
#define MF_QUAD 4   /* pairs that share a load of a key or value */

typedef struct {
    int64_t first, last; /* keys seen, counted from key_start: first .. last - 1 */
    float *out;
} mf_pair;

/* mf_tree, four lanes at a time. */
MF_INLINE float mf_tree4(const float *lane) {
    const mf_v4 *part = (const mf_v4 *)lane;
    const mf_v4 sum = (part[0] + part[2]) + (part[1] + part[3]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* Dots of `count` scaled queries with one key, put at scores[i * stride]. */
MF_INLINE void mf_scores(const float *q, const float *k, int64_t dim, int64_t padded, float *scores, int64_t stride,
                         const int count) {
    mf_vector lane[MF_QUAD][MF_PARTS] = {{{0}}};
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

/* Add values of keys first .. last - 1, weighted, to 16 * MF_SLICE outputs of `count` pairs; `v` is key 0's. */
MF_INLINE void mf_weigh(const mf_pair *pairs, const float *weights, int64_t stride, const float *v, int64_t value_dim,
                        int64_t at, int64_t first, int64_t last, const int count) {
    mf_vector sums[MF_QUAD][MF_SLICE * MF_PARTS];
    for (int i = 0; i < count; i++) memcpy(sums[i], pairs[i].out + at, sizeof sums[i]);
    for (int64_t j = first; j < last; j++)
        for (int s = 0; s < MF_SLICE * MF_PARTS; s++) {
            const mf_vector value = *(const mf_vector *)(v + j * value_dim + at + s * MF_WIDTH);
            for (int i = 0; i < count; i++) sums[i][s] += value * weights[i * stride + j];
        }
    for (int i = 0; i < count; i++) memcpy(pairs[i].out + at, sums[i], sizeof sums[i]);
}

/* Add values of those keys of first .. last - 1 that each pair sees, in order. */
MF_INLINE void mf_values(const mf_pair *pairs, const float *weights, int64_t stride, const float *v, int64_t value_dim,
                         int64_t first, int64_t last, const int count) {
    int64_t from = first, to = last; /* seen by every pair */
    for (int i = 0; i < count; i++) {
        from = mf_most(from, pairs[i].first);
        to = mf_least(to, pairs[i].last);
    }
    from = mf_least(from, mf_most(to, first));
    to = mf_most(to, from);
    const int64_t step = MF_SLICE * MF_LANES;
    int64_t at = 0;
    for (; at + step <= value_dim; at += step) {
        for (int i = 0; i < count; i++)
            mf_weigh(pairs + i, weights + i * stride, stride, v, value_dim, at, mf_most(first, pairs[i].first),
                     mf_least(from, pairs[i].last), 1);
        mf_weigh(pairs, weights, stride, v, value_dim, at, from, to, count);
        for (int i = 0; i < count; i++)
            mf_weigh(pairs + i, weights + i * stride, stride, v, value_dim, at, mf_most(to, pairs[i].first),
                     mf_least(last, pairs[i].last), 1);
    }
    for (int i = 0; i < count; i++)
        for (int64_t e = at; e < value_dim; e++)
            for (int64_t j = mf_most(first, pairs[i].first); j < mf_least(last, pairs[i].last); j++)
                pairs[i].out[e] += v[j * value_dim + e] * weights[i * stride + j];
}

/* Softmax of scores[first .. last - 1] in place; returns the sum. `phase` is the position of row 0 mod 16. */
MF_INLINE float mf_softmax(float *scores, int64_t first, int64_t last, int64_t phase) {
    float largest = scores[first];
    for (int64_t j = first; j < last; j++) largest = scores[j] > largest ? scores[j] : largest;
    for (int64_t j = first; j < last; j++) {
        const float below = scores[j] - largest;
        scores[j] = below < MF_FAINT ? 0.0f : mf_exp(below);
    }
    float lane[MF_LANES] = {0};
    int64_t j = first;
    for (; j < last && (j + phase) % MF_LANES; j++) lane[(j + phase) % MF_LANES] += scores[j];
    for (; j + MF_LANES <= last; j += MF_LANES)
        for (int i = 0; i < MF_LANES; i++) lane[i] += scores[j + i];
    for (; j < last; j++) lane[(j + phase) % MF_LANES] += scores[j];
    return mf_tree4(lane);
}

/* The last key of the block that starts at key j, not past a ring's end. `row` is key j's row. */
MF_INLINE int64_t mf_block_end(const mf_attention *a, int64_t j, int64_t to, int64_t *row) {
    *row = a->ring ? (a->key_start + j) % a->ring : j;
    const int64_t end = mf_least(j + (a->type == MF_FLOAT32 ? MF_BLOCK : MF_HALF_BLOCK), to);
    return a->ring ? mf_least(end, j + a->ring - *row) : end;
}

/* `rows` rows of `dim` values from row `row` of `type`, in float32: where they lie, or widened into `room`. */
MF_INLINE const float *mf_float_rows(const uint8_t *from, int32_t type, int64_t row, int64_t rows, int64_t dim, float *room) {
    if (type == MF_FLOAT32) return (const float *)(const void *)from + row * dim;
    const uint16_t *half = (const uint16_t *)(const void *)from + row * dim;
    if (type == MF_FLOAT16)
        for (int64_t i = 0; i < rows * dim; i++) room[i] = mf_half(half[i]);
    else
        for (int64_t i = 0; i < rows * dim; i++) room[i] = mf_float_of((uint32_t)half[i] << 16);
    return room;
}

MF_INLINE void mf_attend_body(const mf_attention *a, int64_t group, int64_t first, int64_t last, float *scratch) {
    const int64_t share = a->heads / a->groups, padded = mf_round_up(a->dim, MF_LANES);
    const int64_t stride = mf_round_up(a->span, MF_LANES), count = last - first;
    const int64_t bytes = mf_companion_bytes(a->type);
    const uint8_t *k = a->k + group * a->k_stride * bytes, *v = a->v + group * a->v_stride * bytes;
    float *q = scratch, *scores = scratch + MF_PAIRS * padded, totals[MF_PAIRS];
    float *room = scores + MF_PAIRS * stride;
    mf_pair pairs[MF_PAIRS];
    int64_t from = INT64_MAX, to = 0, row;
    for (int64_t i = 0; i < count; i++) {
        const int64_t query = (first + i) / share, head = group * share + (first + i) % share;
        const float *from_q = a->q + head * a->q_head + query * a->q_row;
        pairs[i].last = a->query_start + query + 1 - a->key_start;
        pairs[i].first = a->window ? mf_most(0, pairs[i].last - a->window) : 0;
        pairs[i].out = a->out + head * a->out_head + query * a->out_row;
        memset(pairs[i].out, 0, (size_t)a->value_dim * 4);
        for (int64_t d = 0; d < padded; d++) q[i * padded + d] = d < a->dim ? from_q[d] * a->scale : 0.0f;
        from = mf_least(from, pairs[i].first);
        to = mf_most(to, pairs[i].last);
    }
    for (int64_t j = from, end; j < to; j = end) {
        end = mf_block_end(a, j, to, &row);
        const float *keys = mf_float_rows(k, a->type, row, end - j, a->dim, room) - j * a->dim;
        int64_t i = 0;
        for (; i + MF_QUAD <= count; i += MF_QUAD)
            for (int64_t n = j; n < end; n++)
                mf_scores(q + i * padded, keys + n * a->dim, a->dim, padded, scores + i * stride + n, stride, MF_QUAD);
        for (; i + 2 <= count; i += 2)
            for (int64_t n = j; n < end; n++)
                mf_scores(q + i * padded, keys + n * a->dim, a->dim, padded, scores + i * stride + n, stride, 2);
        for (; i < count; i++)
            for (int64_t n = j; n < end; n++)
                mf_scores(q + i * padded, keys + n * a->dim, a->dim, padded, scores + i * stride + n, stride, 1);
    }
    for (int64_t i = 0; i < count; i++)
        totals[i] = mf_softmax(scores + i * stride, pairs[i].first, pairs[i].last, a->key_start % MF_LANES);
    for (int64_t j = from, end; j < to; j = end) {
        end = mf_block_end(a, j, to, &row);
        const float *values = mf_float_rows(v, a->type, row, end - j, a->value_dim, room) - j * a->value_dim;
        int64_t i = 0;
        for (; i + MF_QUAD <= count; i += MF_QUAD)
            mf_values(pairs + i, scores + i * stride, stride, values, a->value_dim, j, end, MF_QUAD);
        for (; i + 2 <= count; i += 2)
            mf_values(pairs + i, scores + i * stride, stride, values, a->value_dim, j, end, 2);
        for (; i < count; i++) mf_values(pairs + i, scores + i * stride, stride, values, a->value_dim, j, end, 1);
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t e = 0; e < a->value_dim; e++) pairs[i].out[e] /= totals[i];
}

#endif
