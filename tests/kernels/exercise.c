/* Runs every entry point with every variant this machine has and prints a digest of all results per variant. Arrays end
   where the heap's guard begins, for runs under sanitizers. */
#include <stdio.h>
#include <stdlib.h>

#include "mference.h"

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

static int attention(int64_t dim, int64_t value_dim, int64_t window, int64_t ring) {
    const int64_t heads = 6, groups = 2, length = 5, span = 21;
    float *q = values((size_t)(heads * length * dim), 7), *k = values((size_t)(groups * span * dim), 8);
    float *v = values((size_t)(groups * span * value_dim), 9), *out = malloc((size_t)(heads * length * value_dim) * 4);
    const mf_attention a = {q, k, v, out, heads, groups, length, span, dim, value_dim, 19, 3, window, span * dim,
                            span * value_dim, ring ? span : 0, 0.1f};
    const int bad = mf_attend(&a);
    note(out, heads * length * value_dim);
    free(q);
    free(k);
    free(v);
    free(out);
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
                bad |= attention(64, 64, window, ring) | attention(20, 36, window, ring) | attention(7, 80, window, ring);
        bad |= norms_and_turns(50, 5) | norms_and_turns(64, 40);
        printf("%s %016llx\n", mf_variant_name(v), (unsigned long long)digest);
    }
    return bad;
}
