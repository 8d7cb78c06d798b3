/* Attention to a window and to entries of the past, and picking those entries.

   Heads are the lanes, so a score is summed feature by feature, and neither other queries, other heads nor where rows lie
   matter. Keys are met in order: the window by position, then entries by number. */
#include "lanes.h"

#define MOST_HEADS 32 /* of one item: two vectors */
#define KEYS 4        /* met at once */
#define FAINT -64.0f
#define SUMS 4 /* partial sums of a softmax: keys mod 4 */

typedef struct {
    const float *q;
    const void *rows, *entries;
    const float *sinks;
    const int32_t *picks;
    float *out;
    int64_t length, heads, dim;
    int64_t query_start, key_start, window, ring; /* as in mf_attention */
    int64_t rate, most;                           /* tokens of an entry; entries in a row of `picks` */
    float scale;
    int32_t rows_type, entries_type; /* MF_FLOAT32, or half precision, which is widened exactly */
} mf_sparse;

/* Row `row` of `rows`, widened into `spare` unless it is float32. */
MF_INLINE const float *row_at(const void *rows, int32_t type, int64_t row, int64_t dim, float **spare) {
    if (type == MF_FLOAT32) return (const float *)rows + row * dim;
    const uint16_t *from = (const uint16_t *)rows + row * dim;
    float *to = *spare;
    *spare += dim;
    if (type == MF_BFLOAT16)
        for (int64_t d = 0; d < dim; d++) to[d] = mf_float_of((uint32_t)from[d] << 16);
    else
        for (int64_t d = 0; d < dim; d++) to[d] = mf_half(from[d]);
    return to;
}

/* Put `count` rows of q, scaled, into columns: qt[d * lanes + h]; missing heads are zeros. */
MF_INLINE void columns(const float *q, int64_t count, int64_t dim, float scale, float *qt, int64_t lanes) {
    for (int64_t d = 0; d < dim; d++) {
        for (int64_t h = 0; h < count; h++) qt[d * lanes + h] = q[h * dim + d] * scale;
        for (int64_t h = count; h < lanes; h++) qt[d * lanes + h] = 0.0f;
    }
}

/* Dots of `count` keys with 16 * `parts` heads, columns at `qt`: scores[k * stride ..]. */
MF_INLINE void dots(const float *const *keys, const float *qt, int64_t lanes, int64_t dim, float *scores, int64_t stride,
                    const int count, const int parts) {
    mf_v16 sum[KEYS][2] = {{{0}}};
    for (int64_t d = 0; d < dim; d++)
        for (int p = 0; p < parts; p++) {
            const mf_v16 heads = *(const mf_v16 *)(qt + d * lanes + p * MF_LANES);
            for (int k = 0; k < count; k++) sum[k][p] += heads * keys[k][d];
        }
    for (int k = 0; k < count; k++)
        for (int p = 0; p < parts; p++) *(mf_v16 *)(scores + k * stride + p * MF_LANES) = sum[k][p];
}

MF_INLINE void all_dots(const float *const *keys, int64_t count, const float *qt, int64_t lanes, int64_t dim,
                        float *scores, const int parts) {
    int64_t k = 0;
    for (; k + KEYS <= count; k += KEYS) dots(keys + k, qt, lanes, dim, scores + k * lanes, lanes, KEYS, parts);
    for (; k < count; k++) dots(keys + k, qt, lanes, dim, scores + k * lanes, lanes, 1, parts);
}

/* Softmax over keys of one vector of heads, in place; `total` gets the sums, sinks included. */
MF_INLINE void softmax16(float *scores, int64_t count, int64_t lanes, const float *sinks, float *total) {
    float largest[MF_LANES], sum[SUMS][MF_LANES] = {{0}}, below[MF_LANES];
    for (int i = 0; i < MF_LANES; i++) largest[i] = sinks[i];
    for (int64_t k = 0; k < count; k++)
        for (int i = 0; i < MF_LANES; i++)
            largest[i] = scores[k * lanes + i] > largest[i] ? scores[k * lanes + i] : largest[i];
    for (int64_t k = 0; k < count; k++) {
        float *at = scores + k * lanes, *part = sum[k % SUMS];
        for (int i = 0; i < MF_LANES; i++) below[i] = at[i] - largest[i];
        for (int i = 0; i < MF_LANES; i++) {
            const float e = mf_exp(below[i]);
            at[i] = below[i] < FAINT ? 0.0f : e;
        }
        for (int i = 0; i < MF_LANES; i++) part[i] += at[i];
    }
    for (int i = 0; i < MF_LANES; i++) {
        const float gap = sinks[i] - largest[i], sink = gap < FAINT ? 0.0f : mf_exp(gap);
        total[i] = ((sum[0][i] + sum[2][i]) + (sum[1][i] + sum[3][i])) + sink;
    }
}

/* Values `at` .. of `count` heads, 16 * `parts` features: out[h] = sum over keys of weight * value, over the total. */
MF_INLINE void weigh(const float *const *keys, int64_t keys_count, const float *weights, int64_t lanes, const float *total,
                     float *out, int64_t dim, int64_t at, const int count, const int parts) {
    mf_v16 sum[KEYS][4] = {{{0}}};
    for (int64_t k = 0; k < keys_count; k++)
        for (int p = 0; p < parts; p++) {
            const mf_v16 value = *(const mf_v16 *)(keys[k] + at + p * MF_LANES);
            for (int h = 0; h < count; h++) sum[h][p] += value * weights[k * lanes + h];
        }
    for (int h = 0; h < count; h++)
        for (int p = 0; p < parts; p++)
            *(mf_v16 *)(out + h * dim + at + p * MF_LANES) = sum[h][p] / total[h];
}

MF_INLINE void weigh_all(const float *const *keys, int64_t keys_count, const float *weights, int64_t lanes,
                         const float *total, float *out, int64_t dim, const int count) {
    int64_t at = 0;
    for (; at + 4 * MF_LANES <= dim; at += 4 * MF_LANES)
        weigh(keys, keys_count, weights, lanes, total, out, dim, at, count, 4);
    for (; at + MF_LANES <= dim; at += MF_LANES) weigh(keys, keys_count, weights, lanes, total, out, dim, at, count, 1);
    for (; at < dim; at++)
        for (int h = 0; h < count; h++) {
            float sum = 0.0f;
            for (int64_t k = 0; k < keys_count; k++) sum += keys[k][at] * weights[k * lanes + h];
            out[h * dim + at] = sum / total[h];
        }
}

MF_INLINE int64_t most_keys(const mf_sparse *a) {
    const int64_t visible = a->rate ? (a->query_start + a->length) / a->rate : 0;
    return a->window + (a->picks ? a->most : visible);
}

/* Where each key of a query lies: its window by position, then its entries by number. */
MF_INLINE int64_t list_keys(const mf_sparse *a, int64_t query, const float **keys, float *spare) {
    const int64_t at = a->query_start + query;
    int64_t count = 0;
    for (int64_t p = mf_most(0, at - a->window + 1); p <= at; p++)
        keys[count++] = row_at(a->rows, a->rows_type, a->ring ? p % a->ring : p - a->key_start, a->dim, &spare);
    if (a->picks) {
        const int32_t *pick = a->picks + query * a->most;
        for (int64_t i = 0; i < a->most && pick[i] >= 0; i++) 
            keys[count++] = row_at(a->entries, a->entries_type, pick[i], a->dim, &spare);
    } else if (a->rate) {
        for (int64_t w = 0; w < (at + 1) / a->rate; w++) 
            keys[count++] = row_at(a->entries, a->entries_type, w, a->dim, &spare);
    }
    return count;
}

MF_INLINE int64_t sparse_scratch(const mf_sparse *a) {
    const int64_t keys = most_keys(a);
    const int wide = a->rows_type == MF_FLOAT32 && a->entries_type == MF_FLOAT32;
    return mf_round_up(keys * (int64_t)sizeof(float *), 64) + ((a->dim + keys) * MOST_HEADS + (wide ? 0 : keys * a->dim)) * 4;
}

MF_INLINE void sparse_body(const mf_sparse *a, int64_t query, int64_t head, int64_t count, uint8_t *scratch) {
    const float **keys = (const float **)scratch;
    const int64_t lanes = count <= MF_LANES ? MF_LANES : MOST_HEADS;
    float *qt = (float *)(scratch + mf_round_up(most_keys(a) * (int64_t)sizeof(float *), 64));
    float *scores = qt + a->dim * MOST_HEADS, total[MOST_HEADS], sinks[MOST_HEADS] = {0};
    const int64_t found = list_keys(a, query, keys, scores + most_keys(a) * MOST_HEADS);
    columns(a->q + (query * a->heads + head) * a->dim, count, a->dim, a->scale, qt, lanes);
    for (int64_t h = 0; h < count; h++) sinks[h] = a->sinks[head + h];
    if (lanes == MF_LANES)
        all_dots(keys, found, qt, MF_LANES, a->dim, scores, 1);
    else
        all_dots(keys, found, qt, MOST_HEADS, a->dim, scores, 2);
    for (int64_t at = 0; at < lanes; at += MF_LANES)
        softmax16(scores + at, found, lanes, sinks + at, total + at);
    float *out = a->out + (query * a->heads + head) * a->dim;
    int64_t h = 0;
    for (; h + KEYS <= count; h += KEYS)
        weigh_all(keys, found, scores + h, lanes, total + h, out + h * a->dim, a->dim, KEYS);
    for (; h < count; h++) weigh_all(keys, found, scores + h, lanes, total + h, out + h * a->dim, a->dim, 1);
}
MF_VERSIONS(sparse, (const mf_sparse *a, int64_t query, int64_t head, int64_t count, uint8_t *scratch),
            (a, query, head, count, scratch))

typedef struct {
    const mf_sparse *call;
    uint8_t *scratch;
    int64_t each, blocks; /* heads of one item, items of one query */
} sparse_job;

static void sparse_item(void *context, int64_t item, int worker) {
    const sparse_job *job = context;
    const int64_t head = item % job->blocks * job->each, count = mf_least(job->each, job->call->heads - head);
    sparse(job->call, item / job->blocks, head, count, job->scratch + worker * mf_round_up(sparse_scratch(job->call), 64));
}

/* out (length, heads, dim) of q, over window rows (key and value alike) and entries. */
MF_EXPORT int mf_sparse_attend(const mf_sparse *a) {
    if (a->heads < 1 || a->dim < 1 || a->window < 1 || a->rate < 0 || a->most < 0 || a->length < 0) return MF_BAD_SHAPE;
    mf_pool_enter();
    sparse_job job = {a, mf_arena(mf_pool_threads() * mf_round_up(sparse_scratch(a), 64)), MOST_HEADS, 0};
    if (a->length * a->heads < 4 * MOST_HEADS * mf_pool_threads()) job.each = MF_LANES;
    job.blocks = (a->heads + job.each - 1) / job.each;
    if (job.scratch) mf_pool_run(sparse_item, &job, a->length * job.blocks);
    mf_pool_leave();
    return job.scratch ? MF_OK : MF_NO_MEMORY;
}

typedef struct {
    const float *q, *weights;
    const void *keys;
    int32_t *picks;
    int64_t length, heads, dim, entries;
    int64_t query_start, rate, most; /* `most` entries are picked of those visible */
    float scale;
    int32_t keys_type;
} mf_picking;

#define ENTRIES_PER_ITEM 256
#define SCORE_BYTES (16 << 20)

typedef struct {
    const mf_picking *call;
    float *scores, *columns;
    int64_t first, blocks, stride, lanes; /* first query of this round; items of one query */
} pick_job;

/* Add one vector of heads to the lane sums of each key. */
MF_INLINE void add_heads(const float *found, int64_t stride, const float *weights, int64_t heads, float scale,
                         float (*sum)[MF_LANES]) {
    float weight[MF_LANES];
    for (int64_t i = 0; i < MF_LANES; i++) weight[i] = i < heads ? weights[i] : 0.0f;
    for (int k = 0; k < KEYS; k++)
        for (int i = 0; i < MF_LANES; i++) {
            const float dot = found[k * stride + i] * scale;
            sum[k][i] += (dot > 0.0f ? dot : 0.0f) * weight[i];
        }
}

/* Scores of entries from .. to - 1: the sum over heads of weight * relu(dot * scale), heads in lanes mod 16. */
MF_INLINE void score_body(const mf_picking *c, int64_t query, int64_t from, int64_t to, int64_t lanes, float *qt,
                          float *scores) {
    const float *weights = c->weights + query * c->heads;
    float found[2 * KEYS * MF_LANES];
    columns(c->q + query * c->heads * c->dim, c->heads, c->dim, 1.0f, qt, lanes);
    for (int64_t e = from; e < to; e += KEYS) {
        const float *keys[KEYS];
        float sum[KEYS][MF_LANES] = {{0}};
        float *spare = qt + lanes * c->dim;
        for (int64_t k = 0; k < KEYS; k++)
            keys[k] = row_at(c->keys, c->keys_type, mf_least(e + k, to - 1), c->dim, &spare);
        int64_t head = 0;
        for (; head + 2 * MF_LANES <= lanes; head += 2 * MF_LANES) {
            dots(keys, qt + head, lanes, c->dim, found, 2 * MF_LANES, KEYS, 2);
            for (int64_t part = 0; part < 2 * MF_LANES; part += MF_LANES)
                add_heads(found + part, 2 * MF_LANES, weights + head + part, c->heads - head - part, c->scale, sum);
        }
        for (; head < lanes; head += MF_LANES) {
            dots(keys, qt + head, lanes, c->dim, found, MF_LANES, KEYS, 1);
            add_heads(found, MF_LANES, weights + head, c->heads - head, c->scale, sum);
        }
        for (int64_t k = 0; k < mf_least(KEYS, to - e); k++) scores[e + k] = mf_tree(sum[k]);
    }
}
MF_VERSIONS(score, (const mf_picking *c, int64_t query, int64_t from, int64_t to, int64_t lanes, float *qt, float *scores),
            (c, query, from, to, lanes, qt, scores))

static int64_t visible_to(const mf_picking *c, int64_t query) { return (c->query_start + query + 1) / c->rate; }

static void score_item(void *context, int64_t item, int worker) {
    const pick_job *job = context;
    const int64_t query = job->first + item / job->blocks, from = item % job->blocks * ENTRIES_PER_ITEM;
    const int64_t to = mf_least(from + ENTRIES_PER_ITEM, visible_to(job->call, query));
    float *qt = job->columns + worker * (job->lanes + KEYS) * job->call->dim;
    if (from < to && to > 0 && visible_to(job->call, query) > job->call->most)
        score(job->call, query, from, to, job->lanes, qt, job->scores + (query - job->first) * job->stride);
}

/* A score as an integer of the same order; both zeros are equal. */
MF_INLINE uint32_t rank_of(float score) {
    const uint32_t bits = mf_bits_of(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Put the numbers of the `most` largest of `count` scores, lower numbers first among equal ones, in rising order. */
static void pick_best(const float *scores, int64_t count, int64_t most, int32_t *picks) {
    uint32_t prefix = 0, mask = 0;
    int64_t left = most; /* of those that equal the prefix so far */
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t bins[256] = {0};
        for (int64_t i = 0; i < count; i++) {
            const uint32_t rank = rank_of(scores[i]);
            if ((rank & mask) == prefix) bins[rank >> shift & 255]++;
        }
        uint32_t bin = 255;
        for (; left > bins[bin]; bin--) left -= bins[bin];
        prefix |= bin << shift;
        mask |= 255u << shift;
    }
    for (int64_t i = 0, put = 0; put < most; i++) {
        const uint32_t rank = rank_of(scores[i]);
        if (rank > prefix || (rank == prefix && left-- > 0)) picks[put++] = (int32_t)i;
    }
}

static void pick_item(void *context, int64_t item, int worker) {
    (void)worker;
    const pick_job *job = context;
    const mf_picking *c = job->call;
    const int64_t query = job->first + item, visible = visible_to(c, query);
    int32_t *picks = c->picks + query * c->most;
    if (visible > c->most) {
        pick_best(job->scores + item * job->stride, visible, c->most, picks);
        return;
    }
    for (int64_t i = 0; i < c->most; i++) picks[i] = i < visible ? (int32_t)i : -1;
}

/* picks (length, most): the entries of the largest scores among those visible to each query, rising, then -1. */
MF_EXPORT int mf_pick_entries(const mf_picking *c) {
    const int64_t last = c->rate > 0 ? visible_to(c, c->length - 1) : 0;
    if (c->rate < 1 || c->heads < 1 || c->dim < 1 || c->most < 0 || c->entries < last) return MF_BAD_SHAPE;
    pick_job job = {.call = c, .lanes = mf_round_up(c->heads, MF_LANES), .stride = mf_round_up(last + 1, MF_LANES)};
    job.blocks = mf_most(1, (last + ENTRIES_PER_ITEM - 1) / ENTRIES_PER_ITEM);
    const int64_t round = mf_most(1, mf_least(c->length, SCORE_BYTES / 4 / job.stride));
    mf_pool_enter();
    job.scores = (float *)mf_arena((round * job.stride + mf_pool_threads() * (job.lanes + KEYS) * c->dim) * 4);
    if (job.scores) {
        job.columns = job.scores + round * job.stride;
        for (; job.first < c->length; job.first += round) {
            const int64_t queries = mf_least(round, c->length - job.first);
            mf_pool_run(score_item, &job, queries * job.blocks);
            mf_pool_run(pick_item, &job, queries);
        }
    }
    mf_pool_leave();
    return job.scores ? MF_OK : MF_NO_MEMORY;
}

/* bfloat16 rows of float32 ones, to nearest, ties to even; what is not a number stays so. */
MF_EXPORT void mf_narrow(const float *x, int64_t count, uint16_t *y) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = mf_bits_of(x[i]), odd = bits >> 16 & 1;
        y[i] = (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)(bits >> 16 | 64) : (uint16_t)((bits + 0x7fff + odd) >> 16);
    }
}
