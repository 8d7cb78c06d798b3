/* AVX-512 with byte dot products. A block is 16 groups: one vector register holds their integer dots, in order, so the
   float steps of 16 groups cost as much as one. */
#include "mference.h"
#if defined(MF_X86)
#include <immintrin.h>

#define MF_VECTOR 64
#define MF_SLICE 4
#include "attention_body.h"
#include "avx512.h"

static int supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

/* Dots of a block's 16 groups with `count` prepared rows; `bytes` of it lie inside the row of codes. */
MF_AVX512 void dots(const uint8_t *c, int64_t bytes, const mf_layout *l, const uint8_t *const *inputs, int64_t at,
                    const int bits, const int words, const int count, const int whole, __m512 *out) {
    __m512i upper[2][16], lower[2][16];
    const int planes = 8 / bits, fold = words / 16 ? words / 16 : 1; /* vectors of one group, at least */
    const __m512i mask = _mm512_set1_epi8((char)((1 << bits) - 1));
    MF_UNROLL(16)
    for (int j = 0; j < words / fold; j++) {
        for (int m = 0; m < count; m++) upper[m][j] = lower[m][j] = _mm512_setzero_si512();
        int turns = fold;
        if (fold > 1) MF_HIDE(turns);
        for (int i = j * fold; i < j * fold + turns && (whole || 64 * i < bytes); i++) {
            __m512i code[4];
            _mm_prefetch((const char *)c + 64 * i + MF_AHEAD, _MM_HINT_T0);
            if (whole || 64 * i + 64 <= bytes)
                code[0] = _mm512_loadu_si512(c + 64 * i);
            else
                code[0] = _mm512_maskz_loadu_epi8(mf_first_bytes(bytes - 64 * i), c + 64 * i);
            for (int s = planes - 1; s >= 0 && bits < 8; s--)
                code[s] = _mm512_and_si512(s ? _mm512_srli_epi16(code[0], (unsigned)(bits * s)) : code[0], mask);
            for (int m = 0; m < count; m++) {
                const uint8_t *input = inputs[m] + at + 64 * i;
                __m512i sum = _mm512_setzero_si512(), fine = lower[m][j];
                for (int s = 0; s < planes; s++)
                    sum = _mm512_dpbusd_epi32(sum, code[s], _mm512_loadu_si512(input + l->high + s * l->plane));
                sum = fold > 1 ? _mm512_add_epi32(upper[m][j], _mm512_slli_epi32(sum, 8)) : _mm512_slli_epi32(sum, 8);
                for (int s = 0; s < planes; s++) {
                    sum = _mm512_dpbusd_epi32(sum, code[s], _mm512_loadu_si512(input + l->middle + s * l->plane));
                    fine = _mm512_dpbusd_epi32(fine, code[s], _mm512_loadu_si512(input + l->low + s * l->plane));
                }
                upper[m][j] = sum;
                lower[m][j] = fine;
            }
        }
    }
    for (int m = 0; m < count; m++) out[m] = mf_join512(mf_reduce512(upper[m], words), mf_reduce512(lower[m], words));
}

MF_AVX512 void rows_of(const mf_matrix *w, const mf_layout *l, const uint8_t *const *inputs, float *const *outputs,
                       int64_t first, int64_t last, const int bits, const int words, const int count) {
    const int64_t companion = l->groups * mf_companion_bytes(w->companions);
    for (int64_t n = first; n < last; n++) {
        const uint8_t *codes = w->codes + n * l->row_bytes, *scales = w->scales + n * companion;
        const uint8_t *biases = w->biases + n * companion;
        __m512 lanes[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t g = 0; g < l->groups; g += MF_LANES) {
            const int64_t at = g * words * 4;
            const __mmask16 here = (__mmask16)mf_first_bytes(l->groups - g);
            __m512 dot[2];
            if (g + MF_LANES <= l->groups)
                dots(codes + at, 0, l, inputs, at, bits, words, count, 1, dot);
            else
                dots(codes + at, l->row_bytes - at, l, inputs, at, bits, words, count, 0, dot);
            const __m512 scale = mf_companions512(scales, w->companions, g, here);
            const __m512 bias = mf_companions512(biases, w->companions, g, here);
            for (int m = 0; m < count; m++) {
                const __m512 unit = _mm512_mul_ps(scale, _mm512_loadu_ps(inputs[m] + l->step + 4 * g));
                const __m512 shift = _mm512_mul_ps(bias, _mm512_loadu_ps(inputs[m] + l->sum + 4 * g));
                lanes[m] = _mm512_add_ps(lanes[m], _mm512_add_ps(_mm512_mul_ps(dot[m], unit), shift));
            }
        }
        for (int m = 0; m < count; m++) outputs[m][n - first] = mf_tree512(lanes[m]);
    }
}

#define MF_AVX512_ROWS(bits, words)                                                                                   \
    MF_AVX512_TARGET static void rows_##bits##_##words(const mf_matrix *w, const mf_layout *l, const mf_rows *r,      \
                                                       int64_t first, int64_t last) {                                 \
        int64_t m = 0;                                                                                                \
        for (; m + 2 <= r->count; m += 2)                                                                             \
            rows_of(w, l, r->inputs + m, r->outputs + m, first, last, bits, words, 2);                                \
        for (; m < r->count; m++) rows_of(w, l, r->inputs + m, r->outputs + m, first, last, bits, words, 1);          \
    }
MF_AVX512_ROWS(2, 2)
MF_AVX512_ROWS(2, 4)
MF_AVX512_ROWS(2, 8)
MF_AVX512_ROWS(4, 4)
MF_AVX512_ROWS(4, 8)
MF_AVX512_ROWS(4, 16)
MF_AVX512_ROWS(8, 8)
MF_AVX512_ROWS(8, 16)
MF_AVX512_ROWS(8, 32)

void mf_avx512_few(const mf_matrix *w, const mf_layout *l, const mf_rows *r, int64_t first, int64_t last) {
    switch (l->bits * 1000 + l->group) {
        case 2032: rows_2_2(w, l, r, first, last); break;
        case 2064: rows_2_4(w, l, r, first, last); break;
        case 2128: rows_2_8(w, l, r, first, last); break;
        case 4032: rows_4_4(w, l, r, first, last); break;
        case 4064: rows_4_8(w, l, r, first, last); break;
        case 4128: rows_4_16(w, l, r, first, last); break;
        case 8032: rows_8_8(w, l, r, first, last); break;
        case 8064: rows_8_16(w, l, r, first, last); break;
        default: rows_8_32(w, l, r, first, last); break;
    }
}

static void product(const mf_matrix *w, const mf_layout *l, const mf_rows *r, int64_t first, int64_t last) {
    if (r->count >= MF_PANEL_ROWS)
        mf_avx512_many(w, l, r, first, last);
    else
        mf_avx512_few(w, l, r, first, last);
}

MF_AVX512_TARGET void mf_avx512_prepare(const float *x, const mf_layout *layout, uint8_t *row) {
    mf_prepare_body(x, layout, row, 0);
}

MF_AVX512_TARGET void mf_avx512_activate(int32_t kind, const float *gate, const float *up, float *out, int64_t count) {
    mf_activate_body(kind, gate, up, out, count);
}

MF_AVX512_TARGET void mf_avx512_attend(const mf_attention *call, int64_t group, int64_t first, int64_t last,
                                       float *scratch) {
    mf_attend_body(call, group, first, last, scratch);
}

const mf_variant mf_avx512 = {"avx512", supported,          mf_avx512_prepare,
                              product,  mf_avx512_activate, mf_avx512_attend};
#endif
