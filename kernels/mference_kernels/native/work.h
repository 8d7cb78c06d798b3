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

#endif
