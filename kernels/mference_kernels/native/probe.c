/* Read bandwidth of this machine, as the products meet it: what their speed is judged against. */
#include "mference.h"

#define PIECE 262144 /* bytes of one item */

typedef struct {
    const uint8_t *from;
    int64_t bytes;
    uint64_t *sums;
} probe;

static void read_item(void *context, int64_t item, int worker) {
    const probe *p = context;
    const uint8_t *at = p->from + item * PIECE;
    const int64_t count = mf_least(PIECE, p->bytes - item * PIECE) / 64;
    uint64_t sum[8] = {0};
    for (int64_t i = 0; i < count; i++) {
        uint64_t line[8];
        memcpy(line, at + 64 * i, 64);
        __builtin_prefetch(at + 64 * i + 4096);
        for (int j = 0; j < 8; j++) sum[j] += line[j];
    }
    for (int j = 0; j < 8; j++) p->sums[8 * worker + j] += sum[j];
}

/* Read `bytes` (a multiple of 64) on all threads; returns a sum of what was read so that nothing is left out. */
MF_EXPORT uint64_t mf_read(const uint8_t *from, int64_t bytes) {
    uint64_t sums[8 * 256] = {0}, total = 0;
    probe p = {from, bytes, sums};
    mf_pool_enter();
    mf_pool_run(read_item, &p, (bytes + PIECE - 1) / PIECE);
    mf_pool_leave();
    for (int i = 0; i < 8 * 256; i++) total += sums[i];
    return total;
}
