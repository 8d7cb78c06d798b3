/* The variant every machine has. */
#include "attention_body.h"
#include "portable_body.h"

static int supported(void) { return 1; }

static void prepare(const float *x, const mf_layout *layout, uint8_t *row) { mf_prepare_body(x, layout, row, 1); }

static void block(const mf_matrix *w, const mf_layout *layout, const mf_rows *rows, int64_t first, int64_t last) {
    mf_product_body(w, layout, rows, first, last);
}

static void product(const mf_matrix *w, const mf_layout *layout, const mf_rows *rows, int64_t first, int64_t last) {
    mf_by_blocks(block, w, layout, rows, first, last);
}

static void activate(int32_t kind, const float *gate, const float *up, float *out, int64_t count) {
    mf_activate_body(kind, gate, up, out, count);
}

static void attend(const mf_attention *call, int64_t head, int64_t first, int64_t last, float *scratch) {
    mf_attend_body(call, head, first, last, scratch);
}

const mf_variant mf_portable = {"portable", supported, prepare, product, activate, attend};
