/* A program: operations on rows, one after another in one call, over registers that hold (rows, width) float32 values. */
#ifndef MF_PROGRAM_H
#define MF_PROGRAM_H

#include "work.h"

enum {
    MF_OP_NORM,     /* out = in / sqrt(sum of squares / f + g) * weight, per `count` parts of `dim` values */
    MF_OP_LINEAR,   /* out, out + 1, ... = in times each of `count` matrices */
    MF_OP_ROTATE,   /* out = `count` heads of `dim` turned by the row's position; `weight`: frequencies of `extra` pairs */
    MF_OP_ATTEND,   /* out = attention of in over the timeline's rows, after in2 and in3 are appended as keys and values */
    MF_OP_ADD,      /* out = in + in2 */
    MF_OP_MULTIPLY, /* out = in * in2 */
    MF_OP_SCALE,    /* out = in * weight * f; `dim` weights, or one for all */
    MF_OP_GATED,    /* out = down(kind(gate(in)) * up(in)) with three matrices */
    MF_OP_ACTIVATE, /* out = kind(in) * in2, also where in has one value a row; a cap's limit is f */
    MF_OP_PART,     /* out = values first .. first + dim - 1 (`extra`: first) of `count` parts of in */
    MF_OP_CHOOSE,   /* out, out + 1 = ids (int32) and weights of the `count` best of in; `weight`: a factor per expert */
    MF_OP_EXPERTS,  /* out = sum of in through each of its `count` experts in2, times in3; register `extra`: slots */
    MF_OPS
};

typedef struct {
    int32_t code, kind;               /* kind: a companion's type, an activation, or a rule of choice */
    int32_t in, in2, in3, out;        /* registers */
    int64_t dim, count, groups, extra;
    int64_t window;
    float f, g;
    const void *weight;
    const mf_matrix *matrices;
} mf_op;

/* Rows of one timeline: position p's of head h at h * stride + p mod capacity * width values; keys and values alike. */
typedef struct {
    uint8_t *k, *v;
    int64_t k_stride, v_stride, capacity;
    int64_t start, real; /* position of the first row, and how many rows are no padding */
    int32_t type;
} mf_timeline;

/* Where a layer's experts are, as mf_experts takes them; slot_of[expert] is negative for one that is away. */
typedef struct {
    const mf_matrix *w;
    const void *const *table;
    const int32_t *slot_of;
    int64_t count;
} mf_held;

typedef struct {
    const mf_op *ops;
    const int64_t *widths;  /* values per row of each register */
    const int64_t *offsets; /* floats per row before it in scratch; -1 - n: it is the n-th array of the caller */
    int64_t count, registers, row_floats;
} mf_program;

/* One layer of a chain: rows go in as the caller's array 0 and come out as its array 1, and `ids` keeps what was chosen. */
typedef struct {
    const mf_program *program;
    const mf_timeline *timelines;
    const mf_held *experts;
    int32_t *ids;
} mf_layer;

enum { MF_AWAY = 1 }; /* an operation needs experts that are not in memory; all before it are done */

#endif
