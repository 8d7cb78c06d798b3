/* 64-bit Arm with signed byte dot products. Four groups at a time: one vector register holds their integer dots, in order. */
#include "mference.h"
#if defined(MF_ARM)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

#include "attention_body.h"

#if defined(__clang__)
#define MF_NEON_TARGET __attribute__((target("dotprod")))
#else
#define MF_NEON_TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define MF_NEON MF_NEON_TARGET MF_INLINE
#define FOUR 4
#define AHEAD 1024 /* bytes */

static int supported(void) {
#if defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1; /* asimddp */
#else
    return 1; /* every Apple processor of this architecture that runs a supported system */
#endif
}

typedef struct {
    int32x4_t upper, lower;
} two;

/* Add the dots of 16 code bytes with words and low bytes; for 8 bits, code - 128 is multiplied and 128 added back. */
MF_NEON two dot16(two sums, uint8x16_t code, const uint8_t *input, const mf_layout *l, int64_t at, const int bits) {
    int32x4_t high = vdupq_n_s32(0);
    for (int s = 0; s < 8 / bits; s++) {
        const int8_t *plane = (const int8_t *)input + s * l->plane + at;
        const int8x16_t h = vld1q_s8(plane + l->high), m = vld1q_s8(plane + l->middle), n = vld1q_s8(plane + l->low);
        int8x16_t c;
        if (bits == 8) {
            const int8x16_t half = vdupq_n_s8(64);
            c = vreinterpretq_s8_u8(veorq_u8(code, vdupq_n_u8(128)));
            high = vdotq_s32(vdotq_s32(high, h, half), h, half);
            sums.upper = vdotq_s32(vdotq_s32(sums.upper, m, half), m, half);
            sums.lower = vdotq_s32(vdotq_s32(sums.lower, n, half), n, half);
        } else {
            const uint8x16_t mask = vdupq_n_u8((uint8_t)((1 << bits) - 1));
            c = vreinterpretq_s8_u8(vandq_u8(vshlq_u8(code, vdupq_n_s8((int8_t)(-bits * s))), mask));
        }
        high = vdotq_s32(high, c, h);
        sums.upper = vdotq_s32(sums.upper, c, m);
        sums.lower = vdotq_s32(sums.lower, c, n);
    }
    sums.upper = vaddq_s32(sums.upper, vshlq_n_s32(high, 8));
    return sums;
}

MF_NEON float32x4_t companions(const uint8_t *row, int32_t type, int64_t g, int64_t here) {
    float value[FOUR] = {0};
    for (int64_t i = 0; i < here; i++) value[i] = mf_companion(row, type, g + i);
    return vld1q_f32(value);
}

/* Four groups (or the `here` that are left) from group g of one row of codes, added to lanes of `count` rows. */
MF_NEON void four(const uint8_t *codes, const uint8_t *scales, const uint8_t *biases, int32_t type, const mf_layout *l,
                  const uint8_t *const *inputs, int64_t g, int64_t here, const int bits, const int words,
                  const int count, float32x4_t *lanes) {
    const two none = {vdupq_n_s32(0), vdupq_n_s32(0)};
    const float32x4_t scale = companions(scales, type, g, here), bias = companions(biases, type, g, here);
    two sums[4][FOUR];
    for (int m = 0; m < count; m++)
        for (int i = 0; i < FOUR; i++) sums[m][i] = none;
    const int bytes = words < FOUR ? 16 : words * 4, each = words < FOUR ? 2 : 1; /* groups of one vector */
    for (int64_t i = 0; i < here; i += each) {
        for (int b = 0; b < bytes; b += 16) {
            const int64_t at = (g + i) * words * 4 + b;
            uint8x16_t code;
            if (at + 16 <= l->row_bytes)
                code = vld1q_u8(codes + at);
            else
                code = vcombine_u8(vld1_u8(codes + at), vdup_n_u8(0));
            __builtin_prefetch(codes + at + AHEAD);
            for (int m = 0; m < count; m++)
                sums[m][i / each] = dot16(sums[m][i / each], code, inputs[m], l, at, bits);
        }
    }
    for (int m = 0; m < count; m++) {
        int32x4_t upper = vpaddq_s32(sums[m][0].upper, sums[m][1].upper);
        int32x4_t lower = vpaddq_s32(sums[m][0].lower, sums[m][1].lower);
        if (each == 1) {
            upper = vpaddq_s32(upper, vpaddq_s32(sums[m][2].upper, sums[m][3].upper));
            lower = vpaddq_s32(lower, vpaddq_s32(sums[m][2].lower, sums[m][3].lower));
        }
        const float32x4_t coarse = vmulq_f32(vcvtq_f32_s32(upper), vdupq_n_f32(256.0f));
        const float32x4_t dot = vaddq_f32(coarse, vcvtq_f32_s32(lower));
        const float32x4_t unit = vmulq_f32(scale, vld1q_f32((const float *)(inputs[m] + l->step) + g));
        const float32x4_t shift = vmulq_f32(bias, vld1q_f32((const float *)(inputs[m] + l->sum) + g));
        lanes[m] = vaddq_f32(lanes[m], vaddq_f32(vmulq_f32(dot, unit), shift));
    }
}

MF_NEON float tree(const float32x4_t *lanes) {
    const float32x4_t b = vaddq_f32(vaddq_f32(lanes[0], lanes[2]), vaddq_f32(lanes[1], lanes[3]));
    const float32x2_t c = vadd_f32(vget_low_f32(b), vget_high_f32(b));
    return vget_lane_f32(c, 0) + vget_lane_f32(c, 1);
}

MF_NEON void rows_of(const mf_matrix *w, const mf_layout *l, const uint8_t *const *inputs, float *const *outputs,
                     int64_t first, int64_t last, const int bits, const int words, const int count) {
    const int64_t companion = l->groups * mf_companion_bytes(w->companions);
    for (int64_t n = first; n < last; n++) {
        const uint8_t *codes = w->codes + n * l->row_bytes;
        const uint8_t *scales = w->scales + n * companion, *biases = w->biases + n * companion;
        float32x4_t lanes[FOUR][4]; /* [quarter of the 16 accumulators][row] */
        for (int i = 0; i < FOUR; i++)
            for (int m = 0; m < count; m++) lanes[i][m] = vdupq_n_f32(0.0f);
        int64_t g = 0;
        for (; g + FOUR <= l->groups; g += FOUR)
            four(codes, scales, biases, w->companions, l, inputs, g, FOUR, bits, words, count, lanes[g / FOUR % FOUR]);
        if (g < l->groups)
            four(codes, scales, biases, w->companions, l, inputs, g, l->groups - g, bits, words, count,
                 lanes[g / FOUR % FOUR]);
        for (int m = 0; m < count; m++) {
            const float32x4_t all[FOUR] = {lanes[0][m], lanes[1][m], lanes[2][m], lanes[3][m]};
            outputs[m][n - first] = tree(all);
        }
    }
}

MF_NEON void rows(const mf_matrix *w, const mf_layout *l, const mf_rows *r, int64_t first, int64_t last, const int bits,
                  const int words) {
    int64_t m = 0;
    for (; m + 4 <= r->count; m += 4) rows_of(w, l, r->inputs + m, r->outputs + m, first, last, bits, words, 4);
    for (; m < r->count; m++) rows_of(w, l, r->inputs + m, r->outputs + m, first, last, bits, words, 1);
}

MF_NEON_TARGET static void block(const mf_matrix *w, const mf_layout *l, const mf_rows *r, int64_t first, int64_t last) {
    switch (l->bits * 1000 + l->group) {
        case 2032: rows(w, l, r, first, last, 2, 2); break;
        case 2064: rows(w, l, r, first, last, 2, 4); break;
        case 2128: rows(w, l, r, first, last, 2, 8); break;
        case 4032: rows(w, l, r, first, last, 4, 4); break;
        case 4064: rows(w, l, r, first, last, 4, 8); break;
        case 4128: rows(w, l, r, first, last, 4, 16); break;
        case 8032: rows(w, l, r, first, last, 8, 8); break;
        case 8064: rows(w, l, r, first, last, 8, 16); break;
        default: rows(w, l, r, first, last, 8, 32); break;
    }
}

static void product(const mf_matrix *w, const mf_layout *l, const mf_rows *r, int64_t first, int64_t last) {
    mf_by_blocks(block, w, l, r, first, last);
}

static void prepare(const float *x, const mf_layout *layout, uint8_t *row) { mf_prepare_body(x, layout, row, 0); }

static void activate(int32_t kind, const float *gate, const float *up, float *out, int64_t count) {
    mf_activate_body(kind, gate, up, out, count);
}

static void attend(const mf_attention *call, int64_t group, int64_t first, int64_t last, float *scratch) {
    mf_attend_body(call, group, first, last, scratch);
}

const mf_variant mf_neon = {"neon", supported, prepare, product, activate, attend};
#endif
