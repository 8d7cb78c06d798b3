/* Runs every entry point with every variant this machine has and prints a digest of all results per variant. Arrays end
   where the heap's guard begins, for runs under sanitizers. */
#include <stdio.h>
#include <stdlib.h>

#include "program.h"

int mf_set_threads(int threads);
int mf_choose(const char *name);
const char *mf_variant_name(int index);
int mf_linear(const mf_matrix *w, int64_t count, const float *x, int64_t rows, float *const *y);
int mf_table_rows(const mf_matrix *w, const int32_t *ids, int64_t count, float *y);
int mf_experts(const mf_matrix *w, const void *const *table, const float *x, const int32_t *slots, int64_t rows,
               int64_t choices, int32_t activation, const float *weights, float *y);
int mf_attend(const mf_attention *a);
int mf_norm(const float *x, const uint8_t *weight, int32_t type, int64_t rows, int64_t dim, float divisor, float eps, float *y);
int mf_rope(const float *x, const int32_t *positions, const float *frequencies, int64_t batch, int64_t heads,
            int64_t length, int64_t dim, int64_t half, float *y);
int mf_run(const mf_program *p, int64_t rows, int64_t batch, float *const *arrays, const int32_t *positions,
           const mf_timeline *timelines);

static uint64_t digest;

static void note(const float *y, int64_t count) {
    const uint8_t *bytes = (const uint8_t *)y;
    for (int64_t i = 0; i < 4 * count; i++) digest = (digest ^ bytes[i]) * 1099511628211u;
}

static void *filled(size_t bytes, unsigned seed) {
    uint8_t *p = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) p[i] = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);
    return p;
}

static float *values(size_t count, unsigned seed) {
    float *p = malloc(count * 4);
    for (size_t i = 0; i < count; i++) p[i] = (float)((int)((seed = seed * 1664525u + 1013904223u) >> 8) - (1 << 23)) / (1 << 21);
    return p;
}

static mf_matrix matrix(int64_t out, int64_t in, int32_t bits, int32_t group, int32_t slots) {
    mf_matrix w = {NULL, NULL, NULL, out, in, bits, group, MF_FLOAT32, slots};
    w.codes = filled((size_t)(slots * out * in * bits / 8), 1);
    w.scales = (uint8_t *)values((size_t)(slots * out * in / group), 2);
    w.biases = (uint8_t *)values((size_t)(slots * out * in / group), 3);
    return w;
}

static void release(mf_matrix w) {
    free((void *)(uintptr_t)w.codes);
    free((void *)(uintptr_t)w.scales);
    free((void *)(uintptr_t)w.biases);
}

static int products(int32_t bits, int32_t group, int64_t groups, int64_t rows) {
    const int64_t in = groups * group, out = 35;
    mf_matrix w = matrix(out, in, bits, group, 1);
    float *x = values((size_t)(rows * in), 4), *y = malloc((size_t)(rows * out) * 4), *t = malloc((size_t)(2 * in) * 4);
    const int32_t ids[2] = {34, 0};
    const int bad = mf_linear(&w, 1, x, rows, &y) || mf_table_rows(&w, ids, 2, t);
    note(y, rows * out);
    note(t, 2 * in);
    release(w);
    free(x);
    free(y);
    free(t);
    return bad;
}

static int experts(int32_t bits, int32_t group) {
    const int64_t width = 3 * group, inner = 2 * group, rows = 4, choices = 2;
    mf_matrix w[3] = {matrix(inner, width, bits, group, 3), matrix(inner, width, bits, group, 3),
                      matrix(width, inner, bits, group, 3)};
    const int32_t slots[8] = {2, 0, 1, 1, 0, 2, 2, 0};
    float *x = values((size_t)(rows * width), 5), *y = malloc((size_t)(rows * choices * width) * 4);
    float *weights = values((size_t)(rows * choices), 6), *sum = malloc((size_t)(rows * width) * 4);
    const int bad = mf_experts(w, NULL, x, slots, rows, choices, MF_SILU, NULL, y) ||
                    mf_experts(w, NULL, x, slots, rows, choices, MF_GELU_TANH, weights, sum);
    note(y, rows * choices * width);
    note(sum, rows * width);
    for (int i = 0; i < 3; i++) release(w[i]);
    free(x);
    free(y);
    free(weights);
    free(sum);
    return bad;
}

/* Keys or values of `type`: of half precision the ones that are finite. */
static uint8_t *stored(size_t count, unsigned seed, int32_t type) {
    float *wide = values(count, seed);
    if (type == MF_FLOAT32) return (uint8_t *)wide;
    uint16_t *half = malloc(count * 2);
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = mf_bits_of(wide[i]);
        half[i] = (uint16_t)(type == MF_BFLOAT16 ? bits >> 16 : (bits >> 16 & 0x8000) | (bits >> 8 & 0x3fff));
    }
    free(wide);
    return (uint8_t *)half;
}

static int attention(int64_t dim, int64_t value_dim, int64_t window, int64_t ring, int32_t type) {
    const int64_t heads = 6, groups = 2, length = 5, span = 21;
    float *q = values((size_t)(heads * length * dim), 7), *out = malloc((size_t)(heads * length * value_dim) * 4);
    uint8_t *k = stored((size_t)(groups * span * dim), 8, type), *v = stored((size_t)(groups * span * value_dim), 9, type);
    const mf_attention a = {q, k, v, out, heads, groups, length, span, dim, value_dim, 19, 3, window, span * dim,
                            span * value_dim, ring ? span : 0, length * dim, dim, length * value_dim, value_dim, 0.1f, type};
    const int bad = mf_attend(&a);
    note(out, heads * length * value_dim);
    free(q);
    free(k);
    free(v);
    free(out);
    return bad;
}

/* Every operation once, on two timelines, one with padding, whose rings wrap. */
static int program(int32_t type) {
    enum { X, N, Q, K, V, TQ, TK, A, H, G, SLOTS, S, P, SG, C, IDS, W, COUNT };
    const int64_t dim = 32, heads = 4, groups = 2, width = heads * dim, half = dim / 2, rows = 6, capacity = 7;
    const int64_t widths[COUNT] = {width, width, width,     groups * dim, groups * dim, width,     groups * dim, width, width,
                                   width, 1,     width,     heads * 8,    heads * 8,    heads * 8, 3,            3};
    mf_matrix w[6] = {matrix(width, width, 4, 32, 1),        matrix(groups * dim, width, 4, 32, 1),
                      matrix(groups * dim, width, 4, 32, 1), matrix(width, width, 4, 64, 1),
                      matrix(width, width, 4, 64, 1),        matrix(width, width, 4, 64, 1)};
    float *weight = values((size_t)width, 13), *frequencies = values((size_t)half, 14), *x = values((size_t)(rows * width), 15);
    const float eps = 1e-6f, wide = (float)width;
    const mf_op ops[] = {
        {.code = MF_OP_NORM, .kind = MF_FLOAT32, .in = X, .out = N, .dim = width, .count = 1, .f = wide, .g = eps, .weight = weight},
        {.code = MF_OP_LINEAR, .in = N, .out = Q, .count = 3, .matrices = w},
        {.code = MF_OP_ROTATE, .in = Q, .out = TQ, .dim = dim, .count = heads, .extra = half, .weight = frequencies},
        {.code = MF_OP_ROTATE, .in = K, .out = TK, .dim = dim, .count = groups, .extra = half - 3, .weight = frequencies},
        {.code = MF_OP_ATTEND, .in = TQ, .in2 = TK, .in3 = V, .out = A, .dim = dim, .count = heads, .groups = groups,
         .extra = dim, .window = 4, .f = 0.1f},
        {.code = MF_OP_ADD, .in = A, .in2 = X, .out = H},
        {.code = MF_OP_GATED, .kind = MF_SILU, .in = H, .in2 = SLOTS, .out = G, .matrices = w + 3},
        {.code = MF_OP_SCALE, .kind = MF_FLOAT32, .in = G, .out = S, .dim = width, .f = 1e-6f, .weight = weight},
        {.code = MF_OP_PART, .in = S, .out = P, .dim = 8, .count = heads, .extra = 5},
        {.code = MF_OP_ACTIVATE, .kind = MF_SIGMOID, .in = P, .in2 = P, .out = SG},
        {.code = MF_OP_MULTIPLY, .in = SG, .in2 = P, .out = P},
        {.code = MF_OP_ACTIVATE, .kind = MF_CAP, .in = P, .out = C, .f = 3.0f},
        {.code = MF_OP_CHOOSE, .kind = MF_SOFTMAX | MF_RENORMALISE, .in = C, .out = IDS, .dim = heads * 8, .count = 3,
         .weight = weight}};
    int64_t offsets[COUNT], floats = 0;
    for (int r = 0; r < COUNT; r++) {
        offsets[r] = floats;
        floats += mf_round_up(widths[r], MF_LANES);
    }
    offsets[X] = -1;
    offsets[C] = -2;
    offsets[W] = -3;
    float *capped = malloc((size_t)(rows * heads * 8) * 4), *weights = malloc((size_t)rows * 3 * 4);
    float *const arrays[3] = {x, capped, weights};
    const size_t held = (size_t)(groups * capacity * dim);
    mf_timeline lines[2];
    for (int b = 0; b < 2; b++)
        lines[b] = (mf_timeline){stored(held, 16, type), stored(held, 17, type), capacity * dim, capacity * dim, capacity, 5 + b,
                                 3 - b, type};
    const int32_t positions[6] = {5, 6, 7, 6, 7, 8};
    const mf_program p = {ops, widths, offsets, sizeof ops / sizeof *ops, COUNT, floats};
    const int bad = mf_run(&p, rows, 2, arrays, positions, lines);
    note(capped, 5 * heads * 8); /* the last row is padding */
    note(weights, 5 * 3);
    for (int b = 0; b < 2; b++) {
        note((const float *)(const void *)lines[b].k, groups * capacity * dim * (type == MF_FLOAT32 ? 2 : 1) / 2);
        free(lines[b].k);
        free(lines[b].v);
    }
    for (int i = 0; i < 6; i++) release(w[i]);
    free(weight);
    free(frequencies);
    free(x);
    free(capped);
    free(weights);
    return bad;
}

static int norms_and_turns(int64_t dim, int64_t length) {
    const int64_t heads = 3, count = heads * length * dim;
    float *x = values((size_t)count, 10), *y = malloc((size_t)count * 4), *w = values((size_t)dim, 11);
    float *frequencies = values((size_t)dim / 2, 12);
    int32_t *positions = malloc((size_t)length * 4);
    for (int64_t i = 0; i < length; i++) positions[i] = (int32_t)(i * i * 9973);
    int bad = mf_norm(x, (const uint8_t *)w, MF_FLOAT32, heads * length, dim, (float)dim, 1e-6f, y);
    note(y, count);
    bad |= mf_norm(x, NULL, 0, heads * length, dim, 1.0f, 1e-6f, y);
    note(y, count);
    bad |= mf_rope(x, positions, frequencies, 1, heads, length, dim, dim / 2 - 1, y);
    note(y, count);
    free(x);
    free(y);
    free(w);
    free(frequencies);
    free(positions);
    return bad;
}

int main(void) {
    const int32_t bits[] = {2, 4, 8}, groups[] = {32, 64, 128};
    int bad = 0;
    mf_set_threads(3);
    for (int v = 0; mf_variant_name(v); v++) {
        if (!*mf_variant_name(v)) continue;
        bad |= mf_choose(mf_variant_name(v));
        digest = 14695981039346656037u;
        for (int i = 0; i < 9; i++) {
            bad |= products(bits[i / 3], groups[i % 3], 5, 3) | products(bits[i / 3], groups[i % 3], 34, 1);
            bad |= products(bits[i / 3], groups[i % 3], 1, 9) | experts(bits[i / 3], groups[i % 3]);
        }
        for (int ring = 0; ring < 2; ring++)
            for (int64_t window = 0; window < 8; window += 7)
                for (int32_t type = MF_BFLOAT16; type <= MF_FLOAT16; type++)
                    bad |= attention(64, 64, window, ring, type) | attention(20, 36, window, ring, type) |
                           attention(7, 80, window, ring, type);
        bad |= program(MF_BFLOAT16) | program(MF_FLOAT32) | program(MF_FLOAT16);
        bad |= norms_and_turns(50, 5) | norms_and_turns(64, 40);
        printf("%s %016llx\n", mf_variant_name(v), (unsigned long long)digest);
    }
    return bad;
}
