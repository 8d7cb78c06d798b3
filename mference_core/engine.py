"""One loaded model: resident weights, experts, and the call that advances sessions through it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
from attrs import define, field, frozen
from mlx.utils import tree_map

from mference_core.ahead import looking_ahead
from mference_core.arch import Arch
from mference_core.chained import decode_step
from mference_core.checkpoint import Checkpoint, open_checkpoint, peek
from mference_core.cuts import Cuts
from mference_core.errors import NumericError, RequestError, UsageError
from mference_core.experts.mapped_files import MappedFiles
from mference_core.experts.mapping import MappedExperts
from mference_core.experts.plan import MemoryPlan, Requested, plan_memory
from mference_core.experts.pool import ExpertPool
from mference_core.experts.reader import ExpertReader
from mference_core.experts.residents import ResidentExperts
from mference_core.experts.stats import ExpertStats
from mference_core.graph import LayerGraph, Routing
from mference_core.kv import KVLayout, stored_as
from mference_core.placement import ROLES
from mference_core.plugins import LoadedFamily
from mference_core.reachable import arrays_of
from mference_core.routed import LayerExperts
from mference_core.session import Session
from mference_core.state import DTYPES
from mference_core.steps import Observer, StepFunction, advance, make_step
from mference_core.weights import Weights, exact_product, resident_bytes
from mference_kernels import levels, native
from mference_kernels.mapped import reads_addresses

DEFAULT_CONTEXT = 4096
DEFAULT_CHUNK = 512
SCRATCH_FLOOR_BYTES = 96 << 20


@frozen(kw_only=True)
class LoadOptions:
    """How to load: `dtype` auto, float32 or bfloat16; `context` and `chunk` in tokens; `memory_bytes` for everything.

    `kv_dtype` is how rows of attention are stored: float32, bfloat16 or float16; auto is the `dtype` of hidden rows.

    Without a `context` it is `DEFAULT_CONTEXT`, or the model's limit where that is smaller. `lookahead` is off, on or
    auto: whether experts that the next layer is expected to miss are read early. `state_bytes` is what the plan counts for
    the states of all timelines together, at least one of the whole context.
    """

    dtype: str = "auto"
    kv_dtype: str = "auto"
    context: int | None = None
    chunk: int = DEFAULT_CHUNK
    slots: Requested = "auto"
    memory_bytes: int | None = None
    verify: str = "full-sha256"
    lookahead: str = "auto"
    state_bytes: int = 0


def resolve_dtype(name: str) -> str:
    """Return float32 or bfloat16; `auto` is float32 on CPUs and bfloat16 elsewhere."""
    if name == "auto":
        return "float32" if mx.default_device() == mx.Device(mx.cpu) else "bfloat16"
    if name not in ("float32", "bfloat16"):
        raise UsageError(what="--dtype", got=f"'{name}'", expected="auto, float32 or bfloat16")
    return name


def resolve_kv_dtype(name: str, dtype: str) -> str:
    """Return the dtype rows of attention are stored in, where hidden rows are `dtype`."""
    if name == "auto":
        return dtype
    if name not in DTYPES:
        raise UsageError(what="--kv-dtype", got=f"'{name}'", expected=f"auto, {', '.join(DTYPES)}")
    return name


def context_limit(config: Mapping[str, Any] | None) -> int | None:
    """Return the most tokens the checkpoint's config allows, or None where it does not say."""
    for table in ((config or {}).get("text_config"), config):
        limit = table.get("max_position_embeddings") if isinstance(table, Mapping) else None
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def open_model(family: LoadedFamily, path: Path, verify: str) -> Checkpoint:
    """Open a model directory under a family's contract and install plan."""
    return open_checkpoint(
        peek(path), family.contract, lambda arch: family.ask("mference_install_plan", arch=arch), verify
    )


def plan_for(family: LoadedFamily, checkpoint: Checkpoint, options: LoadOptions) -> tuple[KVLayout, MemoryPlan]:
    """Return the state layout and the memory plan of a load; raises `UsageError` when it cannot fit."""
    arch, dtype = checkpoint.arch, resolve_dtype(options.dtype)
    limit = context_limit(checkpoint.config)
    context = options.context if options.context is not None else min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
    if context < 1 or options.chunk < 1:
        raise UsageError(what="--max-context and --prefill-chunk", got="below 1", expected="positive numbers of tokens")
    if limit is not None and context > limit:
        raise UsageError(what="--max-context", got=str(context), expected=f"at most {limit} for this model")
    chunk = min(options.chunk, context)
    layout = family.ask("mference_kv_layout", arch=arch, context=context, chunk=chunk, dtype=dtype)
    if options.kv_dtype != "auto":
        layout = stored_as(layout, resolve_kv_dtype(options.kv_dtype, dtype))
    plan = plan_memory(
        budget_bytes=options.memory_bytes,
        resident_bytes=resident_bytes(checkpoint.weights, product_dtype(dtype)),
        state_bytes=max(options.state_bytes, layout.bytes_at(context)),
        scratch_bytes=scratch_bytes(arch, chunk),
        expert_bytes_per_layer={i: layer.expert_bytes for i, layer in checkpoint.experts.items()},
        experts=arch.num_experts,
        requested=options.slots,
        mappable=can_map(checkpoint),
    )
    return layout, plan


def slow_kernels() -> str | None:
    """Say why products here run in mlx operations on the CPU, or None where they do not.

    Raises `UsageError` for a kernel switch in the environment that cannot be meant or had.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return None
    try:
        chosen = levels.level()
    except (ValueError, native.Unavailable) as error:
        raise UsageError(what=str(error), remedy=f"change or unset {levels.SWITCH} and {levels.THREADS}") from error
    return chosen.reason if chosen.variant is None else None


def can_map(checkpoint: Checkpoint) -> bool:
    """Say whether the experts can be used in place from their files: quantised, and kernels here that take addresses."""
    parts = [part for layer in checkpoint.experts.values() for part in layer.parts if part.name in ROLES]
    return reads_addresses() and all(part.quant is not None for part in parts)


def scratch_bytes(arch: Arch, chunk: int) -> int:
    """Estimate the float32 temporaries of one chunk: routed pairs, hidden rows, logits, plus a floor for scores."""
    pairs = chunk * max(1, arch.top_k_experts) * (3 * arch.hidden_size + 3 * arch.moe_intermediate_size)
    rows = chunk * (8 * arch.hidden_size + 4 * arch.ffn_intermediate)
    return SCRATCH_FLOOR_BYTES + 4 * (pairs + rows + 4 * arch.vocab_size)


def product_dtype(dtype: str) -> mx.Dtype:
    """Return what products run in: float32 on CPUs and for float32 rows, else the rows' dtype."""
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else DTYPES[dtype]


@define(kw_only=True, eq=False)
class Engine:
    """A loaded model. Sessions of one engine may advance together; calls come from one thread at a time."""

    family: LoadedFamily
    checkpoint: Checkpoint
    graph: LayerGraph
    experts: tuple[LayerExperts | None, ...]
    layout: KVLayout
    memory: MemoryPlan
    cuts: Cuts
    dtype: str
    weights: Weights
    prefill_step: StepFunction
    decode_step: StepFunction
    _reader: ExpertReader = field(repr=False)
    _files: MappedFiles = field(repr=False)

    @classmethod
    def load(
        cls,
        family: LoadedFamily,
        path: Path,
        options: LoadOptions | None = None,
        notice: Callable[[str], None] = lambda _: None,
    ) -> "Engine":
        """Load the model of a directory: `.gturbo`, quantised or float.

        `family` comes from `plugins.dispatch`. Raises `ManifestError`, `InstallError`, `UsageError` or
        `StreamError`; nothing is kept after an error.
        """
        options = options or LoadOptions()
        if (slow := slow_kernels()) is not None:
            notice(f"warning: {slow}")
        checkpoint = open_model(family, path, options.verify)
        layout, plan = plan_for(family, checkpoint, options)
        notice(f"memory plan: {plan}")
        if checkpoint.verification is not None:
            checkpoint.verification.tell = notice
        if checkpoint.files is not None:
            checkpoint.files.begin()  # while the rest of the load goes on, and before a first prompt needs them
        dtype = resolve_dtype(options.dtype)
        weights = Weights(checkpoint.weights, DTYPES[dtype], product_dtype(dtype))
        arch = checkpoint.arch
        router = family.ask("mference_router", arch=arch, weights=weights)
        graph = family.ask("mference_layer_graph", arch=arch, weights=weights, router=router)
        reader, files = ExpertReader(), MappedFiles()
        try:
            experts = _experts(checkpoint, graph, reader, files, plan, weights.product_dtype)
            mx.eval(list(arrays_of((graph, experts))))  # else it could only be used on this thread
            experts = looking_ahead(experts, router, options.lookahead)
        except BaseException:
            reader.close()
            files.close()
            raise
        return cls(
            family=family,
            checkpoint=checkpoint,
            graph=graph,
            experts=experts,
            layout=layout,
            memory=plan,
            cuts=Cuts.of(layout, min(options.chunk, layout.context)),
            dtype=dtype,
            weights=weights,
            prefill_step=family.hooks.mference_prefill_step() or advance,
            decode_step=family.hooks.mference_decode_step() or decode_step(graph, experts),
            reader=reader,
            files=files,
        )

    @property
    def chunk(self) -> int:
        """Most tokens of a timeline that one call takes."""
        return self.cuts.chunk_tokens

    @property
    def context(self) -> int:
        """Tokens a session can hold."""
        return self.layout.context

    @property
    def stats(self) -> ExpertStats:
        """Expert figures of all layers since the load."""
        return ExpertStats.total(held.source.stats for held in self.experts if held is not None)

    def session(self) -> Session:
        """Return an empty timeline."""
        return Session(engine=self)

    def check_ids(self, tokens: Sequence[int]) -> None:
        """Raise `RequestError` on an id outside the vocabulary."""
        bad = next((token for token in tokens if not 0 <= token < self.graph.vocab_size), None)
        if bad is not None:
            raise RequestError(what="token id", got=str(bad), expected=f"0 to {self.graph.vocab_size - 1}")

    def forward(
        self,
        sessions: Sequence[Session],
        tokens: Sequence[Sequence[int]],
        *,
        want_logits: bool = True,
        observe: Observer | None = None,
    ) -> mx.array | None:
        """Take `tokens[b]` (at most `chunk`) of each session; return logits (B, V) float32 after the last ones.

        Each session's result is the same alone or together. On failure or interrupt sessions stay as they were.
        """
        longest = max(len(part) for part in tokens)
        ids = mx.array([[*part, *[0] * (longest - len(part))] for part in tokens], dtype=mx.int32)
        return self._run(sessions, ids, [list(part) for part in tokens], want_logits=want_logits, observe=observe)

    def forward_array(self, session: Session, token: mx.array) -> mx.array:
        """Take one token that may not be computed yet; return logits (V,). The caller then calls `settle` with it."""
        return self.forward_arrays([session], token)[0]

    def forward_arrays(self, sessions: Sequence[Session], tokens: mx.array) -> mx.array:
        """Take a token of each session, (B,) and perhaps not computed yet; return logits (B, V).

        The caller then calls `settle` of each session with its token, or `recover`.
        """
        logits = self._run(sessions, tokens.reshape(-1, 1).astype(mx.int32), [[]] * len(sessions))
        assert logits is not None
        return logits

    def _run(
        self,
        sessions: Sequence[Session],
        ids: mx.array,
        known: Sequence[list[int]],
        *,
        want_logits: bool = True,
        observe: Observer | None = None,
    ) -> mx.array | None:
        lengths = [len(part) or 1 for part in known]
        step = make_step([s.states[0].length for s in sessions], ids, lengths)
        states = list(zip(*(session.states for session in sessions), strict=True))
        run = self.decode_step if ids.shape[1] == 1 else self.prefill_step
        for session in sessions:
            session.begin()
        try:
            x = run(self.graph, self.experts, states, step, observe)
            logits = self.graph.head(last_rows(x, lengths))[:, 0] if want_logits else None
            if ids.shape[1] > 1 or logits is None:  # states too: one not asked for would keep the whole chunk alive
                arrays = [array for session in sessions for state in session.states for array in state.arrays]
                mx.eval([*arrays, *([] if logits is None else [logits])])
                for held in self.experts:
                    if held is not None:
                        held.source.reads_done()
        except BaseException:
            for session in sessions:
                session.recover()
            raise
        for session, part in zip(sessions, known, strict=True):
            if part:
                session.settle(part)
        return logits

    def locate_nonfinite(self, tokens: Sequence[int]) -> NumericError:
        """Replay `tokens` on a fresh session and name the first layer whose output is not finite."""
        bad: list[int] = []

        def look(index: int, x: Any, _: Routing | None) -> None:
            if not bad and not all(bool(mx.isfinite(leaf).all()) for leaf in _leaves(x)):
                bad.append(index)

        with suppress(NumericError):
            self.session().prefill(tokens, observe=look)
        where = f"layer {bad[0]}" if bad else "the head"
        return NumericError(
            what=f"output of {where} after {len(tokens)} tokens",
            got="not finite",
            remedy="verify the model's files, or try --dtype float32",
        )

    def close(self) -> None:
        """Close files and stop reader threads."""
        if self.checkpoint.files is not None:
            self.checkpoint.files.stop()
        self._reader.close()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _experts(
    checkpoint: Checkpoint,
    graph: LayerGraph,
    reader: ExpertReader,
    files: MappedFiles,
    plan: MemoryPlan,
    product: mx.Dtype,
) -> tuple[LayerExperts | None, ...]:
    held: list[LayerExperts | None] = []
    for index, layer in enumerate(graph.layers):
        if layer.route is None:
            held.append(None)
            continue
        disk = checkpoint.experts[index]
        source: ExpertPool | ResidentExperts | MappedExperts
        if plan.mapped:
            source = MappedExperts(disk, files, before_first_read=checkpoint.touch)
        elif plan.resident:
            source = ResidentExperts(disk, reader, before_first_read=checkpoint.touch)
        else:
            source = ExpertPool(disk, reader, slots=plan.slots_per_layer, before_first_read=checkpoint.touch)
        companions = next((part.dtype for part in disk.parts if part.name.endswith("_scales")), "BF16")
        held.append(LayerExperts(source=source, product_dtype=exact_product(companions, _expert_product(product))))
    return tuple(held)


def _expert_product(product: mx.Dtype) -> mx.Dtype:
    """Return what the routed experts' products run in: float32 on CUDA.

    There a half-precision product of gathered rows (mlx 0.32.4) can change with the number of rows, and then the
    number of slots would show in the output.
    """
    device = mx.default_device()
    return mx.float32 if device != mx.Device(mx.cpu) and not mx.metal.is_available() else product


def last_rows(x: Any, lengths: Sequence[int]) -> Any:
    """Return each timeline's last real row of opaque rows, as (B, 1, ...)."""
    if all(leaf.shape[1] == 1 for leaf in _leaves(x)):
        return x
    return tree_map(lambda leaf: mx.stack([leaf[b, n - 1] for b, n in enumerate(lengths)])[:, None], x)


def _leaves(x: Any) -> list[mx.array]:
    found: list[mx.array] = []
    tree_map(found.append, x)
    return found
