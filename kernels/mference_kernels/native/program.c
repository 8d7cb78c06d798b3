/* Runs programs. Registers lie in scratch, each 64-byte aligned, unless the caller brings their memory. */
#include "program.h"

#define MAX_REGISTERS 64

typedef struct {
    const mf_program *program;
    float *at[MAX_REGISTERS];
    int64_t rows, batch;
    const int32_t *positions;
    const mf_timeline *timelines;
    const mf_held *experts;
} running;

typedef struct {
    const float *a, *b;
    float *y;
    const mf_op *op;
    int64_t width, from;
} flat; /* an operation on values, or on rows of `width` */

static void add(void *context, int64_t first, int64_t last) {
    const flat *job = context;
    for (int64_t i = first; i < last; i++) job->y[i] = job->a[i] + job->b[i];
}

static void multiply(void *context, int64_t first, int64_t last) {
    const flat *job = context;
    for (int64_t i = first; i < last; i++) job->y[i] = job->a[i] * job->b[i];
}

static void activate(void *context, int64_t first, int64_t last) {
    const flat *job = context;
    const int64_t at = job->op->kind == MF_CAP ? 0 : first;
    mf_active->activate(job->op->kind, job->a + first, job->b + at, job->y + first, last - first);
}

/* One gate for each row. */
static void open_rows(void *context, int64_t first, int64_t last) {
    const flat *job = context;
    const float one = 1.0f;
    for (int64_t row = first; row < last; row++) {
        float opened;
        mf_active->activate(job->op->kind, job->a + row, &one, &opened, 1);
        for (int64_t i = row * job->width; i < (row + 1) * job->width; i++) job->y[i] = opened * job->b[i];
    }
}

/* out = kind(gate) * up, or for MF_CAP up[0] * tanh(gate / up[0]), value by value. */
MF_EXPORT int mf_activate(int32_t kind, const float *gate, const float *up, float *out, int64_t count) {
    const mf_op op = {.kind = kind};
    flat job = {gate, up, out, &op, 1, 1};
    if (kind < MF_GELU_TANH || kind > MF_CAP) return MF_BAD_SHAPE;
    mf_pool_enter();
    mf_spans(activate, &job, count, 16);
    mf_pool_leave();
    return MF_OK;
}

static void scale(void *context, int64_t first, int64_t last) {
    const flat *job = context;
    const mf_op *op = job->op;
    const int64_t width = job->width;
    const float one = op->weight && op->dim == 1 ? mf_companion(op->weight, op->kind, 0) : 1.0f;
    for (int64_t row = first; row < last; row++) {
        const float *x = job->a + row * width;
        float *y = job->y + row * width;
        if (op->weight && op->dim > 1)
            for (int64_t i = 0; i < width; i++) y[i] = (x[i] * mf_companion(op->weight, op->kind, i)) * op->f;
        else
            for (int64_t i = 0; i < width; i++) y[i] = (x[i] * one) * op->f;
    }
}

static void part(void *context, int64_t first, int64_t last) {
    const flat *job = context;
    const int64_t dim = job->op->dim, count = job->op->count, from = job->from / count;
    for (int64_t row = first; row < last; row++)
        for (int64_t c = 0; c < count; c++)
            memcpy(job->y + (row * count + c) * dim, job->a + (row * count + c) * from + job->op->extra, (size_t)dim * 4);
}

MF_INLINE uint16_t to_bfloat16(float value) {
    const uint32_t bits = mf_bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

MF_INLINE uint16_t to_float16(float value) {
    const uint32_t bits = mf_bits_of(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (rest >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
    if (rest < 0x38800000u) /* subnormal: a sum with 0.5 leaves its units of 2^-24, rounded, in the last bits */
        return (uint16_t)(sign | (mf_bits_of(mf_float_of(rest) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1)) >> 13));
}

/* Put row x of each head where its position belongs. */
static void append(const mf_timeline *t, uint8_t *rows, int64_t stride, const float *x, int64_t heads, int64_t dim) {
    for (int64_t r = 0; r < t->real; r++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = h * stride + (t->start + r) % t->capacity * dim;
            const float *from = x + (r * heads + h) * dim;
            if (t->type == MF_FLOAT32) {
                memcpy(rows + 4 * at, from, (size_t)dim * 4);
                continue;
            }
            uint16_t *to = (uint16_t *)(void *)rows + at;
            for (int64_t d = 0; d < dim; d++) to[d] = t->type == MF_FLOAT16 ? to_float16(from[d]) : to_bfloat16(from[d]);
        }
}

/* Heads, `count` of them, of `dim` features over `groups` key heads of `extra` value features. */
static int attend(const running *run, const mf_op *op) {
    const int64_t length = run->batch ? run->rows / run->batch : 0;
    const int64_t q_row = op->count * op->dim, out_row = op->count * op->extra;
    if (!run->batch || length * run->batch != run->rows || op->groups < 1) return MF_BAD_SHAPE;
    for (int64_t b = 0; b < run->batch; b++) {
        const mf_timeline *t = run->timelines + b;
        const int64_t first = op->window ? mf_most(0, t->start - op->window + 1) : 0;
        float *out = run->at[op->out] + b * length * out_row;
        if (t->real < 0 || t->real > length || t->start + t->real - first > t->capacity) return MF_BAD_SHAPE;
        append(t, t->k, t->k_stride, run->at[op->in2] + b * length * op->groups * op->dim, op->groups, op->dim);
        append(t, t->v, t->v_stride, run->at[op->in3] + b * length * op->groups * op->extra, op->groups, op->extra);
        const mf_attention call = {.q = run->at[op->in] + b * length * q_row,
                                   .k = t->k,
                                   .v = t->v,
                                   .out = out,
                                   .heads = op->count,
                                   .groups = op->groups,
                                   .length = t->real,
                                   .span = t->start + t->real - first,
                                   .dim = op->dim,
                                   .value_dim = op->extra,
                                   .query_start = t->start,
                                   .key_start = first,
                                   .window = op->window,
                                   .k_stride = t->k_stride,
                                   .v_stride = t->v_stride,
                                   .ring = t->capacity,
                                   .q_head = op->dim,
                                   .q_row = q_row,
                                   .out_head = op->extra,
                                   .out_row = out_row,
                                   .scale = op->f,
                                   .type = t->type};
        const int result = t->real ? mf_attend_all(&call) : MF_OK;
        if (result) return result;
        memset(out + t->real * out_row, 0, (size_t)((length - t->real) * out_row) * 4);
    }
    return MF_OK;
}

static int gated(const running *run, const mf_op *op) {
    int32_t *slots = (int32_t *)(void *)run->at[op->in2]; /* zeros: one expert, number 0 */
    memset(slots, 0, (size_t)run->rows * 4);
    return mf_experts_all(op->matrices, NULL, run->at[op->in], slots, run->rows, 1, op->kind, NULL, run->at[op->out]);
}

static int experts(const running *run, const mf_op *op) {
    const mf_held *held = run->experts;
    const int32_t *ids = (const int32_t *)(const void *)run->at[op->in2];
    int32_t *slots = (int32_t *)(void *)run->at[op->extra];
    if (!held || held->w[0].in != op->dim || held->w[2].out != op->dim) return MF_BAD_SHAPE;
    for (int64_t i = 0; i < run->rows * op->count; i++) {
        if (ids[i] < 0 || ids[i] >= held->count) return MF_BAD_SLOT;
        slots[i] = held->slot_of[ids[i]];
        if (slots[i] < 0) return MF_AWAY;
    }
    return mf_experts_all(held->w, held->table, run->at[op->in], slots, run->rows, op->count, op->kind, run->at[op->in3],
                          run->at[op->out]);
}

static int one(const running *run, const mf_op *op) {
    const int64_t rows = run->rows, width = run->program->widths[op->out];
    float *const y = run->at[op->out];
    flat job = {run->at[op->in], run->at[op->in2], y, op, width, run->program->widths[op->in]};
    switch (op->code) {
        case MF_OP_NORM:
            mf_norm_all(job.a, op->weight, op->kind, rows * op->count, op->dim, op->f, op->g, y);
            return MF_OK;
        case MF_OP_LINEAR: return mf_linear_all(op->matrices, op->count, job.a, rows, run->at + op->out);
        case MF_OP_ROTATE:
            return mf_rotate_all(job.a, run->positions, op->weight, rows, op->count, op->dim, op->extra, y);
        case MF_OP_ATTEND: return attend(run, op);
        case MF_OP_ADD: mf_spans(add, &job, rows * width, 1); return MF_OK;
        case MF_OP_MULTIPLY: mf_spans(multiply, &job, rows * width, 1); return MF_OK;
        case MF_OP_SCALE: mf_spans(scale, &job, rows, width); return MF_OK;
        case MF_OP_GATED: return gated(run, op);
        case MF_OP_ACTIVATE:
            if (op->kind == MF_CAP) job.b = &op->f;
            if (job.from == 1 && width > 1)
                mf_spans(open_rows, &job, rows, width);
            else
                mf_spans(activate, &job, rows * width, 16);
            return MF_OK;
        case MF_OP_EXPERTS: return experts(run, op);
        case MF_OP_PART: mf_spans(part, &job, rows, width); return MF_OK;
        case MF_OP_CHOOSE:
            return mf_choose_all(job.a, rows, op->dim, op->count, op->kind, op->weight, (int32_t *)(void *)y,
                                 run->at[op->out + 1]);
        default: return MF_BAD_SHAPE;
    }
}

/* Run inside the pool. */
static int run_program(running *run, float *const *arrays) {
    const mf_program *p = run->program;
    if (p->registers < 1 || p->registers > MAX_REGISTERS || run->rows < 1) return MF_BAD_SHAPE;
    float *base = (float *)(void *)mf_registers(p->row_floats * run->rows * 4 + 64);
    if (!base) return MF_NO_MEMORY;
    for (int64_t r = 0; r < p->registers; r++)
        run->at[r] = p->offsets[r] < 0 ? arrays[-1 - p->offsets[r]] : base + p->offsets[r] * run->rows;
    int result = MF_OK;
    for (int64_t i = 0; i < p->count && !result; i++) result = one(run, p->ops + i);
    return result;
}

/* Run `p` on `rows` rows, `batch` timelines of equally many. `arrays` are the caller's registers; `positions` (rows) and
   `timelines` (batch) may be NULL where no operation needs them. */
MF_EXPORT int mf_run(const mf_program *p, int64_t rows, int64_t batch, float *const *arrays, const int32_t *positions,
                     const mf_timeline *timelines) {
    running run = {p, {0}, rows, batch, positions, timelines, NULL};
    mf_pool_enter();
    const int result = run_program(&run, arrays);
    mf_pool_leave();
    return result;
}

/* Run layers one after another, as mf_run does each. `arrays` are those of every layer: rows in, rows out (exchanged after
   each), and the others, of which number `ids` are the chosen ids, `choices` per row. Returns MF_OK, or MF_AWAY, or an
   error; `done` is then the number of layers that are, and arrays[0] holds their rows. */
MF_EXPORT int mf_run_layers(const mf_layer *layers, int64_t count, int64_t rows, int64_t batch, float **arrays, int64_t ids,
                            int64_t choices, const int32_t *positions, int64_t *done) {
    int result = MF_OK;
    mf_pool_enter();
    for (*done = 0; *done < count && !result; (*done)++) {
        const mf_layer *layer = layers + *done;
        running run = {layer->program, {0}, rows, batch, positions, layer->timelines, layer->experts};
        result = run_program(&run, arrays);
        if (layer->ids) memcpy(layer->ids, arrays[ids], (size_t)(rows * choices) * 4);
        if (result) break;
        float *const out = arrays[1];
        arrays[1] = arrays[0];
        arrays[0] = out;
    }
    mf_pool_leave();
    return result;
}
