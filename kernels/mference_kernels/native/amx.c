/* Products of many rows on the tile unit: its integer dots are exact, so the bits are those of every other variant. One
   tile product covers a group; three of them, one for each digit, give what mf_panel_add needs. */
#define _GNU_SOURCE
#include "mference.h"
#if defined(MF_X86)
#include <stdlib.h>

#include "avx512_panel.h"
#include "work.h"

#if defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MF_AMX_TARGET \
    __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define MF_AMX MF_AMX_TARGET MF_INLINE
#define TILE_ROWS 16
#define FEWEST_ROWS 4 /* below, unpacking and tile set-up cost more than they save */

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Digit d of group g of 16 packed rows, `group` bytes each, one row after another. */
static _Thread_local int8_t *packed;
static _Thread_local int64_t packed_bytes;

#if !defined(MF_LOAD_CONFIG) /* tests run this file on tiles in plain C */
/* The compiler must see the whole block as read: its own intrinsic lets it drop the stores. */
#define MF_LOAD_CONFIG(config) __asm__ volatile("ldtilecfg %0" : : "m"(config))
#define MF_RELEASE() __asm__ volatile("tilerelease")
#if defined(__linux__)
/* The kernel saves tile registers only for processes that asked (0x1023: request; 18: tile data). */
static int tile_unit(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 25 & 1) &&
           syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#else
static int tile_unit(void) { return 0; }
#endif
#endif

static int supported(void) { return mf_avx512.supported() && tile_unit(); }

static void configure(int rows, int depth) {
    tile_config config = {.palette = 1};
    for (int t = 0; t < 3; t++) config.rows[t] = (uint8_t)rows, config.row_bytes[t] = 64;              /* sums */
    for (int t = 3; t < 6; t++) config.rows[t] = (uint8_t)rows, config.row_bytes[t] = (uint16_t)depth; /* digits */
    config.rows[6] = (uint8_t)(depth / 4), config.row_bytes[6] = 64;                                   /* codes */
    MF_LOAD_CONFIG(config);
}

static int8_t *pack(const mf_layout *l, const mf_rows *r) {
    const int64_t rows = mf_round_up(r->count, TILE_ROWS), tiles = rows / TILE_ROWS;
    const int64_t tile = l->group * TILE_ROWS, bytes = 3 * tiles * l->groups * tile;
    if (bytes > packed_bytes) {
        free(packed);
        packed = NULL;
        packed_bytes = 0;
        void *fresh = NULL;
        if (posix_memalign(&fresh, 64, (size_t)bytes)) return NULL;
        packed = fresh;
        packed_bytes = bytes;
    }
    const int64_t digits[3] = {l->high, l->middle, l->low}, piece = l->group / l->per_byte;
    for (int64_t m = 0; m < rows; m++)
        for (int64_t g = 0; g < l->groups; g++)
            for (int d = 0; d < 3; d++) {
                int8_t *to = packed + ((m / TILE_ROWS * l->groups + g) * 3 + d) * tile + m % TILE_ROWS * l->group;
                if (m >= r->count) {
                    memset(to, 0, (size_t)l->group);
                    continue;
                }
                for (int32_t s = 0; s < l->per_byte; s++)
                    memcpy(to + s * piece, r->inputs[m] + digits[d] + s * l->plane + g * piece, (size_t)piece);
            }
    return packed;
}

/* The three digit dots of one group with one tile of rows, stored at sums[digit][row]. */
MF_AMX void tile_dots(const int8_t *digits, const __m512i *codes, const int group, __m512i (*sums)[TILE_ROWS]) {
    const int depth = group < 64 ? group : 64;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int k = 0; k < group; k += depth) {
        _tile_loadd(6, codes + k / 4, 64);
        _tile_loadd(3, digits + k, group);
        _tile_dpbsud(0, 3, 6);
        _tile_loadd(4, digits + TILE_ROWS * group + k, group);
        _tile_dpbsud(1, 4, 6);
        _tile_loadd(5, digits + 2 * TILE_ROWS * group + k, group);
        _tile_dpbsud(2, 5, 6);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
}

MF_AMX void add_group(const mf_panel *p, const mf_layout *l, const mf_rows *r, int64_t m, int64_t rows, int64_t first,
                      int64_t g, __m512i (*sums)[TILE_ROWS], __m512 (*lanes)[MF_LANES]) {
    for (int64_t i = 0; i < rows; i++) {
        const uint8_t *input = r->inputs[m + i];
        const float step = ((const float *)(input + l->step))[first + g], sum = ((const float *)(input + l->sum))[first + g];
        lanes[m + i][g] = mf_panel_add(lanes[m + i][g], sums[0][i], sums[1][i], sums[2][i], p->scales[g], p->biases[g],
                                       step, sum);
    }
}

MF_AMX void tiles(const mf_matrix *w, const mf_layout *l, const mf_rows *r, const int8_t *digits, int64_t first,
                  int64_t last, const int bits, const int group) {
    mf_panel panel;
    __m512 lanes[MF_TILE][MF_LANES];
    __m512i sums[2][3][TILE_ROWS]; /* one group's are added while the tile unit works on the next */
    for (int64_t n = first; n < last; n += MF_PANEL) {
        memset(lanes, 0, sizeof *lanes * (size_t)r->count);
        for (int64_t at = 0; at < l->groups; at += MF_PANEL) {
            const int64_t groups = mf_least(MF_PANEL, l->groups - at);
            mf_panel_fill(w, l, n, at, groups, bits, &panel);
            for (int64_t m = 0; m < r->count; m += TILE_ROWS) {
                const int64_t rows = mf_least(TILE_ROWS, r->count - m);
                const int8_t *from = digits + ((m / TILE_ROWS * l->groups + at) * 3) * TILE_ROWS * group;
                for (int64_t g = 0; g < groups; g++) {
                    tile_dots(from + g * 3 * TILE_ROWS * group, panel.codes + g * (group / 4), group, sums[g & 1]);
                    if (g) add_group(&panel, l, r, m, rows, at, g - 1, sums[(g - 1) & 1], lanes);
                }
                add_group(&panel, l, r, m, rows, at, groups - 1, sums[(groups - 1) & 1], lanes);
            }
        }
        for (int64_t m = 0; m < r->count; m++) _mm512_storeu_ps(r->outputs[m] + n - first, mf_panel_tree(lanes[m]));
    }
}

MF_AMX_TARGET static void many(const mf_matrix *w, const mf_layout *l, const mf_rows *r, const int8_t *digits,
                               int64_t first, int64_t last) {
    switch (l->bits * 1000 + l->group) {
        case 2032: tiles(w, l, r, digits, first, last, 2, 32); break;
        case 2064: tiles(w, l, r, digits, first, last, 2, 64); break;
        case 2128: tiles(w, l, r, digits, first, last, 2, 128); break;
        case 4032: tiles(w, l, r, digits, first, last, 4, 32); break;
        case 4064: tiles(w, l, r, digits, first, last, 4, 64); break;
        case 4128: tiles(w, l, r, digits, first, last, 4, 128); break;
        case 8032: tiles(w, l, r, digits, first, last, 8, 32); break;
        case 8064: tiles(w, l, r, digits, first, last, 8, 64); break;
        default: tiles(w, l, r, digits, first, last, 8, 128); break;
    }
}

static void product(const mf_matrix *w, const mf_layout *l, const mf_rows *r, int64_t first, int64_t last) {
    const int64_t whole = (last - first) / MF_PANEL * MF_PANEL;
    const int8_t *digits = r->count < FEWEST_ROWS || !whole ? NULL : pack(l, r);
    if (!digits) {
        mf_avx512.product(w, l, r, first, last);
        return;
    }
    configure((int)mf_least(r->count, TILE_ROWS), l->group < 64 ? l->group : 64);
    many(w, l, r, digits, first, first + whole);
    MF_RELEASE();
    if (first + whole == last) return;
    float *outputs[MF_TILE];
    for (int64_t m = 0; m < r->count; m++) outputs[m] = r->outputs[m] + whole;
    const mf_rows rest = {r->inputs, outputs, r->count};
    mf_avx512_few(w, l, &rest, first + whole, last);
}

const mf_variant mf_amx = {"amx", supported, mf_avx512_prepare, product, mf_avx512_activate, mf_avx512_attend};
#endif
