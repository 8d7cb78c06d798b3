"""Programs: the operations between two host decisions as one native call, so that nothing is scheduled or woken between them.

A program is written once, when a layer is built, and run on any number of float32 rows. Every operation has the bits of
the kernel of the same name, called on its own; docs/numerics.md is their contract. Programs are a fast path: where
`Program.runs` says no, the same is computed call by call.
"""

import ctypes
from collections.abc import Callable, Sequence
from math import prod
from types import ModuleType

import mlx.core as mx
from attrs import define, field, frozen

from mference_kernels import levels, native
from mference_kernels.experts import Activation
from mference_kernels.native_program import OpArgs, ProgramArgs, Timeline, TimelineArgs
from mference_kernels.quant import Matrix, Quantized

NORM, LINEAR, ROTATE, ATTEND, ADD, MULTIPLY, SCALE, GATED, ACTIVATE, PART, CHOOSE, EXPERTS = range(12)
SIGMOID, CAP = 2, 3
ALIGNED_FLOATS = 16


class Unknown(Exception):
    """A program needs something that the native kernels do not know."""


@frozen
class Register:
    """Rows of `width` values, float32 but for chosen ids."""

    index: int
    width: int


@define
class _Life:
    """When a register is written and last read, by the number of the operation; `array` is the caller's, or None."""

    width: int
    first: int
    last: int
    array: int | None = None


@define(eq=False)
class Builder:
    """Writes a program; each method adds one operation and returns where its result is."""

    _ops: list[OpArgs] = field(factory=list, init=False)
    _lives: list[_Life] = field(factory=list, init=False)
    _inputs: int = field(default=0, init=False)
    _kept: list[object] = field(factory=list, init=False)

    def input(self, width: int) -> Register:
        """Return the next argument of the program."""
        self._inputs += 1
        self._lives.append(_Life(width, -1, -1, self._inputs - 1))
        return Register(len(self._lives) - 1, width)

    def norm(self, x: Register, weight: mx.array | None, eps: float, parts: int = 1) -> Register:
        """Scale each of `parts` equal parts to unit root mean square, then by `weight` (width / parts)."""
        dim = self._divided(x, parts)
        if weight is not None and weight.shape != (dim,):
            raise ValueError(f"[program] weight must be {(dim,)} but got {weight.shape}")
        return self._add(NORM, [x], x.width, dim=dim, count=parts, f=float(dim), g=eps, **self._companion(weight))

    def linears(self, x: Register, ws: Sequence[Matrix]) -> list[Register]:
        """Return x wT of each w."""
        args = self._matrices(ws)
        if any(arg.in_ != x.width for arg in args):
            raise ValueError(f"[program] matrices must take {x.width} values but got {[arg.in_ for arg in args]}")
        first = self._add(LINEAR, [x], *(arg.out for arg in args), count=len(ws), matrices=ctypes.addressof(args))
        return [Register(first.index + i, arg.out) for i, arg in enumerate(args)]

    def linear(self, x: Register, w: Matrix) -> Register:
        """Return x wT."""
        return self.linears(x, [w])[0]

    def rotate(self, x: Register, frequencies: mx.array, heads: int) -> Register:
        """Rotate the first features of each head by the row's position, twice as many as `frequencies`."""
        dim, pairs = self._divided(x, heads), frequencies.size
        if 2 * pairs > dim:
            raise ValueError(f"[program] at most {dim} features can turn but got {2 * pairs}")
        speeds = native.evaluated(frequencies, mx.float32)
        self._kept.append(speeds)
        weight = native.address(speeds) if pairs else None
        return self._add(ROTATE, [x], x.width, dim=dim, count=heads, extra=pairs, weight=weight)

    def attend(
        self, q: Register, k: Register, v: Register, *, heads: int, groups: int, scale: float, window: int | None = None
    ) -> Register:
        """Append keys and values to each timeline, then attend to what it holds; head h reads group h // (heads / groups)."""
        dim, value_dim = self._divided(k, groups), self._divided(v, groups)
        if q.width != heads * dim or heads % groups:
            raise ValueError(f"[program] queries must be {heads} times {dim} wide but got {q.width}")
        sizes = {"dim": dim, "count": heads, "groups": groups, "extra": value_dim, "window": window or 0}
        return self._add(ATTEND, [q, k, v], heads * value_dim, f=scale, **sizes)

    def add(self, a: Register, b: Register) -> Register:
        """Return a + b."""
        return self._add(ADD, [a, b], self._same(a, b))

    def multiply(self, a: Register, b: Register) -> Register:
        """Return a * b."""
        return self._add(MULTIPLY, [a, b], self._same(a, b))

    def scale(self, x: Register, weight: mx.array | None = None, factor: float = 1.0) -> Register:
        """Return x * weight * factor, rounded after each; `weight` has one value, or one per feature."""
        if weight is not None and weight.size not in (1, x.width):
            raise ValueError(f"[program] weight must have 1 or {x.width} values but got {weight.size}")
        dim = 1 if weight is None else weight.size
        return self._add(SCALE, [x], x.width, dim=dim, f=factor, **self._companion(weight))

    def gated(self, x: Register, gate: Matrix, up: Matrix, down: Matrix, activation: Activation) -> Register:
        """Return down(activation(gate(x), up(x)))."""
        kind = _fast().activation_kind(activation)
        if kind is None:
            raise Unknown(f"activation {activation!r}")
        args = self._matrices((gate, up, down))
        slots = self._new(1)
        return self._add(GATED, [x, slots], args[2].out, kind=kind, matrices=ctypes.addressof(args))

    def sigmoid_gate(self, gate: Register, x: Register) -> Register:
        """Return sigmoid(gate) * x; a gate of one value opens the whole row."""
        width = x.width if gate.width == 1 else self._same(gate, x)
        return self._add(ACTIVATE, [gate, x], width, kind=SIGMOID)

    def softcap(self, x: Register, cap: float) -> Register:
        """Return cap * tanh(x / cap)."""
        return self._add(ACTIVATE, [x], x.width, kind=CAP, f=cap)

    def part(self, x: Register, parts: int, first: int, size: int) -> Register:
        """Return values first .. first + size - 1 of each of `parts` equal parts."""
        if not 0 <= first < first + size <= self._divided(x, parts):
            raise ValueError(f"[program] a part of {x.width // parts} values has no {first} to {first + size}")
        return self._add(PART, [x], parts * size, dim=size, count=parts, extra=first)

    def choose(
        self, scores: Register, k: int, *, softmax: bool, renormalise: bool, scale: mx.array | None = None
    ) -> tuple[Register, Register]:
        """Return ids and weights as `routing.choose`."""
        if not 1 <= k <= scores.width or (scale is not None and scale.shape != (scores.width,)):
            raise ValueError(f"[program] cannot choose {k} of {scores.width}")
        wide = None if scale is None else native.evaluated(scale, mx.float32)
        self._kept.append(wide)
        at = None if wide is None else native.address(wide)
        rule = softmax + 2 * renormalise
        ids = self._add(CHOOSE, [scores], k, k, kind=rule, dim=scores.width, count=k, weight=at)
        return ids, Register(ids.index + 1, k)

    def experts(self, rows: Register, ids: Register, weights: Register, activation: Activation) -> Register:
        """Return the weighted sum of each row's experts, which a `Chain` holds; there it stops if one is not in memory."""
        kind = _fast().activation_kind(activation)
        if kind is None:
            raise Unknown(f"activation {activation!r}")
        slots = self._new(self._same(ids, weights))
        sizes = {"dim": rows.width, "count": ids.width, "extra": slots.index}
        return self._add(EXPERTS, [rows, ids, weights], rows.width, kind=kind, **sizes)

    def build(self, *outputs: Register) -> "Program":
        """Return the program; calling it returns `outputs`."""
        arrays = self._inputs
        for register in outputs:
            life = self._lives[register.index]
            if life.array is not None:
                raise ValueError("[program] an output must be computed, and be named once")
            life.array, arrays = arrays, arrays + 1
        ids = {op.out for op in self._ops if op.code == CHOOSE}
        offsets, row_floats = _places(self._lives)
        ops = (OpArgs * len(self._ops))(*self._ops)
        widths = (ctypes.c_int64 * len(self._lives))(*(life.width for life in self._lives))
        places = (ctypes.c_int64 * len(self._lives))(*offsets)
        args = ProgramArgs(
            *(ctypes.addressof(ops), ctypes.addressof(widths), ctypes.addressof(places)),
            *(len(self._ops), len(self._lives), row_floats),
        )
        return Program(
            args=args,
            inputs=tuple(life.width for life in self._lives if life.first < 0),
            outputs=tuple((register.width, register.index in ids) for register in outputs),
            turns=any(op.code == ROTATE for op in self._ops),
            attends=any(op.code == ATTEND for op in self._ops),
            kept=(ops, widths, places, *self._kept),
        )

    def _new(self, width: int) -> Register:
        self._lives.append(_Life(width, len(self._ops), len(self._ops)))
        return Register(len(self._lives) - 1, width)

    def _add(self, code: int, inputs: Sequence[Register], *widths: int, **values: object) -> Register:
        """Add an operation on `inputs`; return the first of its results, which have `widths`."""
        for register in inputs:
            self._lives[register.index].last = len(self._ops)
        results = [self._new(width) for width in widths]
        places = [register.index for register in (*inputs, inputs[0], inputs[0])][:3]
        self._ops.append(OpArgs(code=code, in1=places[0], in2=places[1], in3=places[2], out=results[0].index, **values))
        return results[0]

    def _divided(self, x: Register, parts: int) -> int:
        if parts < 1 or x.width % parts:
            raise ValueError(f"[program] {x.width} values cannot be {parts} parts")
        return x.width // parts

    def _same(self, a: Register, b: Register) -> int:
        if a.width != b.width:
            raise ValueError(f"[program] widths must be equal but got {a.width} and {b.width}")
        return a.width

    def _companion(self, weight: mx.array | None) -> dict[str, int | None]:
        if weight is None:
            return {"weight": None, "kind": 0}
        held = native.evaluated(weight if weight.dtype in native.COMPANIONS else weight.astype(mx.float32))
        self._kept.append(held)
        return {"weight": native.address(held), "kind": native.COMPANIONS[held.dtype]}

    def _matrices(self, ws: Sequence[Matrix]) -> "ctypes.Array[native.MatrixArgs]":
        fast = _fast()
        known = [w for w in ws if isinstance(w, Quantized) and fast.can_multiply(w)]
        if len(known) < len(ws):
            raise Unknown("a matrix in no layout of the native kernels")
        args = (native.MatrixArgs * len(ws))(*(fast.matrix_args(w, "program") for w in known))
        self._kept += [args, *known]
        return args


@frozen(kw_only=True, eq=False)
class Program:
    """What `Builder.build` returns; without `args` it is one that the native kernels cannot run."""

    args: ProgramArgs | None = None
    inputs: tuple[int, ...] = ()
    outputs: tuple[tuple[int, bool], ...] = ()
    turns: bool = False
    attends: bool = False
    kept: tuple[object, ...] = field(default=(), repr=False)

    def runs(self, *inputs: mx.array) -> bool:
        """Say whether native kernels may take these inputs now: on the CPU, float32."""
        known = self.args is not None and all(x.dtype == mx.float32 for x in inputs)
        return known and levels.cpu() is not None

    def __call__(
        self, *inputs: mx.array, positions: mx.array | None = None, timelines: Sequence[Timeline] = ()
    ) -> list[mx.array]:
        """Run on rows (..., width); return arrays (..., width), float32, of chosen ids int32.

        With attention, rows are (B, L, width) and `timelines` B, whose new rows are written where they lie; rows past
        a timeline's own come out undefined. `positions` (B, L) int32 turn heads. Raises: ValueError if shapes do not fit.
        """
        lead = inputs[0].shape[:-1]
        assert self.args is not None, "asked to run, though it said no"
        if tuple(x.shape for x in inputs) != tuple((*lead, width) for width in self.inputs):
            raise ValueError(f"[program] inputs must be {self.inputs} wide but got {[x.shape for x in inputs]}")
        if self.attends and (len(lead) != 2 or len(timelines) != lead[0]):
            raise ValueError(f"[program] timelines must be {lead[:1]} but got {len(timelines)}")
        if self.turns and (positions is None or positions.shape != lead):
            raise ValueError(f"[program] positions must be {lead}")
        held = [native.evaluated(x, mx.float32) for x in inputs]
        results = [native.Output((*lead, width), whole=whole) for width, whole in self.outputs]
        if rows := prod(lead):
            arrays = (ctypes.c_void_p * (len(held) + len(results)))(
                *map(native.address, held), *(result.address for result in results)
            )
            where = None if positions is None else native.evaluated(positions, mx.int32)
            lines = (TimelineArgs * len(timelines))(*(line.args for line in timelines)) if timelines else None
            at = None if where is None else native.address(where)
            code = native.library().mf_run(ctypes.byref(self.args), rows, len(timelines), arrays, at, lines)
            native.check(code, "program")
        return [result.array() for result in results]


def compiled(write: Callable[[Builder], Sequence[Register]]) -> Program:
    """Return the program that `write` writes and whose outputs it returns; where native kernels lack one, it never `runs`."""
    if levels.cpu() is None:
        return Program()
    builder = Builder()
    try:
        return builder.build(*write(builder))
    except Unknown:
        return Program()


def _fast() -> ModuleType:
    """Return the fast paths that a program is written for."""
    fast = levels.cpu()
    if fast is None:
        raise Unknown("no native kernels here")
    return fast


def _places(lives: Sequence[_Life]) -> tuple[list[int], int]:
    """Return each register's floats per row before it, those not needed at the same time sharing, and floats per row."""
    offsets, held = [0] * len(lives), list[tuple[int, int, int]]()
    for index, life in enumerate(lives):
        if life.array is not None:
            offsets[index] = -1 - life.array
            continue
        size = -(-life.width // ALIGNED_FLOATS) * ALIGNED_FLOATS
        at = 0
        for start, end, last in sorted(held):
            if last >= life.first and start < at + size and at < end:
                at = end
        held.append((at, at + size, life.last))
        offsets[index] = at
    return offsets, max((end for _, end, _ in held), default=0)
