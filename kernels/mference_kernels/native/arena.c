/* Scratch memory of the call that is running. */
#define _POSIX_C_SOURCE 200112L
#include <stdlib.h>

#include "work.h"

typedef struct {
    uint8_t *held;
    int64_t bytes;
} room;

static room scratch, registers;

static uint8_t *at_least(room *r, int64_t bytes) {
    if (bytes <= r->bytes) return r->held;
    void *fresh = NULL;
    free(r->held);
    r->held = NULL;
    r->bytes = 0;
    if (posix_memalign(&fresh, 64, (size_t)mf_round_up(bytes, 4096))) return NULL;
    r->held = fresh;
    r->bytes = mf_round_up(bytes, 4096);
    return r->held;
}

uint8_t *mf_arena(int64_t bytes) { return at_least(&scratch, bytes); }

uint8_t *mf_registers(int64_t bytes) { return at_least(&registers, bytes); }
