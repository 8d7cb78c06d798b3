/* Plain C bodies that every variant compiles for its own instruction set. Lane by lane the operations are the same, and
   contraction is off, so the bits are too. */
#ifndef MF_BODY_H
#define MF_BODY_H

#include "mference.h"

#define MF_ROUND 12582912.0f /* 1.5 * 2^23: adding it rounds to the nearest integer, ties to even */

#define MF_LARGEST 8355711   /* of a group's integers: 65536 * 127 + 256 * 127 + 127 */
#define MF_UNITS 8388608.0f  /* 2^23: adding it, with the value's sign, rounds to the nearest integer, ties to even */

/* The parts of a prepared row. */
typedef struct {
    int16_t *word;
    int8_t *high, *middle, *low;
    float *step, *sum;
} mf_parts;

/* Integers of one group of x into t: value / step, rounded to nearest, for the smallest step of a power of two (at least
   2^-126) that keeps them within MF_LARGEST. Returns the step, or NaN and zeros if a value is not finite. */
MF_INLINE float mf_integers(const float *x, const int32_t group, int32_t *t) {
    int32_t largest = 0;
    for (int32_t i = 0; i < group; i++) {
        const int32_t bits = (int32_t)(mf_bits_of(x[i]) & 0x7fffffffu);
        largest = bits > largest ? bits : largest;
    }
    uint32_t exponent = (uint32_t)largest >> 23;
    if (exponent == 255) {
        for (int32_t i = 0; i < group; i++) t[i] = 0;
        return mf_float_of(0x7fc00000u);
    }
    exponent = exponent < 23 ? 23 : exponent;
    if (mf_float_of((uint32_t)largest) * mf_float_of((276 - exponent) << 23) >= MF_LARGEST + 0.5f) exponent++;
    const float inverse = mf_float_of((276 - exponent) << 23);
    for (int32_t i = 0; i < group; i++) {
        const float value = x[i] * inverse, units = value < 0.0f ? -MF_UNITS : MF_UNITS;
        t[i] = (int32_t)((value + units) - units);
    }
    return mf_float_of((exponent - 22) << 23);
}

/* Prepare row x of a product; `grouped` leaves the planes out and puts
   low digits, int16, in the order of words at `high`. */
MF_INLINE void mf_prepare_body(const float *x, const mf_layout *l, uint8_t *row, const int grouped) {
    const mf_parts to = {(int16_t *)row,           (int8_t *)(row + l->high),  (int8_t *)(row + l->middle),
                         (int8_t *)(row + l->low), (float *)(row + l->step), (float *)(row + l->sum)};
    const int32_t group = l->group, per_byte = l->per_byte, bytes = group / per_byte;
    int16_t *fine = (int16_t *)to.high;
    for (int64_t s = 0; s < per_byte && !grouped; s++)
        for (int64_t b = s * l->plane + l->row_bytes; b < (s + 1) * l->plane; b++)
            to.high[b] = to.middle[b] = to.low[b] = 0;
    for (int64_t g = l->groups; g < mf_round_up(l->groups, MF_LANES); g++) to.step[g] = to.sum[g] = 0.0f;
    for (int64_t g = 0; g < l->groups; g++) {
        int32_t t[MF_MAX_GROUP], total = 0;
        to.step[g] = mf_integers(x + g * group, group, t);
        for (int32_t i = 0; i < group; i++) total += t[i];
        to.sum[g] = (float)total * to.step[g];
        for (int32_t s = 0; s < per_byte; s++) {
            const int64_t at = s * l->plane + g * bytes;
            for (int32_t b = 0; b < bytes; b++) {
                const int32_t value = t[b * per_byte + s], word = (value + 128) >> 8, high = (word + 128) >> 8;
                to.word[g * group + s * bytes + b] = (int16_t)word;
                if (grouped) {
                    fine[g * group + s * bytes + b] = (int16_t)(value - 256 * word);
                    continue;
                }
                to.high[at + b] = (int8_t)high;
                to.middle[at + b] = (int8_t)(word - 256 * high);
                to.low[at + b] = (int8_t)(value - 256 * word);
            }
        }
    }
}

/* e^z for z in [-80, 80], clamped outside so that no subnormal number comes of it; within 2 units in the last place. */
MF_INLINE float mf_exp(float z) {
    z = z < -80.0f ? -80.0f : z;
    z = z > 80.0f ? 80.0f : z;
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

/* tanh(z) without the loss of digits of small z: of its size, from e^2z - 1, whose last sum is taken apart. */
MF_INLINE float mf_tanh(float z) {
    const uint32_t sign = mf_bits_of(z) & 0x80000000u;
    float twice = mf_float_of(mf_bits_of(z + z) & 0x7fffffffu);
    twice = twice > 20.0f ? 20.0f : twice;
    const float shifted = twice * 1.44269504f + MF_ROUND;
    const float n = shifted - MF_ROUND;
    const float r = (twice - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = (p * r) * r + r;
    const float power = mf_float_of((mf_bits_of(shifted) - 0x4b400000u + 127u) << 23);
    const float less = p * power + (power - 1.0f);
    return mf_float_of(mf_bits_of(less / (less + 2.0f)) | sign);
}

/* out = f(gate) * up; for MF_CAP up holds one number, and out = up * tanh(gate / up). */
MF_INLINE void mf_activate_body(int32_t kind, const float *gate, const float *up, float *out, int64_t count) {
    if (kind == MF_GELU_TANH) {
        for (int64_t i = 0; i < count; i++) {
            const float x = gate[i], inner = 1.59576912f * (x + ((0.044715f * x) * x) * x);
            out[i] = (x / (1.0f + mf_exp(-inner))) * up[i];
        }
    } else if (kind == MF_SILU) {
        for (int64_t i = 0; i < count; i++) out[i] = (gate[i] / (1.0f + mf_exp(-gate[i]))) * up[i];
    } else if (kind == MF_SIGMOID) {
        for (int64_t i = 0; i < count; i++) out[i] = (1.0f / (1.0f + mf_exp(-gate[i]))) * up[i];
    } else {
        const float cap = *up;
        for (int64_t i = 0; i < count; i++) out[i] = cap * mf_tanh(gate[i] / cap);
    }
}

#endif
