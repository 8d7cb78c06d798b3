/* Scratch memory and work sizes of the entry points. */
#ifndef MF_WORK_H
#define MF_WORK_H

#include "mference.h"

#define MF_MATRICES 8     /* most matrices of one call */
#define MF_CHUNK 128      /* most outputs of one item of work */
#define CHUNK_BYTES 49152 /* codes of one item: small enough to share out evenly, large enough to stream */
#define MANY_ROWS 4       /* from here on an item's set-up is worth sharing among more outputs */

typedef struct {
    const float *x;
    const mf_layout *layout;
    uint8_t *inputs;
} mf_preparing;

typedef struct {
    const mf_attention *call;
    float *scratch;
    int64_t each; /* pairs of one item */
} mf_attending;

int mf_lay_out(const mf_matrix *w, mf_layout *layout);
/* Outputs of one item of work: a panel or more, enough bytes to stream, and some items for every thread. */
int64_t mf_chunk(const mf_layout *layout, int64_t rows, int64_t outputs);
void mf_prepare_all(const float *x, int64_t rows, const mf_layout *layout, uint8_t *inputs);

/* At least `bytes` of scratch, aligned to 64, kept for later calls; NULL if there is no memory. Inside the pool only. */
uint8_t *mf_arena(int64_t bytes);
uint8_t *mf_registers(int64_t bytes); /* a second one, that no entry point below uses */

/* The entry points of the same names, for callers that hold the pool. */
int mf_linear_all(const mf_matrix *w, int64_t count, const float *x, int64_t rows, float *const *y);
int mf_experts_all(const mf_matrix *w, const void *const *table, const float *x, const int32_t *slots, int64_t rows,
                   int64_t choices, int32_t activation, const float *weights, float *y);
int mf_attend_all(const mf_attention *a);

/* task(context, first, last) over `count` units that cost `each` floats of work: at once if that is little. */
typedef void (*mf_span_task)(void *context, int64_t first, int64_t last);
void mf_spans(mf_span_task task, void *context, int64_t count, int64_t each);

/* Rows x (rows, dim) scaled to y, as mf_norm. */
void mf_norm_all(const float *x, const uint8_t *weight, int32_t type, int64_t rows, int64_t dim, float divisor, float eps,
                 float *y);
/* Heads x (rows, heads, dim) turned by each row's position, as mf_rope. */
int mf_rotate_all(const float *x, const int32_t *positions, const float *frequencies, int64_t rows, int64_t heads,
                  int64_t dim, int64_t half, float *y);

enum { MF_SOFTMAX = 1, MF_RENORMALISE = 2 }; /* weights: scores, else their softmax over all; then of unit sum or not */
int mf_choose_all(const float *scores, int64_t rows, int64_t experts, int64_t choices, int32_t rule, const float *scale,
                  int32_t *ids, float *weights);

/* Cosine and sine of `angle`, exact to float32, for angles to 2^20. */
void mf_turn(float angle, float *cosine, float *sine);

#endif
