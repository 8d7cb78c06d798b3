/* Gated delta networks: a short convolution over positions, then a state per head that decays and learns by key. */
#ifndef MF_DELTA_H
#define MF_DELTA_H

#include "work.h"

#define MF_DELTA_TAPS 8 /* most taps of a convolution */
#define MF_DELTA_COLUMNS 32 /* columns of a state that one item of work takes */
#define MF_DELTA_TOKENS 64  /* tokens whose queries, keys and values are prepared together: bounds scratch, changes no bit */

/* Rows of one value head: token t's are `stride` floats after token t - 1's. */
typedef struct {
    const float *q, *k, *v, *decay, *beta; /* decay: what the state keeps, e^g */
    float *out;
    const float *from; /* state before the first token, (key_dim, value_dim) */
    float *to;         /* and after the last; may be `from` */
    int64_t q_stride, k_stride, v_stride, rate_stride, out_stride;
    int64_t length, key_dim, value_dim;
} mf_delta_head;

/* One call of a whole mixer. Arrays (batch, length, ...) are padded to `length`; timeline b has lengths[b] tokens.
   Rows of a token: qkv, queries, keys and values of all heads; a, b one value per value head; z and y value_heads * value_dim. */
typedef struct {
    const float *qkv, *z, *a, *b;
    const int32_t *lengths;
    const float *const *tails; /* per timeline (taps - 1, channels) */
    float *const *new_tails;
    const float *const *states; /* per timeline (value_heads, key_dim, value_dim) */
    float *const *new_states;
    const float *taps; /* (taps, channels), the oldest first */
    const float *log_rate, *dt_bias, *norm;
    float *y;
    int64_t batch, length, tap_count, key_heads, value_heads, key_dim, value_dim;
    float q_scale, unit_eps, norm_eps;
} mf_delta_mixer;

/* Where one key head's part of one token lies in scratch, and the tokens of an item. */
typedef struct {
    const mf_delta_mixer *call;
    float *rows, *decay, *beta; /* (batch, MF_DELTA_TOKENS, channels), twice (batch, MF_DELTA_TOKENS, value_heads) */
    int64_t start;              /* first token of the segment */
} mf_delta_segment;

typedef struct {
    /* Columns first .. first + count - 1 of a head; `scratch` holds key_dim * MF_DELTA_COLUMNS floats, aligned to 64. */
    void (*advance)(const mf_delta_head *head, int64_t first, int64_t count, float *scratch);
    /* Channels first .. first + count - 1 of token t: out = sum of rows[tap] * taps[tap]; then SiLU if `activate`. */
    void (*convolve)(const float *const *rows, const float *taps, int64_t tap_count, int64_t channels, int64_t first,
                     int64_t count, int activate, float *out);
    /* Query, key and values of token t, timeline b, that key head `head` serves, and their rates. */
    void (*prepare)(const mf_delta_segment *s, int64_t b, int64_t t, int64_t head);
    /* The gated norm of the outputs of the same heads, in place. */
    void (*finish)(const mf_delta_segment *s, int64_t b, int64_t t, int64_t head);
    void (*exponentials)(const float *x, float *y, int64_t count);
} mf_delta_variant;

#endif
