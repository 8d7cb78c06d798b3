"""How fast the native kernels are on this machine, as ratios taken in one run: `python -m mference_kernels.measure`.

Every figure is the median of interleaved rounds, so that a busy machine slows all of them alike.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import mlx.core as mx
from attrs import frozen

from mference_kernels import cpu, native
from mference_kernels.activations import geglu_ops
from mference_kernels.cpu_delta import delta_mixer_cpu
from mference_kernels.delta_mixer import DeltaMixer
from mference_kernels.experts import ExpertWeights
from mference_kernels.quant import Quantized, linear_ops

ROUNDS = 9


@frozen(kw_only=True)
class Sizes:
    """What is multiplied: `hidden` inputs, experts of `inner` width, `experts` of them, `chosen` per row, matrices of `mib`.

    A delta network has `heads` value heads on half as many key heads, all of `head_dim`.
    """

    hidden: int = 2816
    inner: int = 704
    experts: int = 128
    chosen: int = 8
    mib: int = 400
    heads: int = 32
    head_dim: int = 128


def matrix(out: int, width: int, bits: int = 4, group: int = 64, stack: Sequence[int] = ()) -> Quantized:
    """Return a random matrix [out, width], or a stack of them."""
    keys = mx.random.split(mx.random.key(out + width), 2)
    codes = mx.random.randint(-(2**31), 2**31 - 1, (*stack, out, width * bits // 32), key=keys[0]).view(mx.uint32)
    scales = (mx.random.uniform(0.5, 1, (*stack, out, width // group), key=keys[1]) * 0.01).astype(mx.bfloat16)
    biases = (scales * -(2.0 ** (bits - 1))).astype(mx.bfloat16)
    mx.eval(codes, scales, biases)
    return Quantized(codes=codes, scales=scales, biases=biases, bits=bits, group_size=group)


def seconds(*works: Callable[[], object]) -> list[float]:
    """Return each work's median seconds over interleaved rounds."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(ROUNDS):
        for work, times in zip(works, taken, strict=True):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return [median(times) for times in taken]


def one_row(sizes: Sizes) -> Iterator[str]:
    """Measure products of one row against reading the same bytes, per layout and variant."""
    yield "one row: product of read bandwidth"
    for bits, group, width in (
        (4, 64, sizes.hidden),
        (4, 64, sizes.inner),
        (8, 64, sizes.hidden),
        (2, 64, sizes.hidden),
    ):
        w = matrix(sizes.mib * (8 << 20) // bits // width, width, bits, group)
        x, at = native.evaluated(mx.random.normal((1, width))), native.address(w.codes)
        count = w.codes.nbytes // 64 * 64
        for variant in native.variants():
            native.choose(variant)
            read, product = seconds(lambda: native.library().mf_read(at, count), lambda: cpu.linear_cpu(x, w))  # noqa: B023
            ratio = w.nbytes / product / (count / read)
            text = f"{w.nbytes / product / 1e9:6.1f} of {count / read / 1e9:6.1f} GB/s: {ratio:.2f}"
            yield f"  {bits} bits, groups of {group}, {width} inputs  {variant:9} {text}"


def many_rows(sizes: Sizes) -> Iterator[str]:
    """Measure products of several rows, beside mlx operations in float32."""
    yield "several rows"
    w = matrix(4096, sizes.hidden)
    wide = Quantized(
        codes=w.codes,
        scales=w.scales.astype(mx.float32),
        biases=w.biases.astype(mx.float32),
        bits=w.bits,
        group_size=w.group_size,
    )
    for rows in (1, 8, 128):
        x = native.evaluated(mx.random.normal((rows, sizes.hidden)))
        plain = seconds(lambda: mx.eval(linear_ops(x, wide)))[0] if rows < 128 else None  # noqa: B023
        for variant in native.variants():
            native.choose(variant)
            (product,) = seconds(lambda: cpu.linear_cpu(x, w))  # noqa: B023
            rate = 2 * rows * 4096 * sizes.hidden / product / 1e9
            beside = f", {plain / product:.1f} times mlx in float32" if plain else ""
            yield f"  {rows:4} rows  {variant:9} {product * 1e3:8.2f} ms {rate:6.0f} GF/s{beside}"


def routed_block(sizes: Sizes) -> Iterator[str]:
    """Measure the routed block in one call, against its products taken one by one."""
    yield "routed block"
    gate, up = (matrix(sizes.inner, sizes.hidden, stack=(sizes.experts,)) for _ in range(2))
    down = matrix(sizes.hidden, sizes.inner, stack=(sizes.experts,))
    held = ExpertWeights(gate=gate, up=up, down=down, dtype=mx.float32)
    slots = mx.random.permutation(sizes.experts)[None, : sizes.chosen].astype(mx.int32)
    x, narrow = (native.evaluated(mx.random.normal((1, size))) for size in (sizes.hidden, sizes.inner))
    apart = [
        (Quantized(codes=w.codes[s], scales=w.scales[s], biases=w.biases[s], bits=4, group_size=64), row)
        for s in slots[0].tolist()  # type: ignore[union-attr]
        for w, row in ((gate, x), (up, x), (down, narrow))
    ]
    mx.eval(slots, [w.codes for w, _ in apart])
    for variant in native.variants():
        native.choose(variant)
        block, parts = seconds(
            lambda: cpu.gated_experts_cpu(x, slots, held, geglu_ops),
            lambda: [cpu.linear_cpu(row, w) for w, row in apart],
        )
        yield f"  {variant:9} {block * 1e3:7.2f} ms, its products apart {parts * 1e3:7.2f} ms: {block / parts:.2f}"


def delta_network(sizes: Sizes) -> Iterator[str]:
    """Measure the mixer of a delta network: a token against reading its states, a chunk against tokens and mlx."""
    yield "delta network between its projections"
    heads, keys, dim = sizes.heads, sizes.heads // 2, sizes.head_dim
    channels = (2 * keys + heads) * dim
    mixer = DeltaMixer(
        taps=mx.random.normal((4, channels)),
        log_rate=mx.zeros((heads,)),
        dt_bias=mx.zeros((heads,)),
        norm=mx.ones((dim,)),
        key_heads=keys,
        key_dim=dim,
        unit_eps=1e-6,
        norm_eps=1e-6,
    )
    tails, states = [mx.zeros((3, channels))], [mx.random.normal((heads, dim, dim))]
    at, count = native.address(states[0]), states[0].nbytes
    for rows in (1, 128):
        qkv, z, a, b = (mx.random.normal((1, rows, width)) for width in (channels, heads * dim, heads, heads))
        mx.eval(qkv, z, a, b, tails)
        call = partial(delta_mixer_cpu, qkv, z, a, b, [rows], tails, states, mixer)
        for variant in native.variants():
            native.choose(variant)
            read, taken = seconds(lambda: native.library().mf_read(at, count), call)
            rate = 7 * rows * heads * dim * dim / taken / 1e9
            beside = f"{taken / read:.1f} times reading its states" if rows == 1 else f"{rate:.0f} GF/s"
            yield f"  {rows:4} tokens  {variant:9} {taken * 1e3:8.2f} ms, {taken / rows * 1e6:.0f} us a token, {beside}"


def report(sizes: Sizes) -> Iterator[str]:
    """Yield the lines of the whole report; the best variant is chosen afterwards."""
    yield f"{native.available_cores()} threads, variants {', '.join(native.variants())}"
    for part in (one_row, many_rows, routed_block, delta_network):
        yield from part(sizes)
    native.choose(native.variants()[0])


if __name__ == "__main__":
    for line in report(Sizes()):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
