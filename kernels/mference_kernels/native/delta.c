/* Gated delta networks: entry points. Heads and columns of states are shared out; no result depends on how. */
#include "delta.h"

#include <math.h>

#include "body.h"

#define MF_OF(name) portable_##name
#define MF_FOR
#define MF_DELTA_BYTES 16
#include "delta_body.h"

#if defined(MF_X86)
#define MF_OF(name) avx2_##name
#define MF_FOR __attribute__((target("avx2")))
#define MF_DELTA_BYTES 32
#include "delta_body.h"

#define MF_OF(name) avx512_##name
#define MF_FOR __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2")))
#define MF_DELTA_BYTES 64
#include "delta_body.h"
#endif

static const mf_delta_variant *in_use(void) {
#if defined(MF_X86)
    if (mf_active == &mf_avx512 || mf_active == &mf_amx) return &avx512_variant;
    if (mf_active == &mf_avx2) return &avx2_variant;
#endif
    return &portable_variant;
}

/* Columns of one item of work: all of a head's where heads alone keep every thread busy, for they share rows of memory. */
static int64_t columns_of(int64_t heads, int64_t value_dim) {
    return heads >= 4 * mf_pool_threads() ? mf_round_up(value_dim, MF_DELTA_COLUMNS) : MF_DELTA_COLUMNS;
}

static int64_t blocks_of(int64_t heads, int64_t value_dim) {
    const int64_t columns = columns_of(heads, value_dim);
    return (value_dim + columns - 1) / columns;
}

/* `heads`: of all timelines together. */
static void advance_block(const mf_delta_head *head, int64_t block, int64_t heads, float *scratch) {
    const int64_t columns = columns_of(heads, head->value_dim), last = mf_least((block + 1) * columns, head->value_dim);
    for (int64_t at = block * columns; at < last; at += MF_DELTA_COLUMNS)
        in_use()->advance(head, at, mf_least(MF_DELTA_COLUMNS, last - at), scratch);
}

/* Floats of scratch an item of work needs. */
static int64_t panel_floats(int64_t key_dim) { return key_dim * MF_DELTA_COLUMNS; }

/* --- the delta rule alone --- */

typedef struct {
    const float *q, *k, *v, *decay, *beta, *from;
    float *out, *to, *scratch;
    int64_t batch, length, key_heads, value_heads, key_dim, value_dim;
} ruling;

static void rule_item(void *context, int64_t item, int worker) {
    const ruling *r = context;
    const int64_t heads = r->batch * r->value_heads, blocks = blocks_of(heads, r->value_dim), each = r->value_heads * blocks;
    const int64_t b = item / each, h = item % each / blocks, key = h / (r->value_heads / r->key_heads);
    const int64_t keys = r->key_heads * r->key_dim, values = r->value_heads * r->value_dim;
    const int64_t at = b * r->length, state = (b * r->value_heads + h) * r->key_dim * r->value_dim;
    const mf_delta_head head = {
        r->q + at * keys + key * r->key_dim, r->k + at * keys + key * r->key_dim, r->v + at * values + h * r->value_dim,
        r->decay + at * r->value_heads + h, r->beta + at * r->value_heads + h, r->out + at * values + h * r->value_dim,
        r->from + state, r->to + state, keys, keys, values, r->value_heads, values, r->length, r->key_dim, r->value_dim};
    advance_block(&head, item % blocks, heads, r->scratch + worker * panel_floats(r->key_dim));
}

/* The delta rule over `length` >= 1 tokens: q, k (batch, length, key_heads, key_dim), v and out (batch, length, value_heads,
   value_dim), log_decay and beta (batch, length, value_heads), from and to (batch, value_heads, key_dim, value_dim). */
MF_EXPORT int mf_gated_delta(const float *q, const float *k, const float *v, const float *log_decay, const float *beta,
                             const float *from, int64_t batch, int64_t length, int64_t key_heads, int64_t value_heads,
                             int64_t key_dim, int64_t value_dim, float *out, float *to) {
    if (length < 1 || key_heads < 1 || value_heads % key_heads) return MF_BAD_SHAPE;
    mf_pool_enter();
    const int64_t panels = mf_pool_threads() * panel_floats(key_dim), rates = batch * length * value_heads;
    float *scratch = (float *)mf_arena((panels + rates) * 4);
    if (scratch) {
        in_use()->exponentials(log_decay, scratch + panels, rates);
        ruling job = {q, k, v, scratch + panels, beta, from, out, to, scratch, batch, length, key_heads, value_heads,
                      key_dim, value_dim};
        mf_pool_run(rule_item, &job, batch * value_heads * blocks_of(batch * value_heads, value_dim));
    }
    mf_pool_leave();
    return scratch ? MF_OK : MF_NO_MEMORY;
}

/* --- the convolution alone --- */

typedef struct {
    const float *x, *tail, *taps;
    float *y, *new_tail;
    int64_t length, channels, tap_count;
} convolving;

static void convolve_item(void *context, int64_t item, int worker) {
    (void)worker;
    const convolving *c = context;
    const int64_t past = c->tap_count - 1, b = item / c->length, t = item % c->length, row = c->channels;
    const float *rows[MF_DELTA_TAPS], *x = c->x + b * c->length * row, *tail = c->tail + b * past * row;
    for (int64_t tap = 0; tap <= past; tap++) {
        const int64_t token = t + tap - past;
        rows[tap] = token < 0 ? tail + (token + past) * row : x + token * row;
    }
    in_use()->convolve(rows, c->taps, c->tap_count, row, 0, row, 0, c->y + item * row);
}

/* The last rows of a timeline of `length` tokens x after those of `tail`. */
static void keep_tail(const float *x, const float *tail, int64_t length, int64_t past, int64_t channels, float *to) {
    for (int64_t i = 0; i < past; i++) {
        const int64_t token = length + i - past;
        memcpy(to + i * channels, token < 0 ? tail + (token + past) * channels : x + token * channels,
               (size_t)channels * 4);
    }
}

/* Filter each channel over its own past: x, y (batch, length, channels), tails (batch, tap_count - 1, channels), taps
   (tap_count, channels), the oldest first. */
MF_EXPORT int mf_causal_conv(const float *x, const float *tail, const float *taps, int64_t batch, int64_t length,
                             int64_t channels, int64_t tap_count, float *y, float *new_tail) {
    if (tap_count < 1 || tap_count > MF_DELTA_TAPS) return MF_BAD_SHAPE;
    const int64_t past = tap_count - 1;
    convolving job = {x, tail, taps, y, new_tail, length, channels, tap_count};
    mf_pool_enter();
    mf_pool_run(convolve_item, &job, batch * length);
    for (int64_t b = 0; b < batch; b++)
        keep_tail(x + b * length * channels, tail + b * past * channels, length, past, channels,
                  new_tail + b * past * channels);
    mf_pool_leave();
    return MF_OK;
}

/* --- the whole mixer --- */

#define TOKENS_PER_ITEM 8

typedef struct {
    mf_delta_segment segment;
    float *scratch;
    int64_t groups; /* items of one timeline's segment, per key head */
} mixing;

/* Tokens of timeline b in the segment. */
static int64_t tokens_of(const mf_delta_segment *s, int64_t b) {
    return mf_most(0, mf_least(MF_DELTA_TOKENS, s->call->lengths[b] - s->start));
}

static void each_token(const mixing *job, int64_t item, void (*work)(const mf_delta_segment *, int64_t, int64_t, int64_t)) {
    const mf_delta_segment *s = &job->segment;
    const int64_t head = item % s->call->key_heads, group = item / s->call->key_heads % job->groups;
    const int64_t b = item / s->call->key_heads / job->groups;
    const int64_t last = mf_least((group + 1) * TOKENS_PER_ITEM, tokens_of(s, b));
    for (int64_t t = group * TOKENS_PER_ITEM; t < last; t++) work(s, b, t, head);
}

static void prepare_item(void *context, int64_t item, int worker) {
    (void)worker;
    each_token(context, item, in_use()->prepare);
}

static void finish_item(void *context, int64_t item, int worker) {
    (void)worker;
    each_token(context, item, in_use()->finish);
}

static void advance_item(void *context, int64_t item, int worker) {
    const mixing *job = context;
    const mf_delta_segment *s = &job->segment;
    const mf_delta_mixer *m = s->call;
    const int64_t heads = m->batch * m->value_heads, blocks = blocks_of(heads, m->value_dim);
    const int64_t each = m->value_heads * blocks, b = item / each;
    const int64_t h = item % each / blocks, key = h / (m->value_heads / m->key_heads), keys = m->key_heads * m->key_dim;
    const int64_t values = m->value_heads * m->value_dim, channels = 2 * keys + values, count = tokens_of(s, b);
    const int64_t state = h * m->key_dim * m->value_dim;
    if (!count) return;
    const float *rows = s->rows + b * MF_DELTA_TOKENS * channels;
    const int64_t rates = b * MF_DELTA_TOKENS * m->value_heads + h;
    const mf_delta_head head = {rows + key * m->key_dim, rows + keys + key * m->key_dim,
                                rows + 2 * keys + h * m->value_dim, s->decay + rates, s->beta + rates,
                                m->y + (b * m->length + s->start) * values + h * m->value_dim,
                                (s->start ? m->new_states[b] : m->states[b]) + state, m->new_states[b] + state, channels,
                                channels, channels, m->value_heads, values, count, m->key_dim, m->value_dim};
    advance_block(&head, item % blocks, heads, job->scratch + worker * panel_floats(m->key_dim));
}

static int mix(const mf_delta_mixer *m) {
    const int64_t channels = 2 * m->key_heads * m->key_dim + m->value_heads * m->value_dim;
    const int64_t tokens = m->batch * MF_DELTA_TOKENS, panels = mf_pool_threads() * panel_floats(m->key_dim);
    float *scratch = (float *)mf_arena((panels + tokens * (channels + 2 * m->value_heads)) * 4);
    if (!scratch) return MF_NO_MEMORY;
    mixing job = {{m, scratch + panels, scratch + panels + tokens * channels, NULL, 0}, scratch, 0};
    job.segment.beta = job.segment.decay + tokens * m->value_heads;
    for (; job.segment.start < m->length; job.segment.start += MF_DELTA_TOKENS) {
        const int64_t left = mf_least(MF_DELTA_TOKENS, m->length - job.segment.start);
        job.groups = (left + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM;
        mf_pool_run(prepare_item, &job, m->batch * job.groups * m->key_heads);
        mf_pool_run(advance_item, &job, m->batch * m->value_heads * blocks_of(m->batch * m->value_heads, m->value_dim));
        mf_pool_run(finish_item, &job, m->batch * job.groups * m->key_heads);
    }
    const int64_t values = m->value_heads * m->value_dim, past = m->tap_count - 1;
    for (int64_t b = 0; b < m->batch; b++) {
        keep_tail(m->qkv + b * m->length * channels, m->tails[b], m->lengths[b], past, channels, m->new_tails[b]);
        memset(m->y + (b * m->length + m->lengths[b]) * values, 0, (size_t)((m->length - m->lengths[b]) * values) * 4);
    }
    return MF_OK;
}

/* The whole mixer between its projections; every timeline has at least one token. */
MF_EXPORT int mf_delta_mix(const mf_delta_mixer *m) {
    if (m->tap_count < 1 || m->tap_count > MF_DELTA_TAPS || m->key_heads < 1 || m->value_heads % m->key_heads)
        return MF_BAD_SHAPE;
    for (int64_t b = 0; b < m->batch; b++)
        if (m->lengths[b] < 1 || m->lengths[b] > m->length) return MF_BAD_SHAPE;
    mf_pool_enter();
    const int result = mix(m);
    mf_pool_leave();
    return result;
}
