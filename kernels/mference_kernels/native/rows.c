/* Norms and rotary embedding of rows: little work, so plain C for every machine, with one rounding per operation. */
#include <math.h>

#include "work.h"

#define SPAN_FLOATS 16384 /* work of one item */

typedef struct {
    mf_span_task task;
    void *context;
    int64_t count, per;
} spanning;

static void span_item(void *context, int64_t item, int worker) {
    (void)worker;
    const spanning *job = context;
    job->task(job->context, item * job->per, mf_least((item + 1) * job->per, job->count));
}

void mf_spans(mf_span_task task, void *context, int64_t count, int64_t each) {
    spanning job = {task, context, count, mf_most(1, SPAN_FLOATS / mf_most(1, each))};
    if (count < 2 * job.per) {
        if (count > 0) task(context, 0, count);
    } else {
        mf_pool_run(span_item, &job, (count + job.per - 1) / job.per);
    }
}

typedef struct {
    const float *x;
    const uint8_t *weight;
    float *y;
    int64_t dim;
    float divisor, eps;
    int32_t type;
} norming;

MF_INLINE void norm_row(const norming *job, const float *x, float *y, const int32_t type) {
    float lane[MF_LANES] = {0};
    int64_t d = 0;
    for (; d + MF_LANES <= job->dim; d += MF_LANES)
        for (int i = 0; i < MF_LANES; i++) lane[i] += x[d + i] * x[d + i];
    for (; d < job->dim; d++) lane[d % MF_LANES] += x[d] * x[d];
    const float scale = 1.0f / sqrtf(mf_tree(lane) / job->divisor + job->eps);
    if (job->weight)
        for (d = 0; d < job->dim; d++) y[d] = (x[d] * scale) * mf_companion(job->weight, type, d);
    else
        for (d = 0; d < job->dim; d++) y[d] = x[d] * scale;
}

static void norm_rows(void *context, int64_t first, int64_t last) {
    const norming *job = context;
    for (int64_t row = first; row < last; row++) {
        const float *x = job->x + row * job->dim;
        float *y = job->y + row * job->dim;
        if (job->type == MF_BFLOAT16)
            norm_row(job, x, y, MF_BFLOAT16);
        else if (job->type == MF_FLOAT32)
            norm_row(job, x, y, MF_FLOAT32);
        else
            norm_row(job, x, y, MF_FLOAT16);
    }
}

void mf_norm_all(const float *x, const uint8_t *weight, int32_t type, int64_t rows, int64_t dim, float divisor, float eps,
                 float *y) {
    norming job = {x, weight, y, dim, divisor, eps, type};
    mf_spans(norm_rows, &job, rows, dim);
}

/* y = x / sqrt(sum of x^2 / divisor + eps), times `weight` (dim) of `type` unless it is NULL; rows (rows, dim). */
MF_EXPORT int mf_norm(const float *x, const uint8_t *weight, int32_t type, int64_t rows, int64_t dim, float divisor,
                      float eps, float *y) {
    mf_pool_enter();
    mf_norm_all(x, weight, type, rows, dim, divisor, eps, y);
    mf_pool_leave();
    return MF_OK;
}

/* Cosine and sine of `angle`, in double precision, for angles to 2^20; rounded to float32 at the end. */
void mf_turn(float angle, float *cosine, float *sine) {
    const double shifted = (double)angle * 0.63661977236758134 + 6755399441055744.0;
    const double n = shifted - 6755399441055744.0; /* nearest multiple of a quarter turn */
    uint64_t quarter;
    memcpy(&quarter, &shifted, 8);
    const double r = ((double)angle - n * 1.5707963267341256) - n * 6.0771005065061922e-11, z = r * r;
    double s = -1.0 / 39916800.0 + z * (1.0 / 6227020800.0);
    s = 1.0 / 362880.0 + z * s;
    s = -1.0 / 5040.0 + z * s;
    s = 1.0 / 120.0 + z * s;
    s = -1.0 / 6.0 + z * s;
    s = r + r * (z * s);
    double c = 1.0 / 479001600.0 - z * (1.0 / 87178291200.0);
    c = -1.0 / 3628800.0 + z * c;
    c = 1.0 / 40320.0 + z * c;
    c = -1.0 / 720.0 + z * c;
    c = 1.0 / 24.0 + z * c;
    c = -0.5 + z * c;
    c = 1.0 + z * c;
    const double first = quarter & 1 ? s : c, second = quarter & 1 ? c : s;
    *cosine = (float)((quarter + 1) & 2 ? -first : first);
    *sine = (float)(quarter & 2 ? -second : second);
}

typedef struct {
    const float *x, *frequencies;
    const int32_t *positions;
    float *y, *turns;
    int64_t heads, length, dim, half; /* length 0: heads lie together, (rows, heads, dim) */
} rotating;

static void turn_rows(void *context, int64_t first, int64_t last) {
    const rotating *job = context;
    for (int64_t row = first; row < last; row++)
        for (int64_t i = 0; i < job->half; i++) {
            float *at = job->turns + 2 * job->half * row + i;
            mf_turn((float)job->positions[row] * job->frequencies[i], at, at + job->half);
        }
}

static void rotate_heads(void *context, int64_t first, int64_t last) {
    const rotating *job = context;
    const int64_t half = job->half, length = job->length;
    for (int64_t item = first; item < last; item++) {
        const int64_t row = length ? item / (job->heads * length) * length + item % length : item / job->heads;
        const float *cosine = job->turns + 2 * half * row, *sine = cosine + half, *a = job->x + item * job->dim, *b = a + half;
        float *y = job->y + item * job->dim;
        for (int64_t i = 0; i < half; i++) y[i] = a[i] * cosine[i] - b[i] * sine[i];
        for (int64_t i = 0; i < half; i++) y[half + i] = b[i] * cosine[i] + a[i] * sine[i];
        for (int64_t i = 2 * half; i < job->dim; i++) y[i] = a[i];
    }
}

static int rotate_all(rotating *job, int64_t rows) {
    if (job->half < 0 || 2 * job->half > job->dim) return MF_BAD_SHAPE;
    job->turns = (float *)mf_arena(rows * job->half * 8 + 8);
    if (!job->turns) return MF_NO_MEMORY;
    mf_spans(turn_rows, job, rows, 8 * job->half);
    mf_spans(rotate_heads, job, rows * job->heads, job->dim);
    return MF_OK;
}

int mf_rotate_all(const float *x, const int32_t *positions, const float *frequencies, int64_t rows, int64_t heads,
                  int64_t dim, int64_t half, float *y) {
    rotating job = {x, frequencies, positions, y, NULL, heads, 0, dim, half};
    return rotate_all(&job, rows);
}

/* Rotate pairs (i, i + half) of the first 2 * half features of rows x (batch, heads, length, dim) by position * frequency;
   positions are (batch, length). */
MF_EXPORT int mf_rope(const float *x, const int32_t *positions, const float *frequencies, int64_t batch, int64_t heads,
                      int64_t length, int64_t dim, int64_t half, float *y) {
    rotating job = {x, frequencies, positions, y, NULL, heads, length, dim, half};
    mf_pool_enter();
    const int result = length ? rotate_all(&job, batch * length) : MF_OK;
    mf_pool_leave();
    return result;
}
