/* Choosing experts: the order of the definition, scores down and then index up, and what they weigh. */
#include "body.h"
#include "work.h"

typedef struct {
    const float *scores, *scale;
    int64_t experts, choices;
    int32_t rule;
    int32_t *ids;
    float *weights;
} choosing;

/* A key that orders as the score does, with -0 equal to 0. */
MF_INLINE int32_t key_of(float score) {
    const int32_t bits = (int32_t)mf_bits_of(score + 0.0f);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

static void best_of(const float *scores, int64_t experts, int64_t choices, int32_t *ids) {
    int64_t held = 0;
    for (int64_t e = 0; e < experts; e++) {
        const int32_t key = key_of(scores[e]);
        if (held == choices && key <= key_of(scores[ids[held - 1]])) continue;
        int64_t at = held < choices ? held++ : held - 1;
        for (; at > 0 && key_of(scores[ids[at - 1]]) < key; at--) ids[at] = ids[at - 1];
        ids[at] = (int32_t)e;
    }
}

/* Sum of count values taken by `index`, or in order, each e^(value - largest): in lanes, then by the tree. */
static float softmax_sum(const float *scores, int64_t experts, float largest) {
    float lane[MF_LANES] = {0};
    for (int64_t e = 0; e < experts; e++) lane[e % MF_LANES] += mf_exp(scores[e] - largest);
    return mf_tree(lane);
}

static void choose_rows(void *context, int64_t first, int64_t last) {
    const choosing *job = context;
    for (int64_t row = first; row < last; row++) {
        const float *scores = job->scores + row * job->experts;
        int32_t *ids = job->ids + row * job->choices;
        float *weights = job->weights + row * job->choices;
        best_of(scores, job->experts, job->choices, ids);
        for (int64_t c = 0; c < job->choices; c++) weights[c] = scores[ids[c]];
        if (job->rule & MF_SOFTMAX) {
            const float largest = scores[ids[0]], total = softmax_sum(scores, job->experts, largest);
            for (int64_t c = 0; c < job->choices; c++) weights[c] = mf_exp(weights[c] - largest) / total;
        }
        if (job->rule & MF_RENORMALISE) {
            float total = weights[0];
            for (int64_t c = 1; c < job->choices; c++) total += weights[c];
            for (int64_t c = 0; c < job->choices; c++) weights[c] /= total;
        }
        for (int64_t c = 0; c < job->choices && job->scale; c++) weights[c] *= job->scale[ids[c]];
    }
}

int mf_choose_all(const float *scores, int64_t rows, int64_t experts, int64_t choices, int32_t rule, const float *scale,
                  int32_t *ids, float *weights) {
    if (choices < 1 || choices > experts || experts > INT32_MAX) return MF_BAD_SHAPE;
    choosing job = {scores, scale, experts, choices, rule, ids, weights};
    mf_spans(choose_rows, &job, rows, 4 * experts);
    return MF_OK;
}

/* The `choices` best of scores (rows, experts), and their weights by `rule`, each times scale[expert] unless that is NULL. */
MF_EXPORT int mf_choose_experts(const float *scores, int64_t rows, int64_t experts, int64_t choices, int32_t rule,
                                const float *scale, int32_t *ids, float *weights) {
    mf_pool_enter();
    const int result = mf_choose_all(scores, rows, experts, choices, rule, scale, ids, weights);
    mf_pool_leave();
    return result;
}
