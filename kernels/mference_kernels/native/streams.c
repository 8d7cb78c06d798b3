/* Products of plain matrices with each row alone, and residual streams: reading, writing and merging them. */
#include "lanes.h"

#define MOST_STREAMS 8
#define ROW_TILE 4
#define OUT_TILE 4
#define OUTS_PER_ITEM 32
#define ROWS_PER_ITEM 16

/* Dots of `rows` rows of x with `outs` rows of w, both of `in` values: lanes are features mod 16, then the tree. */
MF_INLINE void dot_tile(const float *x, const float *w, int64_t in, float *y, int64_t y_stride, const int rows,
                        const int outs) {
    mf_v16 lane[ROW_TILE][OUT_TILE] = {{{0}}};
    int64_t d = 0;
    for (; d + MF_LANES <= in; d += MF_LANES)
        for (int o = 0; o < outs; o++) {
            const mf_v16 weight = *(const mf_v16 *)(w + o * in + d);
            for (int r = 0; r < rows; r++) lane[r][o] += *(const mf_v16 *)(x + r * in + d) * weight;
        }
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outs; o++) {
            float lanes[MF_LANES];
            memcpy(lanes, &lane[r][o], sizeof lanes);
            for (int64_t i = d; i < in; i++) lanes[i - d] += x[r * in + i] * w[o * in + i];
            y[r * y_stride + o] = mf_tree(lanes);
        }
}

typedef struct {
    const float *x, *w;
    float *y;
    int64_t rows, in, out, out_items;
} multiplying;

MF_INLINE void multiply_body(const multiplying *m, int64_t row0, int64_t row1, int64_t out0, int64_t out1) {
    int64_t r = row0;
    for (; r + ROW_TILE <= row1; r += ROW_TILE) {
        int64_t o = out0;
        for (; o + OUT_TILE <= out1; o += OUT_TILE)
            dot_tile(m->x + r * m->in, m->w + o * m->in, m->in, m->y + r * m->out + o, m->out, ROW_TILE, OUT_TILE);
        for (; o < out1; o++)
            dot_tile(m->x + r * m->in, m->w + o * m->in, m->in, m->y + r * m->out + o, m->out, ROW_TILE, 1);
    }
    for (; r < row1; r++) {
        int64_t o = out0;
        for (; o + OUT_TILE <= out1; o += OUT_TILE)
            dot_tile(m->x + r * m->in, m->w + o * m->in, m->in, m->y + r * m->out + o, m->out, 1, OUT_TILE);
        for (; o < out1; o++)
            dot_tile(m->x + r * m->in, m->w + o * m->in, m->in, m->y + r * m->out + o, m->out, 1, 1);
    }
}
MF_VERSIONS(multiply, (const multiplying *m, int64_t row0, int64_t row1, int64_t out0, int64_t out1),
            (m, row0, row1, out0, out1))

static void multiply_item(void *context, int64_t item, int worker) {
    (void)worker;
    const multiplying *m = context;
    const int64_t row = item / m->out_items * ROWS_PER_ITEM, out = item % m->out_items * OUTS_PER_ITEM;
    multiply(m, row, mf_least(row + ROWS_PER_ITEM, m->rows), out, mf_least(out + OUTS_PER_ITEM, m->out));
}

static void multiply_all(multiplying *m) {
    m->out_items = (m->out + OUTS_PER_ITEM - 1) / OUTS_PER_ITEM;
    mf_pool_run(multiply_item, m, m->out_items * ((m->rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM));
}

/* y (rows, out) = x (rows, in) wT, w (out, in) float32. */
MF_EXPORT int mf_row_products(const float *x, const float *w, int64_t rows, int64_t in, int64_t out, float *y) {
    if (rows < 0 || in < 1 || out < 0) return MF_BAD_SHAPE;
    multiplying m = {x, w, y, rows, in, out, 0};
    mf_pool_enter();
    multiply_all(&m);
    mf_pool_leave();
    return MF_OK;
}

/* One site: fn (mixes, streams * width), base (mixes), scale; streams (rows, streams, width). */
typedef struct {
    const float *x, *fn, *base, *scale;
    int64_t rows, streams, width, iterations;
    float eps, norm_eps;
    float *u, *post, *mix; /* merging leaves post and mix out */
} mf_mixing;

typedef struct {
    const mf_mixing *call;
    const float *logits;
    int64_t mixes;
} mixing;

/* Softmax over the second index, then columns and rows divided by their sums in turn. */
static void balance(float *c, int64_t n, int64_t iterations, float eps) {
    for (int64_t i = 0; i < n; i++) {
        float largest = c[i * n], sum = 0.0f;
        for (int64_t j = 1; j < n; j++) largest = c[i * n + j] > largest ? c[i * n + j] : largest;
        for (int64_t j = 0; j < n; j++) sum += c[i * n + j] = mf_exp(c[i * n + j] - largest);
        for (int64_t j = 0; j < n; j++) c[i * n + j] = c[i * n + j] / sum + eps;
    }
    for (int64_t turn = 0; turn < 2 * iterations - 1; turn++) {
        const int64_t along = turn & 1 ? n : 1, across = turn & 1 ? 1 : n; /* columns first */
        for (int64_t line = 0; line < n; line++) {
            float sum = 0.0f;
            for (int64_t i = 0; i < n; i++) sum += c[line * along + i * across];
            for (int64_t i = 0; i < n; i++) c[line * along + i * across] /= sum + eps;
        }
    }
}

MF_INLINE void read_row_body(const mixing *job, int64_t row) {
    const mf_mixing *m = job->call;
    const int64_t n = m->streams, width = m->width;
    const float *x = m->x + row * n * width, *logits = job->logits + row * job->mixes;
    const float scale = mf_row_scale(x, n * width, m->norm_eps);
    float pre[MOST_STREAMS], *u = m->u + row * width;
    for (int64_t j = 0; j < n; j++)
        pre[j] = mf_sigmoid((logits[j] * scale) * m->scale[0] + m->base[j]) + m->eps;
    if (m->post) {
        float *post = m->post + row * n, *mix = m->mix + row * n * n;
        for (int64_t j = 0; j < n; j++)
            post[j] = 2.0f * mf_sigmoid((logits[n + j] * scale) * m->scale[1] + m->base[n + j]);
        for (int64_t j = 0; j < n * n; j++) mix[j] = (logits[2 * n + j] * scale) * m->scale[2] + m->base[2 * n + j];
        balance(mix, n, m->iterations, m->eps);
    }
    for (int64_t i = 0; i < width; i++) u[i] = pre[0] * x[i];
    for (int64_t j = 1; j < n; j++)
        for (int64_t i = 0; i < width; i++) u[i] += pre[j] * x[j * width + i];
}
MF_VERSIONS(read_row, (const mixing *job, int64_t row), (job, row))

static void read_item(void *context, int64_t row, int worker) {
    (void)worker;
    read_row(context, row);
}

/* u (rows, width) of streams, and post (rows, streams), mix (rows, streams, streams); without `post` only the first
   `streams` rows of fn are there. */
MF_EXPORT int mf_read_streams(const mf_mixing *m) {
    const int64_t mixes = m->post ? (2 + m->streams) * m->streams : m->streams;
    if (m->streams < 1 || m->streams > MOST_STREAMS || m->iterations < 1 || m->rows < 0) return MF_BAD_SHAPE;
    mf_pool_enter();
    float *logits = (float *)mf_arena(m->rows * mixes * 4 + 64);
    if (logits) {
        multiplying product = {m->x, m->fn, logits, m->rows, m->streams * m->width, mixes, 0};
        multiply_all(&product);
        mixing job = {m, logits, mixes};
        mf_pool_run(read_item, &job, m->rows);
    }
    mf_pool_leave();
    return logits ? MF_OK : MF_NO_MEMORY;
}

typedef struct {
    const float *x, *y, *post, *mix, *more;
    float *out;
    int64_t streams, width;
} writing;

MF_INLINE void write_row_body(const writing *job, int64_t row) {
    const int64_t n = job->streams, width = job->width;
    const float *x = job->x + row * n * width, *y = job->y + row * width;
    const float *post = job->post + row * n, *mix = job->mix + row * n * n;
    const float *more = job->more ? job->more + row * width : NULL;
    for (int64_t k = 0; k < n; k++) {
        float *out = job->out + (row * n + k) * width;
        int64_t i = 0;
        for (; i + MF_LANES <= width; i += MF_LANES) {
            mf_v16 sum = *(const mf_v16 *)(y + i);
            if (more) sum += *(const mf_v16 *)(more + i);
            sum *= post[k];
            for (int64_t j = 0; j < n; j++) sum += *(const mf_v16 *)(x + j * width + i) * mix[j * n + k];
            *(mf_v16 *)(out + i) = sum;
        }
        for (; i < width; i++) {
            float sum = (more ? y[i] + more[i] : y[i]) * post[k];
            for (int64_t j = 0; j < n; j++) sum += x[j * width + i] * mix[j * n + k];
            out[i] = sum;
        }
    }
}
MF_VERSIONS(write_row, (const writing *job, int64_t row), (job, row))

static void write_item(void *context, int64_t row, int worker) {
    (void)worker;
    write_row(context, row);
}

/* out (rows, streams, width): stream k is post[k] y + the sum over j of mix[j, k] x[j]; `more` is added to y unless NULL. */
MF_EXPORT int mf_write_streams(const float *x, const float *y, const float *post, const float *mix,
                               const float *more, int64_t rows, int64_t streams, int64_t width, float *out) {
    writing job = {x, y, post, mix, more, out, streams, width};
    mf_pool_enter();
    mf_pool_run(write_item, &job, rows);
    mf_pool_leave();
    return MF_OK;
}
