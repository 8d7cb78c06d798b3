"""Attention to a window and to compressed entries, for whole rows of several documents at once.

Shapes: B rows, L tokens, H heads, D features of a head, W tokens in a window, E places for entries in a row, R turned
features. A row that is both key and value turns by its position; an entry by that of its first token.
"""

from collections.abc import Callable
from typing import Any

import config
import torch
import torch.nn.functional as F
from streams import rms
from torch import Tensor, nn

BOS = 0
ASKED_ONE_IN = 8
"""The indexer learns from one query in so many."""
W, H, D = config.WINDOW_TOKENS, config.HEADS, config.HEAD_DIM


class Windows:
    """The windows of `rate` tokens that close in each row: E places in order, those that are left over never visible.

    `tokens` are the tokens to pool, rows end to end, the `taken` - `rate` before a window with it; `slots` (B, E, taken)
    says which of them are of the same document; `first` (B, E) is the position of a window's first token.
    """

    def __init__(self, rate: int, taken: int, place: Tensor, position: Tensor, document: Tensor) -> None:
        rows, length = position.shape
        closes = (position + 1) % rate == 0
        end = torch.where(closes, place, length).sort(1).values[:, : length // rate]
        real = end < length
        end = end.clamp_max(length - 1)
        at = position.gather(1, end)
        back = torch.arange(taken - 1, -1, -1, device=place.device)
        self.slots = (at[..., None] >= back) | (back < rate)
        start = torch.arange(rows, device=place.device)[:, None, None] * length
        self.tokens = ((end[..., None] - back).clamp_min(0) + start).flatten()
        self.first = (at - rate + 1).clamp_min(0)
        same = document[:, :, None] == document.gather(1, end)[:, None]
        self.visible = same & real[:, None] & (end[:, None] <= place[:, None])


class Rows:
    """What one batch of rows needs besides its ids: documents, masks, windows and rotary tables."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        rows, length = ids.shape
        begins = ids == BOS
        document = begins.cumsum(1)
        place = torch.arange(length, device=ids.device)
        position = place - torch.where(begins, place, 0).cummax(1).values
        blocks = length // W
        query = place.view(blocks, W)
        key = torch.cat((query - W, query), 1)
        back = query[:, :, None] - key[:, None, :]
        near = (back >= 0) & (back < W) & (key[:, None] >= 0)
        theirs = document[:, key.clamp_min(0)]
        self.near = near & (document.view(rows, blocks, W)[..., None] == theirs[:, :, None])
        self.turn = {kind: self._turn(model, position, label) for kind, label in ((False, "main"), (True, "compress"))}
        self.windows = {
            rate: Windows(rate, 2 * rate if rate == 4 else rate, place, position, document)
            for rate in set(config.RATIOS) - {0}
        }
        self.entry_turn = {rate: self._turn(model, w.first, "compress") for rate, w in self.windows.items()}
        self.asked = torch.arange(int(torch.randint(ASKED_ONE_IN, ())), length, ASKED_ONE_IN, device=ids.device)

    @staticmethod
    def _turn(model: nn.Module, position: Tensor, label: str) -> tuple[Tensor, Tensor]:
        angles = position[..., None].float() * getattr(model.model.rotary_emb, f"{label}_inv_freq")
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the last R features of `x` (..., D) in neighbouring pairs by angles (..., R / 2), in float32."""
    rest, turning = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    a, b = turning.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((rest.float(), turned), -1)


def queries_and_rows(
    u: Tensor, q_a: Tensor, q_norm: Tensor, q_b: Tensor, kv: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries' low-rank form (B, L, Q), the queries (B, L, H, D) and the rows (B, L, D)."""
    low = rms(F.linear(u, q_a), q_norm)
    q = rotate(rms(F.linear(low, q_b).unflatten(-1, (H, D))), cos[:, :, None], sin[:, :, None])
    return low, q, rotate(rms(F.linear(u, kv), kv_norm), cos, sin)


def entries(
    u: Tensor, kv: Tensor, gate: Tensor, bias: Tensor, norm: Tensor, tokens: Tensor, slots: Tensor, cos: Tensor,
    sin: Tensor,
) -> Tensor:  # fmt: skip
    """Pool windows of tokens into entries (B, E, D), float32: a weighted sum per feature, normed and turned."""
    a, g = F.linear(u, kv).flatten(0, 1), F.linear(u, gate).flatten(0, 1)
    size = norm.shape[0]
    rate, taken = bias.shape[0], slots.shape[-1]
    a, g = (t.index_select(0, tokens).unflatten(0, slots.shape).float() for t in (a, g))
    if taken > rate:  # the window before in its first series, then this window in its second
        a, g = (torch.cat((t[:, :, :rate, :size], t[:, :, rate:, size:]), 2) for t in (a, g))
        bias = torch.cat((bias[:, :size], bias[:, size:]))
    g = torch.where(slots[..., None], g + bias, -torch.inf)
    return rotate(rms((a * g.softmax(2)).sum(2), norm), cos, sin)


def attend(
    q: Tensor, rows: Tensor, pooled: Tensor | None, sinks: Tensor, near: Tensor, seen: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the heads' outputs (B, L, H, D), and what share of their attention entries get (B, L, E), summed."""
    B, L = rows.shape[:2]
    blocks = L // W
    q, rows = q.to(dtype), rows.to(dtype)
    before = rows.view(B, blocks, W, D)
    keys = torch.cat((F.pad(before[:, :-1], (0, 0, 0, 0, 1, 0)), before), 2)
    scores = q.reshape(B, blocks, W * H, D) @ keys.transpose(-1, -2)
    scores = scores.view(B, blocks, W, H, 2 * W).float() * D**-0.5
    scores = scores.masked_fill(~near[:, :, :, None], -1e30)
    if pooled is not None and seen is not None:
        pooled = pooled.to(dtype)
        more = (q.reshape(B, L * H, D) @ pooled.transpose(-1, -2)).view(B, blocks, W, H, -1).float() * D**-0.5
        more = more.masked_fill(~seen.view(B, blocks, W, 1, -1), -1e30)
        scores = torch.cat((scores, more), -1)
    top = torch.maximum(scores.amax(-1), sinks).detach()
    weight = (scores - top[..., None]).exp()
    p = (weight / (weight.sum(-1) + (sinks - top).exp())[..., None]).to(dtype)
    out = p[..., : 2 * W].reshape(B, blocks, W * H, -1) @ keys
    out = out.view(B, L, H, D)
    if pooled is None:
        return out, None
    far = p[..., 2 * W :].reshape(B, L * H, -1)
    return out + (far @ pooled).view(B, L, H, D), far.detach().view(B, L, H, -1).sum(2, dtype=torch.float32)


def finish(o: Tensor, cos: Tensor, sin: Tensor, o_a: Tensor, o_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn the outputs back by the queries' positions and project them in groups of heads."""
    o = rotate(o, cos[:, :, None], -sin[:, :, None]).unflatten(2, (config.O_GROUPS, -1)).flatten(3)
    mid = torch.einsum("blgi,goi->blgo", o.to(dtype), o_a.view(config.O_GROUPS, config.O_LORA, -1).to(dtype))
    return F.linear(mid.flatten(2), o_b)


def index_scores(part: nn.Module, low: Tensor, u: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return how much each query (B, L', ...) wants each entry (B, L', E), float32."""
    q = F.linear(low, part.q_b_proj.weight).unflatten(-1, (config.INDEX_HEADS, config.INDEX_DIM))
    q = rotate(q, cos[:, :, None], sin[:, :, None])
    c = F.linear(u, part.scorer.weights_proj.weight).float() * config.INDEX_HEADS**-0.5
    met = torch.einsum("blhd,bed->blhe", q, keys).relu().float() * config.INDEX_DIM**-0.5
    return (met * c[..., None]).sum(2)


def index_loss(scores: Tensor, share: Tensor, visible: Tensor) -> Tensor:
    """Return the cross-entropy of the scores against the entries' share of attention, where entries get any."""
    total = share.sum(-1, keepdim=True)
    counts = (total[..., 0] > 0.02) & (visible.sum(-1) > 1)
    log_p = scores.masked_fill(~visible, -1e30).log_softmax(-1)
    losses = -(share / total.clamp_min(1e-6) * log_p.masked_fill(~visible, 0.0)).sum(-1)
    return (losses * counts).sum() / counts.sum().clamp_min(1)


class Attention:
    """The pieces in order, some of them compiled."""

    def __init__(self, *pieces: Callable[..., Any]) -> None:
        self.queries_and_rows, self.entries, self.attend, self.finish = pieces

    def __call__(
        self, part: nn.Module, u: Tensor, rows: Rows, rate: int, dtype: torch.dtype, *, late: bool
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's attention for normed tokens `u` (B, L, D), and its indexer's loss."""
        cos, sin = rows.turn[rate > 0]
        low, q, kv = self.queries_and_rows(
            u, part.q_a_proj.weight, part.q_a_norm.weight, part.q_b_proj.weight, part.kv_proj.weight,
            part.kv_norm.weight, cos, sin,
        )  # fmt: skip
        loss, pooled, seen, scores = u.new_zeros(()), None, None, None
        if rate:
            windows = rows.windows[rate]
            pooled, seen = self._pool(part.compressor, u, rows, rate), windows.visible
        if rate == 4:
            indexer, still, still_low = part.compressor.indexer, u.detach(), low.detach()
            keys = self._pool(indexer, still, rows, rate)
            if late:
                seen = pick(indexer, still_low, still, keys, cos, sin, seen)
            if torch.is_grad_enabled():
                few = rows.asked
                scores = index_scores(indexer, still_low[:, few], still[:, few], keys, cos[:, few], sin[:, few])
        out, share = self.attend(q, kv, pooled, part.sinks, rows.near, seen, dtype)
        if scores is not None and share is not None:
            loss = index_loss(scores, share[:, rows.asked], seen[:, rows.asked])
        return self.finish(out, cos, sin, part.o_a_proj.weight, part.o_b_proj.weight, dtype), loss

    def _pool(self, part: nn.Module, u: Tensor, rows: Rows, rate: int) -> Tensor:
        windows = rows.windows[rate]
        return self.entries(
            u, part.kv_proj.weight, part.gate_proj.weight, part.position_bias, part.kv_norm.weight, windows.tokens,
            windows.slots, *rows.entry_turn[rate],
        )  # fmt: skip


@torch.no_grad()
def pick(part: nn.Module, low: Tensor, u: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, visible: Tensor) -> Tensor:
    """Return which entries each query may attend to (B, L, E): the best INDEX_TOPK of those it sees."""
    scores = index_scores(part, low, u, keys, cos, sin).masked_fill(~visible, -torch.inf)
    if scores.shape[-1] <= config.INDEX_TOPK:
        return visible
    least = scores.topk(config.INDEX_TOPK).values[..., -1:]
    return visible & (scores >= least)
