/* Runs the entry points of gated delta networks with every variant this machine has and prints a digest of all results per
   variant. Arrays end where the heap's guard begins, for runs under sanitizers. */
#include <stdio.h>
#include <stdlib.h>

#include "delta.h"

int mf_set_threads(int threads);
int mf_choose(const char *name);
const char *mf_variant_name(int index);
int mf_gated_delta(const float *q, const float *k, const float *v, const float *log_decay, const float *beta,
                   const float *from, int64_t batch, int64_t length, int64_t key_heads, int64_t value_heads,
                   int64_t key_dim, int64_t value_dim, float *out, float *to);
int mf_causal_conv(const float *x, const float *tail, const float *taps, int64_t batch, int64_t length, int64_t channels,
                   int64_t tap_count, float *y, float *new_tail);
int mf_delta_mix(const mf_delta_mixer *m);

static uint64_t digest;
static void *held[64];
static int count;

static void note(const float *y, int64_t size) {
    const uint8_t *bytes = (const uint8_t *)y;
    for (int64_t i = 0; i < 4 * size; i++) digest = (digest ^ bytes[i]) * 1099511628211u;
}

/* `size` floats from -1 to 1, or unset for seed 0; freed by `release`. */
static float *values(int64_t size, unsigned seed) {
    float *p = held[count++] = malloc((size_t)size * 4);
    for (int64_t i = 0; i < size && seed; i++) p[i] = (float)((int)((seed = seed * 1664525u + 1013904223u) >> 8) - (1 << 23)) / (1 << 23);
    return p;
}

static void release(void) {
    while (count) free(held[--count]);
}

static int rule(int64_t length, int64_t dk, int64_t dv) {
    const int64_t batch = 2, keys = 2, heads = 4;
    float *out = values(batch * length * heads * dv, 0), *to = values(batch * heads * dk * dv, 0);
    float *decay = values(batch * length * heads, 4);
    for (int64_t i = 0; i < batch * length * heads; i++) decay[i] -= 1.0f;
    const int bad = mf_gated_delta(values(batch * length * keys * dk, 1), values(batch * length * keys * dk, 2),
                                   values(batch * length * heads * dv, 3), decay, values(batch * length * heads, 5),
                                   values(batch * heads * dk * dv, 6), batch, length, keys, heads, dk, dv, out, to);
    note(out, batch * length * heads * dv);
    note(to, batch * heads * dk * dv);
    release();
    return bad;
}

static int convolution(int64_t length, int64_t channels, int64_t taps) {
    float *y = values(2 * length * channels, 0), *tail = values(2 * (taps - 1) * channels, 0);
    const int bad = mf_causal_conv(values(2 * length * channels, 1), values(2 * (taps - 1) * channels, 2),
                                   values(taps * channels, 3), 2, length, channels, taps, y, tail);
    note(y, 2 * length * channels);
    note(tail, 2 * (taps - 1) * channels);
    release();
    return bad;
}

static int mixer(int64_t length, int64_t dk, int64_t dv) {
    const int64_t keys = 2, heads = 4, channels = 2 * keys * dk + heads * dv, taps = 4;
    const int32_t lengths[2] = {(int32_t)length, (int32_t)(length + 1) / 2};
    const float *tails[2] = {values(3 * channels, 1), values(3 * channels, 2)};
    const float *states[2] = {values(heads * dk * dv, 3), values(heads * dk * dv, 4)};
    float *new_tails[2] = {values(3 * channels, 0), values(3 * channels, 0)};
    float *new_states[2] = {values(heads * dk * dv, 0), values(heads * dk * dv, 0)};
    const mf_delta_mixer m = {values(2 * length * channels, 5), values(2 * length * heads * dv, 6),
                              values(2 * length * heads, 7), values(2 * length * heads, 8), lengths, tails, new_tails,
                              states, new_states, values(taps * channels, 9), values(heads, 10), values(heads, 11),
                              values(dv, 12), values(2 * length * heads * dv, 0), 2, length, taps, keys, heads, dk, dv,
                              0.25f, 1e-6f, 1e-6f};
    const int bad = mf_delta_mix(&m);
    note(m.y, 2 * length * heads * dv);
    for (int b = 0; b < 2; b++) {
        note(new_tails[b], 3 * channels);
        note(new_states[b], heads * dk * dv);
    }
    release();
    return bad;
}

static int everything(void) {
    int bad = 0;
    for (int64_t length = 1; length <= 5; length += 2)
        bad |= rule(length, 16, 16) | rule(length, 5, 7) | rule(length, 24, 40) | mixer(length, 16, 32) | mixer(length, 5, 9);
    return bad | mixer(131, 8, 33) | convolution(1, 9, 4) | convolution(5, 16, 2) | convolution(2, 3, 8);
}

int main(void) {
    const char *name;
    mf_set_threads(2);
    for (int i = 0; (name = mf_variant_name(i)); i++) {
        if (!*name || mf_choose(name)) continue;
        digest = 14695981039346656037u;
        if (everything()) return 1;
        printf("%s %016llx\n", name, (unsigned long long)digest);
    }
    return 0;
}
