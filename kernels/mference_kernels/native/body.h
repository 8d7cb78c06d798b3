/* Plain C bodies that every variant compiles for its own instruction set. Lane by lane the operations are the same, and
   contraction is off, so the bits are too. */
#ifndef MF_BODY_H
#define MF_BODY_H

#include "mference.h"

#define MF_ROUND 12582912.0f /* 1.5 * 2^23: adding it rounds to the nearest integer, ties to even */

/* Give `row` the integers of x: per group the smallest step of a power of two (at least 2^-126) with |x / step| rounding
   to at most 32767. A group that holds a NaN or an infinity gets NaN as step and sum. */
MF_INLINE void mf_prepare_body(const float *x, const mf_layout *l, uint8_t *row) {
    int16_t *words = (int16_t *)row;
    int8_t *high = (int8_t *)(row + l->high);
    uint8_t *low = row + l->low;
    float *step = (float *)(row + l->step), *sum = (float *)(row + l->sum);
    int32_t *carry = (int32_t *)(row + l->carry);
    const int32_t group = l->group, per_byte = l->per_byte, bytes = group / per_byte;
    for (int64_t s = 0; s < per_byte; s++)
        for (int64_t b = s * l->plane + l->row_bytes; b < (s + 1) * l->plane; b++) high[b] = 0, low[b] = 0;
    for (int64_t g = l->groups; g < mf_round_up(l->groups, MF_LANES); g++) step[g] = sum[g] = 0.0f, carry[g] = 0;
    for (int64_t g = 0; g < l->groups; g++) {
        const float *v = x + g * group;
        int32_t largest = 0;
        for (int32_t i = 0; i < group; i++) {
            int32_t bits = (int32_t)(mf_bits_of(v[i]) & 0x7fffffffu);
            largest = bits > largest ? bits : largest;
        }
        int16_t t[MF_MAX_GROUP];
        int32_t total = 0, total_low = 0;
        uint32_t exponent = (uint32_t)largest >> 23;
        if (exponent == 255) {
            for (int32_t i = 0; i < group; i++) t[i] = 0;
            step[g] = sum[g] = mf_float_of(0x7fc00000u);
        } else {
            exponent = exponent < 15 ? 15 : exponent;
            if (mf_float_of((uint32_t)largest) * mf_float_of((268 - exponent) << 23) >= 32767.5f) exponent++;
            const float inverse = mf_float_of((268 - exponent) << 23);
            for (int32_t i = 0; i < group; i++) {
                int32_t value = (int32_t)(mf_bits_of(v[i] * inverse + MF_ROUND) - 0x4b400000u);
                t[i] = (int16_t)value;
                total += value;
                total_low += value & 255;
            }
            step[g] = mf_float_of((exponent - 14) << 23);
            sum[g] = (float)total * step[g];
        }
        carry[g] = 128 * total_low;
        for (int32_t s = 0; s < per_byte; s++) {
            const int64_t at = s * l->plane + g * bytes;
            for (int32_t b = 0; b < bytes; b++) {
                int16_t value = t[b * per_byte + s];
                words[g * group + s * bytes + b] = value;
                high[at + b] = (int8_t)(value >> 8);
                low[at + b] = (uint8_t)(value & 255);
            }
        }
    }
}

/* e^z for z in [-87, 88], clamped outside; within 2 units in the last place. */
MF_INLINE float mf_exp(float z) {
    z = z < -87.0f ? -87.0f : z;
    z = z > 88.0f ? 88.0f : z;
    const float shifted = z * 1.44269504f + MF_ROUND;
    const float n = shifted - MF_ROUND;
    const float r = (z - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts, the first exact in n */
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = (p * r) * r + r;
    return mf_float_of(mf_bits_of(p + 1.0f) + ((mf_bits_of(shifted) - 0x4b400000u) << 23));
}

MF_INLINE void mf_activate_body(int32_t kind, const float *gate, const float *up, float *out, int64_t count) {
    if (kind == MF_GELU_TANH) {
        for (int64_t i = 0; i < count; i++) {
            const float x = gate[i], inner = 1.59576912f * (x + ((0.044715f * x) * x) * x);
            out[i] = (x / (1.0f + mf_exp(-inner))) * up[i];
        }
    } else {
        for (int64_t i = 0; i < count; i++) out[i] = (gate[i] / (1.0f + mf_exp(-gate[i]))) * up[i];
    }
}

#endif
