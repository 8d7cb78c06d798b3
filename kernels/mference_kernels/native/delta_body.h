/* Bodies of gated delta networks, included once per instruction set: MF_OF(name) names them, MF_FOR compiles them for it,
   MF_DELTA_BYTES is a register's size. Every operation is lane by lane or in the contract's order, so the bits agree.

   Contract: columns of a state are independent. Per token, e = e^g; s_ij <- f32(e s_ij); m_j = sum of f32(k_i s_ij), i in
   order from +0; u_j = f32(b f32(v_j - m_j)); s_ij <- f32(s_ij + f32(k_i u_j)); o_j = sum of f32(q_i s_ij), i in order. */

typedef float MF_OF(vector) __attribute__((vector_size(MF_DELTA_BYTES), aligned(4), may_alias));
#define MF_V MF_OF(vector)
#define MF_W (MF_DELTA_BYTES / 4)
#define MF_PANEL (2 * MF_W) /* columns whose sums stay in registers */

/* The panel's part of a row: `count` values, then zeros. */
MF_FOR MF_INLINE void MF_OF(take)(const float *from, int64_t count, MF_V *to) {
    if (count >= MF_PANEL) {
        to[0] = *(const MF_V *)from;
        to[1] = *(const MF_V *)(from + MF_W);
        return;
    }
    float row[MF_PANEL] = {0};
    memcpy(row, from, (size_t)count * 4);
    memcpy(to, row, sizeof row);
}

MF_FOR MF_INLINE void MF_OF(put)(const MF_V *from, int64_t count, float *to) {
    if (count >= MF_PANEL) {
        *(MF_V *)to = from[0];
        *(MF_V *)(to + MF_W) = from[1];
        return;
    }
    float row[MF_PANEL];
    memcpy(row, from, sizeof row);
    memcpy(to, row, (size_t)count * 4);
}

/* Take one panel over all tokens. `held` keeps the state, already decayed for the token to come, so that a token costs one
   pass: it writes, reads out, decays for the next and recalls with the next key. */
MF_FOR MF_INLINE void MF_OF(panel)(const mf_delta_head *h, int64_t at, int64_t count, MF_V *held) {
    const int64_t rows = h->key_dim;
    const float *k = h->k, *q = h->q;
    MF_V m[2] = {{0}}, o[2], u[2], s[2];
    float keep = *h->decay;
    for (int64_t i = 0; i < rows; i++) {
        MF_OF(take)(h->from + i * h->value_dim + at, count, s);
        for (int p = 0; p < 2; p++) {
            s[p] *= keep;
            m[p] += s[p] * k[i];
            held[2 * i + p] = s[p];
        }
    }
    for (int64_t t = 0; t < h->length; t++, k += h->k_stride, q += h->q_stride) {
        for (int64_t i = 0; i < rows && t + 3 < h->length; i += MF_LANES) { /* far apart: no hardware foresees them */
            __builtin_prefetch(k + 3 * h->k_stride + i);
            __builtin_prefetch(q + 3 * h->q_stride + i);
        }
        __builtin_prefetch(h->v + (t + 3) * h->v_stride + at);
        __builtin_prefetch(h->out + (t + 3) * h->out_stride + at, 1);
        MF_OF(take)(h->v + t * h->v_stride + at, count, u);
        const float rate = h->beta[t * h->rate_stride];
        for (int p = 0; p < 2; p++) {
            u[p] = (u[p] - m[p]) * rate;
            m[p] = o[p] = (MF_V){0};
        }
        if (t + 1 < h->length) {
            const float *next = k + h->k_stride;
            keep = h->decay[(t + 1) * h->rate_stride];
            for (int64_t i = 0; i < rows; i++)
                for (int p = 0; p < 2; p++) {
                    MF_V now = held[2 * i + p] + u[p] * k[i];
                    o[p] += now * q[i];
                    now *= keep;
                    m[p] += now * next[i];
                    held[2 * i + p] = now;
                }
        } else {
            for (int64_t i = 0; i < rows; i++) {
                for (int p = 0; p < 2; p++) {
                    s[p] = held[2 * i + p] + u[p] * k[i];
                    o[p] += s[p] * q[i];
                }
                MF_OF(put)(s, count, h->to + i * h->value_dim + at);
            }
        }
        MF_OF(put)(o, count, h->out + t * h->out_stride + at);
    }
}

MF_FOR static void MF_OF(advance)(const mf_delta_head *h, int64_t first, int64_t count, float *scratch) {
    int64_t at = 0;
    for (; at + MF_PANEL <= count; at += MF_PANEL) MF_OF(panel)(h, first + at, MF_PANEL, (MF_V *)scratch);
    if (at < count) MF_OF(panel)(h, first + at, count - at, (MF_V *)scratch);
}

MF_FOR MF_INLINE float MF_OF(silu)(float x) { return x / (1.0f + mf_exp(-x)); }

MF_FOR static void MF_OF(convolve)(const float *const *rows, const float *taps, int64_t tap_count, int64_t channels,
                                   int64_t first, int64_t count, int activate, float *out) {
    const float *x = rows[0] + first, *w = taps + first;
    for (int64_t c = 0; c < count; c++) out[c] = x[c] * w[c];
    for (int64_t tap = 1; tap < tap_count; tap++) {
        x = rows[tap] + first;
        w = taps + tap * channels + first;
        for (int64_t c = 0; c < count; c++) out[c] += x[c] * w[c];
    }
    if (activate)
        for (int64_t c = 0; c < count; c++) out[c] = MF_OF(silu)(out[c]);
}

/* 1 / sqrt(sum of x^2 / divisor + eps), squares summed in 16 lanes. */
MF_FOR MF_INLINE float MF_OF(inverse_length)(const float *x, int64_t dim, float divisor, float eps) {
    float lane[MF_LANES] = {0};
    int64_t d = 0;
    for (; d + MF_LANES <= dim; d += MF_LANES)
        for (int i = 0; i < MF_LANES; i++) lane[i] += x[d + i] * x[d + i];
    for (; d < dim; d++) lane[d % MF_LANES] += x[d] * x[d];
    return 1.0f / sqrtf(mf_tree(lane) / divisor + eps);
}

/* log(1 + e^x): the larger of x and 0, plus log(1 + w), w = e^-|x|, by twice the area tangent of w / (2 + w). */
MF_FOR MF_INLINE float MF_OF(softplus)(float x) {
    const float w = mf_exp(x < 0.0f ? x : -x), s = w / (2.0f + w), z = s * s;
    float p = 1.0f / 15.0f;
    p = p * z + 1.0f / 13.0f;
    p = p * z + 1.0f / 11.0f;
    p = p * z + 1.0f / 9.0f;
    p = p * z + 1.0f / 7.0f;
    p = p * z + 1.0f / 5.0f;
    p = p * z + 1.0f / 3.0f;
    return (x > 0.0f ? x : 0.0f) + 2.0f * ((p * z) * s + s);
}

MF_FOR static void MF_OF(prepare)(const mf_delta_segment *g, int64_t b, int64_t t, int64_t head) {
    const mf_delta_mixer *m = g->call;
    const int64_t dk = m->key_dim, dv = m->value_dim, share = m->value_heads / m->key_heads;
    const int64_t keys = m->key_heads * dk, channels = 2 * keys + m->value_heads * dv, row = b * MF_DELTA_TOKENS + t;
    const float *rows[MF_DELTA_TAPS];
    float *out = g->rows + row * channels, *q = out + head * dk, *k = q + keys;
    for (int64_t tap = 0; tap < m->tap_count; tap++) {
        const int64_t token = g->start + t + tap - (m->tap_count - 1);
        rows[tap] = token < 0 ? m->tails[b] + (token + m->tap_count - 1) * channels
                              : m->qkv + (b * m->length + token) * channels;
    }
    const int64_t firsts[3] = {head * dk, keys + head * dk, 2 * keys + head * share * dv};
    for (int i = 0; i < 3; i++)
        MF_OF(convolve)(rows, m->taps, m->tap_count, channels, firsts[i], i < 2 ? dk : share * dv, 1, out + firsts[i]);
    const float of_q = MF_OF(inverse_length)(q, dk, 1.0f, m->unit_eps);
    const float of_k = MF_OF(inverse_length)(k, dk, 1.0f, m->unit_eps);
    for (int64_t d = 0; d < dk; d++) q[d] = (q[d] * of_q) * m->q_scale;
    for (int64_t d = 0; d < dk; d++) k[d] = k[d] * of_k;
    const int64_t first = head * share, at = (b * m->length + g->start + t) * m->value_heads + first;
    float *decay = g->decay + row * m->value_heads + first, *beta = g->beta + row * m->value_heads + first;
    for (int64_t h = 0; h < share; h++) {
        const float step = MF_OF(softplus)(m->a[at + h] + m->dt_bias[first + h]);
        decay[h] = mf_exp(-(mf_exp(m->log_rate[first + h]) * step));
        beta[h] = 1.0f / (1.0f + mf_exp(-m->b[at + h]));
    }
}

MF_FOR static void MF_OF(finish)(const mf_delta_segment *g, int64_t b, int64_t t, int64_t head) {
    const mf_delta_mixer *m = g->call;
    const int64_t dv = m->value_dim, share = m->value_heads / m->key_heads;
    for (int64_t h = head * share; h < (head + 1) * share; h++) {
        const int64_t at = ((b * m->length + g->start + t) * m->value_heads + h) * dv;
        float *y = m->y + at;
        const float *z = m->z + at, scale = MF_OF(inverse_length)(y, dv, (float)dv, m->norm_eps);
        for (int64_t d = 0; d < dv; d++) y[d] = ((y[d] * scale) * m->norm[d]) * MF_OF(silu)(z[d]);
    }
}

MF_FOR static void MF_OF(exponentials)(const float *x, float *y, int64_t count) {
    for (int64_t i = 0; i < count; i++) y[i] = mf_exp(x[i]);
}

static const mf_delta_variant MF_OF(variant) = {MF_OF(advance), MF_OF(convolve), MF_OF(prepare), MF_OF(finish),
                                                MF_OF(exponentials)};

#undef MF_V
#undef MF_W
#undef MF_PANEL
#undef MF_OF
#undef MF_FOR
#undef MF_DELTA_BYTES
