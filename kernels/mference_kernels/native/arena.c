/* Scratch memory of the call that is running. */
#define _POSIX_C_SOURCE 200112L
#include <stdlib.h>

#include "work.h"

static uint8_t *held;
static int64_t held_bytes;

uint8_t *mf_arena(int64_t bytes) {
    if (bytes <= held_bytes) return held;
    void *fresh = NULL;
    free(held);
    held = NULL;
    held_bytes = 0;
    if (posix_memalign(&fresh, 64, (size_t)mf_round_up(bytes, 4096))) return NULL;
    held = fresh;
    held_bytes = mf_round_up(bytes, 4096);
    return held;
}
