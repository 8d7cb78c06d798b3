"""The numeric contract of gated delta networks, in plain Python: what every native variant must return, bit for bit.

docs/numerics.md says it in words. Values are lists of floats, nested as the arrays are; slow on purpose.
"""

import math
from collections.abc import Sequence
from typing import Any

from mference_kernels.contract import LANES, f32, tree


def exponential(z: float) -> float:
    """Return e^z, clamped to [-80, 80]: a polynomial and a power of two."""
    z = min(max(z, -80.0), 80.0)
    shifted = f32(f32(z * f32(1.44269504)) + 12582912.0)
    n = f32(shifted - 12582912.0)
    r = f32(f32(z - f32(n * 0.693359375)) + f32(n * f32(2.12194440e-4)))
    p = f32(1 / 5040)
    for inverse in (720, 120, 24, 6):
        p = f32(f32(p * r) + f32(1 / inverse))
    p = f32(f32(p * r) + 0.5)
    p = f32(f32(f32(p * r) * r) + r)
    return math.ldexp(f32(p + 1.0), int(n))


def silu(x: float) -> float:
    """Return x / (1 + e^-x)."""
    return f32(x / f32(1.0 + exponential(-x)))


def softplus(x: float) -> float:
    """Return log(1 + e^x)."""
    w = exponential(-abs(x))
    s = f32(w / f32(2.0 + w))
    z, p = f32(s * s), f32(1 / 15)
    for odd in (13, 11, 9, 7, 5, 3):
        p = f32(f32(p * z) + f32(1 / odd))
    return f32(max(x, 0.0) + f32(2.0 * f32(f32(f32(p * z) * s) + s)))


def inverse_length(x: Sequence[float], divisor: float, eps: float) -> float:
    """Return 1 / sqrt(sum of x^2 / divisor + eps)."""
    lanes = [0.0] * LANES
    for i, value in enumerate(x):
        lanes[i % LANES] = f32(lanes[i % LANES] + f32(value * value))
    return f32(1.0 / f32(math.sqrt(f32(f32(tree(lanes) / divisor) + f32(eps)))))


def delta_rule(q: Any, k: Any, v: Any, g: Any, rate: Any, held: Any) -> list[Any]:
    """Take one timeline's tokens by the contract, changing `held` in place; returns outputs (L, Hv, Dv)."""
    outputs: list[Any] = []
    repeat = len(v[0]) // len(k[0])
    for t in range(len(q)):
        outputs.append([])
        for h, s in enumerate(held):
            key, query, keep = k[t][h // repeat], q[t][h // repeat], exponential(g[t][h])
            out = []
            for j, value in enumerate(v[t][h]):
                m = o = 0.0
                for i, row in enumerate(s):
                    row[j] = f32(keep * row[j])
                    m = f32(m + f32(key[i] * row[j]))
                update = f32(rate[t][h] * f32(value - m))
                for i, row in enumerate(s):
                    row[j] = f32(row[j] + f32(key[i] * update))
                    o = f32(o + f32(query[i] * row[j]))
                out.append(o)
            outputs[-1].append(out)
    return outputs


def mixed(rows: Sequence[Any], tail: Any, state: Any, mixer: Any) -> list[list[float]]:
    """Mix one timeline's rows qkv, z, a, b with a `DeltaMixer`'s weights, changing `state`; returns y."""
    qkv, z, a, b = rows
    taps, rates, bias, weight = (x.tolist() for x in (mixer.taps, mixer.log_rate, mixer.dt_bias, mixer.norm))
    keys, key_dim, values, dim = mixer.key_heads, mixer.key_dim, mixer.value_heads, mixer.value_dim
    past = tail + qkv
    q, k, v, g, rate = [], [], [], [], []
    for t in range(len(qkv)):
        mixed = []
        for c in range(mixer.channels):
            total = f32(past[t][c] * taps[0][c])
            for tap in range(1, len(taps)):
                total = f32(total + f32(past[t + tap][c] * taps[tap][c]))
            mixed.append(silu(total))
        heads = [mixed[i * key_dim : (i + 1) * key_dim] for i in range(2 * keys)]
        scaled = [[f32(x * inverse_length(head, 1.0, mixer.unit_eps)) for x in head] for head in heads]
        q.append([[f32(x * f32(key_dim**-0.5)) for x in head] for head in scaled[:keys]])
        k.append(scaled[keys:])
        first = 2 * keys * key_dim
        v.append([mixed[first + h * dim : first + (h + 1) * dim] for h in range(values)])
        steps = [softplus(f32(a[t][h] + bias[h])) for h in range(values)]
        g.append([-f32(exponential(rates[h]) * steps[h]) for h in range(values)])
        rate.append([f32(1.0 / f32(1.0 + exponential(-x))) for x in b[t]])
    result = []
    for t, outputs in enumerate(delta_rule(q, k, v, g, rate, state)):
        row = []
        for h, o in enumerate(outputs):
            scale = inverse_length(o, dim, mixer.norm_eps)
            gates = z[t][h * dim : (h + 1) * dim]
            row += [f32(f32(f32(o[d] * scale) * weight[d]) * silu(gates[d])) for d in range(dim)]
        result.append(row)
    return result
