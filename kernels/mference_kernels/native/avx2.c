/* AVX2. Eight groups at a time: one vector register holds their integer dots, in order. */
#include "mference.h"
#if defined(MF_X86)
#include <cpuid.h>
#include <immintrin.h>

#define MF_VECTOR 32
#define MF_SLICE 1
#include "attention_body.h"

#define MF_AVX2_TARGET __attribute__((target("avx2,fma,f16c")))
#define MF_AVX2 MF_AVX2_TARGET MF_INLINE
#define AHEAD 4096 /* bytes */
#define EIGHT 8

#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define UNROLL(n) PRAGMA(unroll n)
#else
#define UNROLL(n) PRAGMA(GCC unroll n)
#endif

/* The compiler's own test does not know this name everywhere. */
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static int supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

MF_AVX2 __m256i load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

/* Lane sums of four vectors: in each half, element i is the sum of that half of v[i]. */
MF_AVX2 __m256i quad(const __m256i *v) {
    const __m256i a = _mm256_add_epi32(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
    const __m256i b = _mm256_add_epi32(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
    return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

/* Vectors v[0 ..] hold 8 groups of `words` lanes, at most 8, one after another; return the 8 sums in order. */
MF_AVX2 __m256i reduce(__m256i *v, const int words) {
    if (words == 2) return _mm256_permute4x64_epi64(_mm256_hadd_epi32(v[0], v[1]), 0xd8);
    if (words == 4)
        return _mm256_permutevar8x32_epi32(quad(v), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i a = quad(v), b = quad(v + 4);
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

/* The same for four groups of 8 lanes; the other sums are 0. */
MF_AVX2 __m256i reduce_four(const __m256i *v) {
    const __m256i a = quad(v);
    return _mm256_inserti128_si256(_mm256_setzero_si256(),
                                   _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)), 0);
}

typedef struct {
    __m256i upper, lower;
} two;

/* Lane dots of 32 code bytes with words and low bytes; at most 8 products of 15 * 128 meet in 16 bits. */
MF_AVX2 two dot32(__m256i code, const uint8_t *input, const mf_layout *l, int64_t at, const int bits) {
    if (bits == 8) {
        const __m256i a = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(code));
        const __m256i b = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(code, 1));
        const __m256i c = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(input + l->low + at)));
        const __m256i d = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(input + l->low + at + 16)));
        const __m256i e = load(input + 2 * at), f = load(input + 2 * at + 32);
        return (two){_mm256_add_epi32(_mm256_madd_epi16(a, e), _mm256_madd_epi16(b, f)),
                     _mm256_add_epi32(_mm256_madd_epi16(a, c), _mm256_madd_epi16(b, d))};
    }
    const __m256i mask = _mm256_set1_epi8((char)((1 << bits) - 1)), one = _mm256_set1_epi16(1);
    __m256i high = _mm256_setzero_si256(), middle = high, low = high;
    for (int s = 0; s < 8 / bits; s++) {
        const __m256i c = _mm256_and_si256(s ? _mm256_srli_epi16(code, bits * s) : code, mask);
        const uint8_t *plane = input + s * l->plane + at;
        high = _mm256_add_epi16(high, _mm256_maddubs_epi16(c, load(plane + l->high)));
        middle = _mm256_add_epi16(middle, _mm256_maddubs_epi16(c, load(plane + l->middle)));
        low = _mm256_add_epi16(low, _mm256_maddubs_epi16(c, load(plane + l->low)));
    }
    const __m256i coarse = _mm256_madd_epi16(high, _mm256_set1_epi16(256));
    return (two){_mm256_add_epi32(coarse, _mm256_madd_epi16(middle, one)), _mm256_madd_epi16(low, one)};
}

/* Companions of eight groups from group g, those from the `here`-th on 0; `left` bytes from the row's start are readable. */
MF_AVX2 __m256 companions(const uint8_t *row, int32_t type, int64_t g, int64_t here, int64_t left) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)here), lane);
    if (type == MF_FLOAT32) return _mm256_maskload_ps((const float *)(row + 4 * g), mask);
    uint8_t copy[2 * EIGHT];
    const uint8_t *from = row + 2 * g;
    if (left - 2 * g < 2 * EIGHT) { /* the last row: nothing may lie behind it */
        memset(copy, 0, sizeof copy);
        for (int64_t i = 0; i < 2 * here; i++) copy[i] = from[i];
        from = copy;
    }
    const __m128i half = _mm_loadu_si128((const __m128i *)from);
    const __m256 wide = type == MF_FLOAT16 ? _mm256_cvtph_ps(half)
                                           : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    return _mm256_and_ps(wide, _mm256_castsi256_ps(mask));
}

MF_AVX2 __m256i codes_at(const uint8_t *c, int64_t bytes) {
    if (bytes >= 32) return load(c);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_epi32((const int *)c, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(bytes / 4)), lane));
}

MF_AVX2 float tree(__m256 lower, __m256 upper) {
    const __m256 a = _mm256_add_ps(lower, upper);
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

/* Eight groups from group g of one row of codes, added to `lanes` of `count` prepared rows. */
MF_AVX2 void eight(const mf_matrix *w, const mf_layout *l, const uint8_t *const *inputs, int64_t n, int64_t g,
                   const int bits, const int words, const int count, const int whole, __m256 *lanes) {
    const int64_t companion = l->groups * mf_companion_bytes(w->companions), at = g * words * 4;
    const uint8_t *c = w->codes + n * l->row_bytes + at;
    const int fold = words / EIGHT ? words / EIGHT : 1; /* vectors of one group, at least */
    __m256i upper[2][EIGHT], lower[2][EIGHT];
    UNROLL(8)
    for (int j = 0; j < words / fold; j++) {
        for (int m = 0; m < count; m++) upper[m][j] = lower[m][j] = _mm256_setzero_si256();
        int turns = fold;
        if (fold > 1) MF_HIDE(turns);
        for (int i = j * fold; i < j * fold + turns && (whole || at + 32 * i < l->row_bytes); i++) {
            _mm_prefetch((const char *)c + 32 * i + AHEAD, _MM_HINT_T0);
            const __m256i code = whole ? load(c + 32 * i) : codes_at(c + 32 * i, l->row_bytes - at - 32 * i);
            for (int m = 0; m < count; m++) {
                const two dot = dot32(code, inputs[m], l, at + 32 * i, bits);
                upper[m][j] = fold > 1 ? _mm256_add_epi32(upper[m][j], dot.upper) : dot.upper;
                lower[m][j] = fold > 1 ? _mm256_add_epi32(lower[m][j], dot.lower) : dot.lower;
            }
        }
    }
    const int64_t here = whole ? EIGHT : l->groups - g, left = (w->out - n) * companion;
    const __m256 scale = companions(w->scales + n * companion, w->companions, g, here, left);
    const __m256 bias = companions(w->biases + n * companion, w->companions, g, here, left);
    const int few = words == EIGHT && !whole && here <= 4;
    for (int m = 0; m < count; m++) {
        const __m256i high = few ? reduce_four(upper[m]) : reduce(upper[m], words);
        const __m256i low = few ? reduce_four(lower[m]) : reduce(lower[m], words);
        const __m256 coarse = _mm256_mul_ps(_mm256_cvtepi32_ps(high), _mm256_set1_ps(256.0f));
        const __m256 dot = _mm256_add_ps(coarse, _mm256_cvtepi32_ps(low));
        const __m256 unit = _mm256_mul_ps(scale, _mm256_loadu_ps((const float *)(inputs[m] + l->step) + g));
        const __m256 shift = _mm256_mul_ps(bias, _mm256_loadu_ps((const float *)(inputs[m] + l->sum) + g));
        lanes[m] = _mm256_add_ps(lanes[m], _mm256_add_ps(_mm256_mul_ps(dot, unit), shift));
    }
}

MF_AVX2 void eight_or_less(const mf_matrix *w, const mf_layout *l, const uint8_t *const *inputs, int64_t n, int64_t g,
                           const int bits, const int words, const int count, __m256 *lanes) {
    if (g + EIGHT <= l->groups)
        eight(w, l, inputs, n, g, bits, words, count, 1, lanes);
    else if (g < l->groups)
        eight(w, l, inputs, n, g, bits, words, count, 0, lanes);
}

MF_AVX2 void rows_of(const mf_matrix *w, const mf_layout *l, const uint8_t *const *inputs, float *const *outputs,
                     int64_t first, int64_t last, const int bits, const int words, const int count) {
    for (int64_t n = first; n < last; n++) {
        __m256 lower[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, upper[2] = {lower[0], lower[0]};
        for (int64_t g = 0; g < l->groups; g += MF_LANES) {
            eight_or_less(w, l, inputs, n, g, bits, words, count, lower);
            eight_or_less(w, l, inputs, n, g + EIGHT, bits, words, count, upper);
        }
        for (int m = 0; m < count; m++) outputs[m][n - first] = tree(lower[m], upper[m]);
    }
}

#define ROWS(bits, words)                                                                                             \
    MF_AVX2_TARGET static void rows_##bits##_##words(const mf_matrix *w, const mf_layout *l, const mf_rows *r,        \
                                                     int64_t first, int64_t last) {                                   \
        int64_t m = 0;                                                                                                \
        for (; m + 2 <= r->count; m += 2)                                                                             \
            rows_of(w, l, r->inputs + m, r->outputs + m, first, last, bits, words, 2);                                \
        for (; m < r->count; m++) rows_of(w, l, r->inputs + m, r->outputs + m, first, last, bits, words, 1);          \
    }
ROWS(2, 2)
ROWS(2, 4)
ROWS(2, 8)
ROWS(4, 4)
ROWS(4, 8)
ROWS(4, 16)
ROWS(8, 8)
ROWS(8, 16)
ROWS(8, 32)

static void block(const mf_matrix *w, const mf_layout *l, const mf_rows *r, int64_t first, int64_t last) {
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
    mf_by_blocks(block, w, l, r, first, last);
}

MF_AVX2_TARGET static void prepare(const float *x, const mf_layout *layout, uint8_t *row) {
    mf_prepare_body(x, layout, row, 0);
}

MF_AVX2_TARGET static void activate(int32_t kind, const float *gate, const float *up, float *out, int64_t count) {
    mf_activate_body(kind, gate, up, out, count);
}

MF_AVX2_TARGET static void attend(const mf_attention *call, int64_t group, int64_t first, int64_t last, float *scratch) {
    mf_attend_body(call, group, first, last, scratch);
}

const mf_variant mf_avx2 = {"avx2", supported, prepare, product, activate, attend};
#endif
