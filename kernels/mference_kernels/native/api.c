/* What the binding calls: choosing a variant, products, rows of a table. Pointers may be unaligned unless they are float. */
#include "work.h"

#if defined(MF_X86)
static const mf_variant *const variants[] = {&mf_amx, &mf_avx512, &mf_avx2, &mf_portable};
#elif defined(MF_ARM)
static const mf_variant *const variants[] = {&mf_neon, &mf_portable};
#else
static const mf_variant *const variants[] = {&mf_portable};
#endif

const mf_variant *mf_active = &mf_portable;

#ifndef MF_SOURCES
#define MF_SOURCES "unknown"
#endif

/* Digest of the sources this library was built from. */
MF_EXPORT const char *mf_sources(void) { return MF_SOURCES; }

/* Name of variant `index`, best first, if this machine has it; NULL past the last. "" stands for one it lacks. */
MF_EXPORT const char *mf_variant_name(int index) {
    if (index < 0 || (size_t)index >= sizeof variants / sizeof *variants) return NULL;
    return variants[index]->supported() ? variants[index]->name : "";
}

/* Use the named variant from the next call on. */
MF_EXPORT int mf_choose(const char *name) {
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++)
        if (!strcmp(variants[i]->name, name) && variants[i]->supported()) {
            mf_pool_enter();
            mf_active = variants[i];
            mf_pool_leave();
            return MF_OK;
        }
    return MF_BAD_SHAPE;
}

int mf_lay_out(const mf_matrix *w, mf_layout *l) {
    const int known = (w->bits == 2 || w->bits == 4 || w->bits == 8) &&
                      (w->group == 32 || w->group == 64 || w->group == 128) &&
                      (w->companions >= MF_BFLOAT16 && w->companions <= MF_FLOAT16);
    if (!known || w->in <= 0 || w->out < 0 || w->in % w->group) return MF_BAD_SHAPE;
    l->in = w->in;
    l->bits = w->bits;
    l->group = w->group;
    l->per_byte = 8 / w->bits;
    l->groups = w->in / w->group;
    l->row_bytes = w->in / l->per_byte;
    l->plane = mf_round_up(l->row_bytes, MF_PAD);
    const int64_t values = l->plane * l->per_byte, per_group = mf_round_up(l->groups, MF_LANES) * 4;
    l->high = mf_round_up(2 * l->in, MF_PAD);
    l->middle = l->high + values;
    l->low = l->middle + values;
    l->step = l->low + values;
    l->sum = l->step + per_group;
    l->bytes = l->sum + per_group;
    return MF_OK;
}

int64_t mf_chunk(const mf_layout *l, int64_t rows, int64_t outputs) {
    const int64_t streamed = rows < MANY_ROWS ? CHUNK_BYTES / l->row_bytes / 16 * 16 : MF_CHUNK;
    const int64_t shared = outputs / (4 * mf_pool_threads()) / 16 * 16;
    return mf_most(16, mf_least(MF_CHUNK, mf_least(streamed, shared)));
}

static void prepare_row(void *context, int64_t row, int worker) {
    (void)worker;
    const mf_preparing *p = context;
    mf_active->prepare(p->x + row * p->layout->in, p->layout, p->inputs + row * p->layout->bytes);
}

void mf_prepare_all(const float *x, int64_t rows, const mf_layout *layout, uint8_t *inputs) {
    mf_preparing p = {x, layout, inputs};
    if (rows * layout->in < 8192) {
        for (int64_t row = 0; row < rows; row++) prepare_row(&p, row, 0);
        return;
    }
    mf_pool_run(prepare_row, &p, rows);
}

typedef struct {
    const mf_matrix *w;
    const mf_layout *layout;
    const uint8_t *inputs;
    float *y;
    int64_t chunk, items;
} part;

typedef struct {
    const part *parts;
    int64_t rows;
} linear;

static void linear_item(void *context, int64_t item, int worker) {
    (void)worker;
    const linear *job = context;
    const part *p = job->parts;
    for (; item >= p->items; p++) item -= p->items;
    const int64_t first = item * p->chunk, last = mf_least(first + p->chunk, p->w->out);
    const uint8_t *inputs[MF_TILE];
    float *outputs[MF_TILE];
    for (int64_t row = 0; row < job->rows; row += MF_TILE) {
        const int64_t count = mf_least(MF_TILE, job->rows - row);
        for (int64_t r = 0; r < count; r++) {
            inputs[r] = p->inputs + (row + r) * p->layout->bytes;
            outputs[r] = p->y + (row + r) * p->w->out + first;
        }
        const mf_rows rows = {inputs, outputs, count};
        mf_active->product(p->w, p->layout, &rows, first, last);
    }
}

static int same_layout(const mf_layout *a, const mf_layout *b) {
    return a->bits == b->bits && a->group == b->group && a->in == b->in;
}

int mf_linear_all(const mf_matrix *w, int64_t count, const float *x, int64_t rows, float *const *y) {
    if (count < 1 || count > MF_MATRICES || rows < 0) return MF_BAD_SHAPE;
    mf_layout layouts[MF_MATRICES];
    part parts[MF_MATRICES];
    int64_t items = 0, bytes = 0, outputs = 0, offsets[MF_MATRICES];
    for (int64_t i = 0; i < count; i++) {
        const int failed = mf_lay_out(w + i, layouts + i);
        if (failed || w[i].in != w[0].in) return MF_BAD_SHAPE;
        const int again = i && same_layout(layouts + i, layouts + i - 1);
        offsets[i] = again ? offsets[i - 1] : bytes;
        if (!again) bytes += rows * layouts[i].bytes;
    }
    uint8_t *inputs = mf_arena(bytes);
    if (!inputs) return MF_NO_MEMORY;
    for (int64_t i = 0; i < count; i++) outputs += w[i].out;
    for (int64_t i = 0; i < count; i++) {
        if (!i || offsets[i] != offsets[i - 1]) mf_prepare_all(x, rows, layouts + i, inputs + offsets[i]);
        const int64_t chunk = mf_chunk(layouts + i, rows, outputs);
        parts[i] = (part){w + i, layouts + i, inputs + offsets[i], y[i], chunk, (w[i].out + chunk - 1) / chunk};
        items += parts[i].items;
    }
    linear job = {parts, rows};
    mf_pool_run(linear_item, &job, items);
    return MF_OK;
}

/* y[i] (rows, out of w[i]) = x (rows, in) w[i]T, for up to MF_MATRICES matrices of the same input. */
MF_EXPORT int mf_linear(const mf_matrix *w, int64_t count, const float *x, int64_t rows, float *const *y) {
    mf_pool_enter();
    const int result = mf_linear_all(w, count, x, rows, y);
    mf_pool_leave();
    return result;
}

/* y (count, in) = rows `ids` of w, each value code * scale, rounded, + bias, rounded. */
MF_EXPORT int mf_table_rows(const mf_matrix *w, const int32_t *ids, int64_t count, float *y) {
    mf_layout l;
    if (mf_lay_out(w, &l)) return MF_BAD_SHAPE;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= w->out) return MF_BAD_SLOT;
    const int64_t companion = l.groups * mf_companion_bytes(w->companions);
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *codes = w->codes + ids[i] * l.row_bytes;
        const uint8_t *scales = w->scales + ids[i] * companion, *biases = w->biases + ids[i] * companion;
        for (int64_t k = 0; k < w->in; k++) {
            const int shift = (int)(k % l.per_byte) * w->bits, mask = (1 << w->bits) - 1;
            const float code = (float)((codes[k / l.per_byte] >> shift) & mask);
            const float scaled = code * mf_companion(scales, w->companions, k / w->group);
            y[i * w->in + k] = scaled + mf_companion(biases, w->companions, k / w->group);
        }
    }
    return MF_OK;
}

static void attend_item(void *context, int64_t item, int worker) {
    const mf_attending *job = context;
    const mf_attention *a = job->call;
    const int64_t pairs = a->heads / a->groups * a->length, blocks = (pairs + job->each - 1) / job->each;
    const int64_t first = item % blocks * job->each, last = mf_least(first + job->each, pairs);
    mf_active->attend(a, item / blocks, first, last, job->scratch + worker * mf_scratch_floats(a));
}

int mf_attend_all(const mf_attention *a) {
    if (a->groups < 1 || a->heads % a->groups || a->key_start > a->query_start || a->window < 0 || a->ring < 0 ||
        (a->ring && a->span > a->ring) || a->span < a->query_start + a->length - a->key_start)
        return MF_BAD_SHAPE;
    mf_attending job = {a, (float *)mf_arena(mf_pool_threads() * mf_scratch_floats(a) * 4), MF_PAIRS};
    if (!job.scratch) return MF_NO_MEMORY;
    const int64_t pairs = a->heads / a->groups * a->length;
    while (job.each > 1 && a->groups * pairs / job.each < 2 * mf_pool_threads()) job.each /= 2;
    mf_pool_run(attend_item, &job, a->groups * ((pairs + job.each - 1) / job.each));
    return MF_OK;
}

/* Causal attention of one timeline; every query must see at least its own key. */
MF_EXPORT int mf_attend(const mf_attention *a) {
    mf_pool_enter();
    const int result = mf_attend_all(a);
    mf_pool_leave();
    return result;
}
