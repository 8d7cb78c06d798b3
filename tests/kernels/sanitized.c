/* Runs every entry point on arrays that end where the heap's guard begins; built with sanitizers by test_compile.py. */
#include <stdio.h>
#include <stdlib.h>

#include "mference.h"

int mf_set_threads(int threads);
int mf_choose(const char *name);
int mf_linear(const mf_matrix *w, int64_t count, const float *x, int64_t rows, float *const *y);
int mf_table_rows(const mf_matrix *w, const int32_t *ids, int64_t count, float *y);
int mf_experts(const mf_matrix *w, const void *const *table, const float *x, const int32_t *slots, int64_t rows,
               int64_t choices, int32_t activation, const float *weights, float *y);
int mf_attend(const mf_attention *a);

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

static int products(int32_t bits, int32_t group) {
    const int64_t in = 5 * group, out = 35, rows = 3;
    mf_matrix w = matrix(out, in, bits, group, 1);
    float *x = values((size_t)(rows * in), 4), *y = malloc((size_t)(rows * out) * 4), *t = malloc((size_t)(2 * in) * 4);
    const int32_t ids[2] = {34, 0};
    const int bad = mf_linear(&w, 1, x, rows, &y) || mf_table_rows(&w, ids, 2, t);
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
    for (int i = 0; i < 3; i++) release(w[i]);
    free(x);
    free(y);
    free(weights);
    free(sum);
    return bad;
}

static int attention(int64_t dim, int64_t value_dim, int64_t window) {
    const int64_t heads = 6, groups = 2, length = 5, span = 21;
    float *q = values((size_t)(heads * length * dim), 7), *k = values((size_t)(groups * span * dim), 8);
    float *v = values((size_t)(groups * span * value_dim), 9), *out = malloc((size_t)(heads * length * value_dim) * 4);
    const mf_attention a = {q, k, v, out, heads, groups, length, span, dim, value_dim, 19, 3, window, span * dim,
                            span * value_dim, 0.1f};
    const int bad = mf_attend(&a);
    free(q);
    free(k);
    free(v);
    free(out);
    return bad;
}

int main(void) {
    const int32_t bits[] = {2, 4, 8}, groups[] = {32, 64, 128};
    int bad = mf_choose("portable"), done = 0;
    mf_set_threads(3);
    for (int i = 0; i < 9; i++, done += 2) bad |= products(bits[i / 3], groups[i % 3]) | experts(bits[i / 3], groups[i % 3]);
    for (int64_t window = 0; window < 8; window += 7, done += 3)
        bad |= attention(64, 64, window) | attention(20, 36, window) | attention(7, 80, window);
    printf("checked %d\n", done);
    return bad;
}
