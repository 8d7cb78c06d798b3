/* Making entries of windows of tokens, and turning the last features of heads. */
#include "lanes.h"

/* Windows of `rate` rows of values and gates, `width` each; `offsets` (rate, width) are added to the gates. Where windows
   overlap, `before` are the first halves of the rows of the window before the first one. */
typedef struct {
    const float *values, *gates, *offsets, *before_values, *before_gates;
    float *out; /* (count, width), or half of it where windows overlap */
    int64_t count, rate, width, first;
} mf_pooling;

typedef struct {
    const float *values, *gates, *offsets;
    int64_t stride, rows;
} slots;

/* Softmax over all rows of the parts, channel by channel, times the values. */
MF_INLINE void pool_channels(const slots *part, const int parts, int64_t width, int64_t at, float *out, const int count) {
    float largest[MF_LANES], total[MF_LANES] = {0}, sum[MF_LANES] = {0}, gate[MF_LANES];
    for (int i = 0; i < count; i++) largest[i] = -3.4e38f;
    for (int p = 0; p < parts; p++)
        for (int64_t r = 0; r < part[p].rows; r++)
            for (int i = 0; i < count; i++) {
                const float g = part[p].gates[r * part[p].stride + at + i] + part[p].offsets[r * width + at + i];
                largest[i] = g > largest[i] ? g : largest[i];
            }
    for (int p = 0; p < parts; p++)
        for (int64_t r = 0; r < part[p].rows; r++) {
            for (int i = 0; i < count; i++)
                gate[i] = part[p].gates[r * part[p].stride + at + i] + part[p].offsets[r * width + at + i];
            for (int i = 0; i < count; i++) gate[i] = mf_exp(gate[i] - largest[i]);
            for (int i = 0; i < count; i++) {
                total[i] += gate[i];
                sum[i] += gate[i] * part[p].values[r * part[p].stride + at + i];
            }
        }
    for (int i = 0; i < count; i++) out[i] = sum[i] / total[i];
}

MF_INLINE void pool_one_body(const mf_pooling *c, int64_t item) {
    const int64_t size = c->rate * c->width;
    const slots own = {c->values + item * size, c->gates + item * size, c->offsets, c->width, c->rate};
    slots part[2] = {own, own};
    int64_t parts = 1, dim = c->width;
    if (c->before_values) {
        dim = c->width / 2;
        part[1].values += dim;
        part[1].gates += dim;
        part[1].offsets += dim;
        parts = 2;
        if (item > 0) {
            part[0].values -= size;
            part[0].gates -= size;
        } else if (c->first > 0) {
            part[0].values = c->before_values;
            part[0].gates = c->before_gates;
            part[0].stride = dim;
        } else {
            part[0].rows = 0;
        }
    }
    float *out = c->out + item * dim;
    int64_t at = 0;
    if (parts == 2)
        for (; at + MF_LANES <= dim; at += MF_LANES) pool_channels(part, 2, c->width, at, out + at, MF_LANES);
    else
        for (; at + MF_LANES <= dim; at += MF_LANES) pool_channels(part, 1, c->width, at, out + at, MF_LANES);
    if (at < dim) pool_channels(part, (int)parts, c->width, at, out + at, (int)(dim - at));
}
MF_VERSIONS(pool_one, (const mf_pooling *c, int64_t item), (c, item))

static void pool_item(void *context, int64_t item, int worker) {
    (void)worker;
    pool_one(context, item);
}

/* One entry per window. */
MF_EXPORT int mf_pool_windows(const mf_pooling *c) {
    if (c->rate < 1 || c->width < 1 || c->count < 0 || (c->before_values && c->width % 2)) return MF_BAD_SHAPE;
    mf_pool_enter();
    mf_pool_run(pool_item, (void *)c, c->count);
    mf_pool_leave();
    return MF_OK;
}

/* Rows x (tokens, heads, dim): scaled to unit root mean square if `scaled`, then by `weight` (dim) unless NULL, then the
   pairs (2 i, 2 i + 1) of the last 2 * half features turned by position * frequency, or backwards. */
typedef struct {
    const float *x;
    const int32_t *positions;
    const float *frequencies, *weight;
    float *y;
    int64_t tokens, heads, dim, half;
    int32_t back, scaled;
    float eps;
} mf_turning;

typedef struct {
    const mf_turning *call;
    const float *turns;
} turning;

MF_INLINE void turn_row(const mf_turning *c, const float *x, const float *cosine, const float *sine, float *y) {
    const int64_t still = c->dim - 2 * c->half;
    const float *from = x;
    if (c->scaled) {
        const float scale = mf_row_scale(x, c->dim, c->eps);
        if (c->weight)
            for (int64_t d = 0; d < c->dim; d++) y[d] = (x[d] * scale) * c->weight[d];
        else
            for (int64_t d = 0; d < c->dim; d++) y[d] = x[d] * scale;
        from = y;
    } else {
        memcpy(y, x, (size_t)still * 4);
    }
    for (int64_t i = 0; i < c->half; i++) {
        const float a = from[still + 2 * i], b = from[still + 2 * i + 1];
        y[still + 2 * i] = a * cosine[i] - b * sine[i];
        y[still + 2 * i + 1] = b * cosine[i] + a * sine[i];
    }
}

MF_INLINE void turn_token_body(const turning *job, int64_t token) {
    const mf_turning *c = job->call;
    const float *cosine = job->turns + 2 * c->half * token, *sine = cosine + c->half;
    for (int64_t row = token * c->heads; row < (token + 1) * c->heads; row++)
        turn_row(c, c->x + row * c->dim, cosine, sine, c->y + row * c->dim);
}
MF_VERSIONS(turn_token, (const turning *job, int64_t token), (job, token))

static void turn_item(void *context, int64_t token, int worker) {
    (void)worker;
    turn_token(context, token);
}

MF_EXPORT int mf_turn_trailing(const mf_turning *c) {
    if (2 * c->half > c->dim || c->half < 0 || c->heads < 0) return MF_BAD_SHAPE;
    mf_pool_enter();
    float *turns = (float *)mf_arena(c->tokens * c->half * 8 + 64);
    if (turns) {
        for (int64_t token = 0; token < c->tokens; token++)
            for (int64_t i = 0; i < c->half; i++) {
                float *at = turns + 2 * c->half * token + i;
                mf_turn((float)c->positions[token] * c->frequencies[i], at, at + c->half);
                if (c->back) at[c->half] = -at[c->half];
            }
        turning job = {c, turns};
        mf_pool_run(turn_item, &job, c->tokens);
    }
    mf_pool_leave();
    return turns ? MF_OK : MF_NO_MEMORY;
}
