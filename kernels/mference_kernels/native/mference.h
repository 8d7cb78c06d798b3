/* What the parts of the library share. The numeric contract is docs/numerics.md; every variant gives its exact bits. */
#ifndef MFERENCE_H
#define MFERENCE_H

#include <stdint.h>
#include <string.h>

#define MF_LANES 16      /* float32 accumulators of one output; group g goes to accumulator g mod 16 */
#define MF_MAX_GROUP 128 /* most inputs that share a scale */
#define MF_PAD 64        /* bytes a vector load may reach past the last value it needs */

#if defined(__GNUC__)
#define MF_INLINE static inline __attribute__((always_inline))
#define MF_EXPORT __attribute__((visibility("default")))
#define MF_HIDE(x) __asm__("" : "+r"(x)) /* keeps a loop of a known number of turns from being written out */
#else
#error "GCC or Clang is required"
#endif

#if defined(__x86_64__) && !defined(MF_PORTABLE_ONLY)
#define MF_X86
#elif defined(__aarch64__) && !defined(MF_PORTABLE_ONLY)
#define MF_ARM
#endif

enum { MF_OK = 0, MF_BAD_SLOT = -1, MF_NO_MEMORY = -2, MF_BAD_SHAPE = -3 };
enum { MF_BFLOAT16 = 0, MF_FLOAT32 = 1, MF_FLOAT16 = 2 };
enum { MF_GELU_TANH = 0, MF_SILU = 1, MF_SIGMOID = 2, MF_CAP = 3 }; /* the first two are those of routed blocks */

/* A matrix [out, in] of packed codes, rows one after another; w = code * scale + bias per `group` inputs.
   No alignment is assumed: rows may lie in a mapped file. */
typedef struct {
    const uint8_t *codes, *scales, *biases;
    int64_t out, in;
    int32_t bits, group, companions; /* companions: type of scales and biases */
    int32_t slots;                   /* matrices stacked at `codes`, `scales`, `biases` */
} mf_matrix;

/* Where the parts of one prepared row lie, in bytes from its start. Code byte b of a row holds the codes of inputs
   per_byte * b + s, s = 0 .. per_byte - 1; plane s holds those inputs' digits, in the order of b. An input's integer is
   65536 * high + 256 * middle + low = 256 * word + low, each digit from -128 to 127. */
typedef struct {
    int64_t in, groups, row_bytes; /* inputs, groups and code bytes of a row */
    int64_t plane;                 /* bytes from one plane to the next */
    int64_t high, middle, low;     /* planes of int8 */
    int64_t step, sum;             /* per group, float32: the integers' unit, the sum of the values */
    int64_t bytes;                 /* of the whole prepared row, a multiple of 64 */
    int32_t bits, group, per_byte;
} mf_layout; /* the words, int16, come first: per group its part of each plane, plane after plane */

/* Rows of a product: prepared inputs and where each row's outputs go. */
typedef struct {
    const uint8_t *const *inputs;
    float *const *outputs;
    int64_t count;
} mf_rows;

/* One attention call: float32 rows of q (H, L, D) and out (H, L, E), keys (G, S, D) and values (G, S, E) of `type`. */
typedef struct {
    const float *q;
    const uint8_t *k, *v;
    float *out;
    int64_t heads, groups, length, span, dim, value_dim;
    int64_t query_start, key_start, window;     /* token positions; window 0 sees everything before */
    int64_t k_stride, v_stride;                 /* values from one head's keys or values to the next */
    int64_t ring;                               /* rows of a ring: position p lies in row p mod ring; 0: row p - key_start */
    int64_t q_head, q_row, out_head, out_row;   /* floats from one head or row to the next */
    float scale;
    int32_t type; /* of keys and values */
} mf_attention;

typedef struct {
    const char *name;
    int (*supported)(void);
    void (*prepare)(const float *x, const mf_layout *layout, uint8_t *row);
    /* Outputs first .. last - 1 of each row, written to outputs[row][0 ..]. */
    void (*product)(const mf_matrix *w, const mf_layout *layout, const mf_rows *rows, int64_t first, int64_t last);
    void (*activate)(int32_t kind, const float *gate, const float *up, float *out, int64_t count);
    /* Pairs first .. last - 1 of one group, pair = query * heads_per_group + head; `scratch` holds
       mf_scratch_floats(call) floats. */
    void (*attend)(const mf_attention *call, int64_t group, int64_t first, int64_t last, float *scratch);
} mf_variant;

extern const mf_variant mf_portable;
#if defined(MF_X86)
extern const mf_variant mf_avx2, mf_avx512, mf_amx;
#elif defined(MF_ARM)
extern const mf_variant mf_neon;
#endif

extern const mf_variant *mf_active; /* the variant in use */

/* Pool: calls task(context, item, worker) for item = 0 .. items - 1 on all threads and returns when every call has;
   `worker` is below mf_pool_threads() and no two running calls share it. Only between enter and leave. */
typedef void (*mf_task)(void *context, int64_t item, int worker);
void mf_pool_enter(void);
void mf_pool_leave(void);
void mf_pool_run(mf_task task, void *context, int64_t items);
int mf_pool_threads(void);

#define MF_TILE 64 /* most rows of one product */

MF_INLINE int64_t mf_round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
MF_INLINE int64_t mf_least(int64_t a, int64_t b) { return a < b ? a : b; }
MF_INLINE int64_t mf_most(int64_t a, int64_t b) { return a > b ? a : b; }

MF_INLINE uint32_t mf_bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

MF_INLINE float mf_float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The value of an IEEE half-precision number, exactly; no branches, so that loops of it are vector code. */
MF_INLINE float mf_half(uint32_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    const uint32_t tiny = mf_bits_of((float)(int32_t)rest * 0x1p-24f);
    const uint32_t wide = (rest << 13) + (rest < 0x7c00u ? 112u << 23 : 224u << 23);
    return mf_float_of(sign | (rest < 0x400u ? tiny : wide));
}

/* The companion of group g of a row that starts at `row`. */
MF_INLINE float mf_companion(const uint8_t *row, int32_t type, int64_t g) {
    if (type == MF_FLOAT32) {
        float value;
        memcpy(&value, row + 4 * g, 4);
        return value;
    }
    uint16_t half;
    memcpy(&half, row + 2 * g, 2);
    return type == MF_FLOAT16 ? mf_half(half) : mf_float_of((uint32_t)half << 16);
}

MF_INLINE int64_t mf_companion_bytes(int32_t type) { return type == MF_FLOAT32 ? 4 : 2; }

typedef void (*mf_product)(const mf_matrix *w, const mf_layout *layout, const mf_rows *rows, int64_t first, int64_t last);

/* Take outputs a few at a time, so that their codes stay near while all rows meet them. */
MF_INLINE void mf_by_blocks(mf_product product, const mf_matrix *w, const mf_layout *l, const mf_rows *rows,
                            int64_t first, int64_t last) {
    const int64_t few = rows->count < 4 ? last - first : 16384 / l->row_bytes + 1;
    float *outputs[MF_TILE];
    for (int64_t n = first; n < last; n += few) {
        for (int64_t r = 0; r < rows->count; r++) outputs[r] = rows->outputs[r] + n - first;
        const mf_rows here = {rows->inputs, outputs, rows->count};
        product(w, l, &here, n, n + few < last ? n + few : last);
    }
}

#define MF_PAIRS 16      /* most (query, head) pairs of one call of `attend` */
#define MF_BLOCK 64      /* keys that all pairs meet before the next are read */
#define MF_HALF_BLOCK 16 /* the same where keys are widened first */

MF_INLINE int64_t mf_scratch_floats(const mf_attention *a) {
    const int64_t widened = a->type == MF_FLOAT32 ? 0 : MF_HALF_BLOCK * mf_round_up(mf_most(a->dim, a->value_dim), 2 * MF_LANES);
    return MF_PAIRS * (mf_round_up(a->dim, MF_LANES) + mf_round_up(a->span, MF_LANES) + 2 * MF_LANES) + widened;
}

/* Sum of the 16 accumulators of an output, in the contract's order: halves, quarters, eighths, pair. */
MF_INLINE float mf_tree(const float *lane) {
    float a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) a[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; i++) b[i] = a[i] + a[i + 4];
    for (int i = 0; i < 2; i++) c[i] = b[i] + b[i + 2];
    return c[0] + c[1];
}

#endif
