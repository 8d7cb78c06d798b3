/* The routed block in one call: pairs of (row, expert), grouped by expert so that each expert's weights are read once. */
#include <stdlib.h>

#include "work.h"

typedef struct {
    int32_t slot, first, count; /* pairs order[first .. first + count - 1] use this slot */
} mf_group;

typedef struct {
    const mf_matrix *gate, *up, *down;
    const void *const *table;
    const mf_layout *gate_layout, *up_layout, *down_layout;
    const mf_group *groups;
    const int32_t *order;
    const uint8_t *gate_inputs, *up_inputs;
    uint8_t *down_inputs;
    float *hidden, *y;
    const float *weights;
    int64_t chunk, per_group, choices;
    int32_t activation;
} mf_block;

/* Matrix `role` (0 gate, 1 up, 2 down) of one slot. */
static mf_matrix at_slot(const mf_block *b, const mf_matrix *w, const mf_layout *l, int role, int32_t slot) {
    mf_matrix one = *w;
    if (b->table) {
        const void *const *parts = b->table + 9 * (int64_t)slot + 3 * role;
        one.codes = parts[0];
        one.scales = parts[1];
        one.biases = parts[2];
    } else {
        const int64_t companions = w->out * l->groups * mf_companion_bytes(w->companions);
        one.codes += slot * (w->out * l->row_bytes);
        one.scales += slot * companions;
        one.biases += slot * companions;
    }
    return one;
}

/* Gates at most the limit, ups from -limit to limit; `limit` is its float32 bits. */
static void clamp(int32_t limit, float *gates, float *ups, int64_t rows, int64_t count) {
    const float most = mf_float_of((uint32_t)limit);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = r * MF_CHUNK; i < r * MF_CHUNK + count; i++) {
            gates[i] = gates[i] > most ? most : gates[i];
            ups[i] = ups[i] > most ? most : ups[i] < -most ? -most : ups[i];
        }
}

static void gate_item(void *context, int64_t item, int worker) {
    (void)worker;
    const mf_block *b = context;
    const mf_group *g = b->groups + item / b->per_group;
    const int64_t first = item % b->per_group * b->chunk, last = mf_least(first + b->chunk, b->gate->out);
    const mf_matrix gate = at_slot(b, b->gate, b->gate_layout, 0, g->slot);
    const mf_matrix up = at_slot(b, b->up, b->up_layout, 1, g->slot);
    float gates[MF_TILE * MF_CHUNK], ups[MF_TILE * MF_CHUNK];
    const uint8_t *inputs[MF_TILE];
    float *outputs[MF_TILE];
    for (int32_t done = 0; done < g->count; done += MF_TILE) {
        const int64_t count = mf_least(MF_TILE, g->count - done);
        const int32_t *pairs = b->order + g->first + done;
        const mf_rows rows = {inputs, outputs, count};
        for (int64_t r = 0; r < count; r++) {
            inputs[r] = b->gate_inputs + pairs[r] / b->choices * b->gate_layout->bytes;
            outputs[r] = gates + r * MF_CHUNK;
        }
        mf_active->product(&gate, b->gate_layout, &rows, first, last);
        for (int64_t r = 0; r < count; r++) {
            inputs[r] = b->up_inputs + pairs[r] / b->choices * b->up_layout->bytes;
            outputs[r] = ups + r * MF_CHUNK;
        }
        mf_active->product(&up, b->up_layout, &rows, first, last);
        if (b->activation > MF_SILU) clamp(b->activation, gates, ups, count, last - first);
        for (int64_t r = 0; r < count; r++)
            mf_active->activate(b->activation > MF_SILU ? MF_SILU : b->activation, gates + r * MF_CHUNK, ups + r * MF_CHUNK,
                                b->hidden + pairs[r] * b->gate->out + first, last - first);
    }
}

static void down_item(void *context, int64_t item, int worker) {
    (void)worker;
    const mf_block *b = context;
    const mf_group *g = b->groups + item / b->per_group;
    const int64_t first = item % b->per_group * b->chunk, last = mf_least(first + b->chunk, b->down->out);
    const mf_matrix down = at_slot(b, b->down, b->down_layout, 2, g->slot);
    const uint8_t *inputs[MF_TILE];
    float *outputs[MF_TILE];
    for (int32_t done = 0; done < g->count; done += MF_TILE) {
        const int64_t count = mf_least(MF_TILE, g->count - done);
        const int32_t *pairs = b->order + g->first + done;
        for (int64_t r = 0; r < count; r++) {
            inputs[r] = b->down_inputs + pairs[r] * b->down_layout->bytes;
            outputs[r] = b->y + pairs[r] * b->down->out + first;
        }
        const mf_rows rows = {inputs, outputs, count};
        mf_active->product(&down, b->down_layout, &rows, first, last);
    }
}

/* Pairs' rows, in pieces: pair p lies in piece i at row p - starts[i], for the last i with starts[i] <= p. */
typedef struct {
    const float *const *pieces;
    const int64_t *starts;
    int64_t count;
} mf_pieces;

typedef struct {
    mf_pieces from;
    const int32_t *place; /* of pair (row, rank); NULL: row * choices + rank */
    const float *weights;
    float *total;
    int64_t choices, width;
} mf_summing;

/* One row's sum over ranks in order: one rounding per product and per sum. */
static void sum_item(void *context, int64_t row, int worker) {
    (void)worker;
    const mf_summing *s = context;
    float *total = s->total + row * s->width;
    for (int64_t rank = 0; rank < s->choices; rank++) {
        const int64_t pair = row * s->choices + rank, at = s->place ? s->place[pair] : pair;
        int64_t piece = s->from.count - 1;
        while (s->from.starts[piece] > at) piece--;
        const float *y = s->from.pieces[piece] + (at - s->from.starts[piece]) * s->width, w = s->weights[pair];
        if (rank)
            for (int64_t i = 0; i < s->width; i++) total[i] = total[i] + y[i] * w;
        else
            for (int64_t i = 0; i < s->width; i++) total[i] = y[i] * w;
    }
}

/* total (rows, width) = sum over ranks of weights (rows, choices) times pairs' rows; `starts` has `count` entries and the
   number of all rows after them. */
MF_EXPORT int mf_weighted_sum(const float *const *pieces, const int64_t *starts, int64_t count, const int32_t *place,
                              const float *weights, int64_t rows, int64_t choices, int64_t width, float *total) {
    for (int64_t pair = 0; place && pair < rows * choices; pair++)
        if (place[pair] < 0 || place[pair] >= starts[count]) return MF_BAD_SLOT;
    mf_summing job = {{pieces, starts, count}, place, weights, total, choices, width};
    mf_pool_enter();
    mf_pool_run(sum_item, &job, rows);
    mf_pool_leave();
    return MF_OK;
}

/* Sort pairs by slot, keeping their order; returns the number of groups, or -1 for a slot out of range. */
static int64_t sort_pairs(const int32_t *slots, int64_t pairs, int32_t limit, int32_t *at, int32_t *order,
                          mf_group *groups) {
    memset(at, 0, (size_t)(limit + 1) * 4);
    for (int64_t p = 0; p < pairs; p++) {
        if (slots[p] < 0 || slots[p] >= limit) return -1;
        at[slots[p] + 1]++;
    }
    int64_t used = 0;
    for (int32_t slot = 0; slot < limit; slot++) {
        if (at[slot + 1]) groups[used++] = (mf_group){slot, at[slot], at[slot + 1]};
        at[slot + 1] += at[slot];
    }
    for (int64_t p = 0; p < pairs; p++) order[at[slots[p]]++] = (int32_t)p;
    return used;
}

static int run_block(mf_block *b, const float *x, const int32_t *slots, int64_t rows, float *y) {
    const int64_t pairs = rows * b->choices, inner = b->gate->out, limit = b->gate->slots;
    const int shared = b->gate->bits == b->up->bits && b->gate->group == b->up->group;
    const int64_t gate_bytes = rows * b->gate_layout->bytes, up_bytes = shared ? 0 : rows * b->up_layout->bytes;
    const int64_t down_bytes = pairs * b->down_layout->bytes, hidden_bytes = mf_round_up(pairs * inner * 4, 64);
    const int64_t order_bytes = mf_round_up(pairs * 4, 64), at_bytes = mf_round_up((limit + 1) * 4, 64);
    const int64_t group_bytes = mf_round_up(mf_least(pairs, limit) * (int64_t)sizeof(mf_group), 64);
    const int64_t y_bytes = b->weights ? pairs * b->down->out * 4 : 0;
    uint8_t *arena = mf_arena(gate_bytes + up_bytes + down_bytes + hidden_bytes + order_bytes + at_bytes + group_bytes +
                              y_bytes);
    if (!arena) return MF_NO_MEMORY;
    uint8_t *gate_inputs = arena, *up_inputs = shared ? gate_inputs : arena + gate_bytes;
    b->down_inputs = arena + gate_bytes + up_bytes;
    b->hidden = (float *)(b->down_inputs + down_bytes);
    int32_t *order = (int32_t *)(b->down_inputs + down_bytes + hidden_bytes);
    int32_t *at = (int32_t *)((uint8_t *)order + order_bytes);
    mf_group *groups = (mf_group *)((uint8_t *)at + at_bytes);
    b->y = b->weights ? (float *)((uint8_t *)groups + group_bytes) : y;
    const int64_t used = sort_pairs(slots, pairs, (int32_t)limit, at, order, groups);
    if (used < 0) return MF_BAD_SLOT;
    b->groups = groups;
    b->order = order;
    b->gate_inputs = gate_inputs;
    b->up_inputs = up_inputs;

    mf_prepare_all(x, rows, b->gate_layout, gate_inputs);
    if (!shared) mf_prepare_all(x, rows, b->up_layout, up_inputs);
    b->chunk = mf_chunk(b->gate_layout, pairs / mf_most(1, used), inner * used);
    b->per_group = (inner + b->chunk - 1) / b->chunk;
    mf_pool_run(gate_item, b, used * b->per_group);
    mf_prepare_all(b->hidden, pairs, b->down_layout, b->down_inputs);
    b->chunk = mf_chunk(b->down_layout, pairs / mf_most(1, used), b->down->out * used);
    b->per_group = (b->down->out + b->chunk - 1) / b->chunk;
    mf_pool_run(down_item, b, used * b->per_group);
    if (b->weights) {
        const float *const piece = b->y;
        const int64_t start = 0;
        mf_summing job = {{&piece, &start, 1}, NULL, b->weights, y, b->choices, b->down->out};
        mf_pool_run(sum_item, &job, rows);
    }
    return MF_OK;
}

int mf_experts_all(const mf_matrix *w, const void *const *table, const float *x, const int32_t *slots, int64_t rows,
                   int64_t choices, int32_t activation, const float *weights, float *y) {
    mf_layout layouts[3];
    for (int i = 0; i < 3; i++)
        if (mf_lay_out(w + i, layouts + i) || w[i].slots != w[0].slots) return MF_BAD_SHAPE;
    if (w[1].in != w[0].in || w[1].out != w[0].out || w[2].in != w[0].out || rows < 0 || choices < 1 ||
        rows * choices > INT32_MAX || activation < MF_GELU_TANH)
        return MF_BAD_SHAPE;
    mf_block block = {.gate = w,
                      .up = w + 1,
                      .down = w + 2,
                      .table = table,
                      .gate_layout = layouts,
                      .up_layout = layouts + 1,
                      .down_layout = layouts + 2,
                      .weights = weights,
                      .choices = choices,
                      .activation = activation};
    return run_block(&block, x, slots, rows, y);
}

/* down(activation(gate(x)) * up(x)) of each (row, choice) pair. `w` holds gate, up [slots, inner, in] and down
   [slots, out, inner]. With `table`, slot s lies at table[9 s ..]: codes, scales, biases of gate, up, down, and the
   pointers of `w` are not used. y is (rows, choices, out), or with `weights` (rows, choices) their sum (rows, out). */
MF_EXPORT int mf_experts(const mf_matrix *w, const void *const *table, const float *x, const int32_t *slots, int64_t rows,
                         int64_t choices, int32_t activation, const float *weights, float *y) {
    mf_pool_enter();
    const int result = mf_experts_all(w, table, x, slots, rows, choices, activation, weights, y);
    mf_pool_leave();
    return result;
}
