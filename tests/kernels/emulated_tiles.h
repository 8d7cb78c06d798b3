/* The tile unit in plain C, as its manual describes it: lets amx.c run, and be compared, on machines without one. */
#ifndef EMULATED_TILES_H
#define EMULATED_TILES_H

#define _GNU_SOURCE
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} emulated_config;

static _Thread_local emulated_config emulated;
static _Thread_local uint8_t emulated_tiles[8][16][64];

static inline int tile_unit(void) { return 1; }

static inline void emulated_load_config(const void *config) {
    memcpy(&emulated, config, sizeof emulated);
    for (int t = 0; t < 8; t++)
        if (emulated.palette != 1 || emulated.rows[t] > 16 || emulated.row_bytes[t] > 64) abort();
    memset(emulated_tiles, 0, sizeof emulated_tiles);
}

static inline void emulated_loadd(int t, const void *from, int64_t stride) {
    if (!emulated.rows[t]) abort();
    memset(emulated_tiles[t], 0, sizeof emulated_tiles[t]);
    for (int r = 0; r < emulated.rows[t]; r++)
        memcpy(emulated_tiles[t][r], (const uint8_t *)from + r * stride, emulated.row_bytes[t]);
}

static inline void emulated_stored(int t, void *to, int64_t stride) {
    if (!emulated.rows[t]) abort();
    for (int r = 0; r < emulated.rows[t]; r++)
        memcpy((uint8_t *)to + r * stride, emulated_tiles[t][r], emulated.row_bytes[t]);
}

/* c += signed bytes of a times unsigned bytes of b, by quads. */
static inline void emulated_dpbsud(int c, int a, int b) {
    if (emulated.rows[c] != emulated.rows[a] || emulated.row_bytes[c] != emulated.row_bytes[b] ||
        emulated.row_bytes[a] != 4 * emulated.rows[b])
        abort();
    for (int m = 0; m < emulated.rows[c]; m++)
        for (int n = 0; n < emulated.row_bytes[c] / 4; n++) {
            int32_t sum;
            memcpy(&sum, &emulated_tiles[c][m][4 * n], 4);
            for (int k = 0; k < emulated.rows[b]; k++)
                for (int j = 0; j < 4; j++)
                    sum += (int8_t)emulated_tiles[a][m][4 * k + j] * emulated_tiles[b][k][4 * n + j];
            memcpy(&emulated_tiles[c][m][4 * n], &sum, 4);
        }
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_zero(t) memset(emulated_tiles[t], 0, sizeof emulated_tiles[t])
#define _tile_loadd(t, from, stride) emulated_loadd(t, from, stride)
#define _tile_stored(t, to, stride) emulated_stored(t, to, stride)
#define _tile_dpbsud(c, a, b) emulated_dpbsud(c, a, b)
#define MF_LOAD_CONFIG(config) emulated_load_config(&config)
#define MF_RELEASE() memset(&emulated, 0, sizeof emulated)
#endif
#endif
