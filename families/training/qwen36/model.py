"""The transformers class, and a forward over its parameters that is fast to train.

The class computes experts one after another; here every expert runs on every token in one product, and the router's
zeros drop what was not chosen: the same function (`check` compares), far fewer launches. The delta rule goes in chunks
of 64 tokens: everything within a chunk, and what a chunk does to a state, in products over all chunks at once; only the
states follow one another, one product each. Rows hold several documents; a document never sees another, neither
through attention nor through convolutions or states.
"""

import math
from typing import Any

import config
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

END = 0
TIED: dict[str, str] = {}
"""Parameters that are another one, and are not stored: none here."""
CHUNK = 64
STD = 0.04


def build(seed: int) -> Qwen3_5MoeForCausalLM:
    """Make a float32 model with fresh weights; decay rates span one to a thousand tokens."""
    torch.manual_seed(seed)
    model = Qwen3_5MoeForCausalLM._from_config(
        Qwen3_5MoeTextConfig(**config.text_config()), attn_implementation="eager", dtype=torch.float32
    )
    deep = (2 * len(config.LAYER_TYPES)) ** -0.5
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
            nn.init.normal_(p, std=STD * deep)
        elif name.endswith("conv1d.weight"):
            nn.init.normal_(p, std=0.3)
        elif name.endswith("mlp.gate.weight"):
            nn.init.normal_(p, std=0.04)
        elif name.endswith("A_log"):
            nn.init.uniform_(p, 0.0, math.log(8.0))
        elif name.endswith("dt_bias"):
            steps = torch.exp(torch.empty_like(p).uniform_(math.log(0.001), math.log(0.1)))
            p.data.copy_(torch.log(torch.expm1(steps)))
        elif p.ndim >= 2:
            nn.init.normal_(p, std=STD)
    return model


class Rows:
    """What one batch of rows needs besides its ids: documents, masks and rotary tables."""

    def __init__(self, model: Qwen3_5MoeForCausalLM, ids: Tensor, dtype: torch.dtype) -> None:
        length = ids.shape[1]
        ended = F.pad((ids == END)[:, :-1].long(), (1, 0))
        self.document = ended.cumsum(1)
        place = torch.arange(length, device=ids.device)
        seen = (self.document[:, :, None] == self.document[:, None, :]) & (place[:, None] >= place)
        self.mask = torch.zeros(seen.shape, dtype=dtype, device=ids.device).masked_fill_(~seen, -1e30)[:, None]
        first = F.pad(ended[:, 1:] > 0, (1, 0), value=True)
        start = torch.where(first, place, 0).cummax(1).values
        self.cos, self.sin = model.model.rotary_emb(
            torch.zeros(1, device=ids.device), (place - start)[None].expand(3, -1, -1)
        )
        self.taps = [
            F.pad(self.document[:, : length - n] == self.document[:, n:], (n, 0)).to(dtype)[..., None]
            for n in range(config.TAPS)
        ]
        self.chunks = self.document.view(len(ids), length // CHUNK, CHUNK)
        before = F.pad(self.chunks[:, :-1, -1], (1, 0), value=-1)
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=ids.device).tril()
        self.same = (self.chunks[..., :, None] == self.chunks[..., None, :]) & lower
        self.from_start = (self.chunks == before[..., None]).float()
        self.to_end = (self.chunks == self.chunks[..., -1:]).float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    one, two = turning.chunk(2, -1)
    return torch.cat((turning * cos[:, :, None] + torch.cat((-two, one), -1) * sin[:, :, None], rest), -1)


def attention(layer: nn.Module, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Add full attention with its output gate."""
    part = layer.self_attn
    B, L, _ = x.shape
    normed = layer.input_layernorm(x)
    query, gate = part.q_proj(normed).view(B, L, config.HEADS, -1).chunk(2, -1)
    key, value = (p(normed).view(B, L, config.KV_HEADS, -1) for p in (part.k_proj, part.v_proj))
    query = _rotate(part.q_norm(query), cos, sin).to(value.dtype)
    key = _rotate(part.k_norm(key), cos, sin).to(value.dtype)
    groups = config.HEADS // config.KV_HEADS
    q, k, v = (t.transpose(1, 2) for t in (query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)))
    out = F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous(), attn_mask=mask.to(q.dtype))
    return x + part.o_proj(out.transpose(1, 2).reshape(B, L, -1) * torch.sigmoid(gate.reshape(B, L, -1)))


def prepare(layer: nn.Module, x: Tensor, taps: list[Tensor]) -> tuple[Tensor, ...]:
    """Return q, k, v (B, H, L, D), log decay and rate (B, H, L) in float32, and z."""
    part = layer.linear_attn
    B, L, _ = x.shape
    x = layer.input_layernorm(x)
    mixed = part.in_proj_qkv(x)
    weight = part.conv1d.weight[:, 0]
    total = mixed * weight[:, -1]
    for n in range(1, config.TAPS):
        total = total + F.pad(mixed[:, : L - n], (0, 0, n, 0)) * taps[n].to(mixed.dtype) * weight[:, -1 - n]
    sizes = [part.key_dim, part.key_dim, part.value_dim]
    q, k, v = (t.view(B, L, -1, config.KEY_DIM).transpose(1, 2).float() for t in F.silu(total).split(sizes, -1))
    q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    groups = config.VALUE_HEADS // config.KEY_HEADS
    q, k = (t.repeat_interleave(groups, 1) for t in (q * config.KEY_DIM**-0.5, k))
    g = -part.A_log.float().exp() * F.softplus(part.in_proj_a(x).float() + part.dt_bias)
    beta = part.in_proj_b(x).float().sigmoid()
    return q, k, v, g.transpose(1, 2), beta.transpose(1, 2), part.in_proj_z(x)


def inverse(lower: Tensor) -> Tensor:
    """Return the inverse of 1 + `lower` (..., CHUNK, CHUNK), strictly lower triangular, by blocks of doubling size."""
    size = lower.shape[-1]
    result = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower)
    place = torch.arange(size, device=lower.device)
    width = 1
    while width < size:
        block = place // width
        below = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
        result = result - result @ torch.where(below, lower, 0.0) @ result
        width *= 2
    return result


class _Inverse(torch.autograd.Function):
    """`inverse`, whose gradient needs the result alone."""

    @staticmethod
    def forward(lower: Tensor) -> Tensor:  # type: ignore[override]
        return inverse(lower)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        del inputs
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (result,) = ctx.saved_tensors
        turned = result.transpose(-1, -2)
        return -(turned @ grad @ turned).tril(-1)


def overlaps(k: Tensor, g: Tensor, beta: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
    """Return by chunks how earlier keys of the chunk meet a token's (B, H, n, C, C), and the decay between tokens."""
    total = g.cumsum(-1)
    decay = torch.where(same[:, None], total[..., :, None] - total[..., None, :], -1e30).exp()
    return (beta[..., None] * (k @ k.transpose(-1, -2)) * decay).tril(-1), decay


def moves(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, solved: Tensor, from_start: Tensor, to_end: Tensor
) -> tuple[Tensor, ...]:
    """Return each chunk's writes without a state, what a state takes from them, and what the chunk makes of a state."""
    total = g.cumsum(-1)
    since = (total.exp() * from_start[:, None])[..., None]
    wanted, recalled = (solved @ torch.cat((v, since * k), -1).mul(beta[..., None])).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    kept = (k * ((total[..., -1:] - total).exp() * to_end[:, None])[..., None]).transpose(-1, -2)
    whole = (total[..., -1].exp() * from_start[:, None, :, -1])[..., None, None]
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return wanted, recalled, whole * eye - kept @ recalled, kept @ wanted, since


def answers(
    q: Tensor, k: Tensor, decay: Tensor, since: Tensor, wanted: Tensor, recalled: Tensor, states: Tensor
) -> Tensor:
    """Return what the queries read from the state before their chunk and from the writes within it: (B, L, H, D)."""
    within = (q @ k.transpose(-1, -2)) * decay
    read = (q * since) @ states + within @ (wanted - recalled @ states)
    return read.flatten(2, 3).transpose(1, 2)


def finish(layer: nn.Module, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Add the delta network's output: the gated norm and the projection."""
    part = layer.linear_attn
    B, L, H, D = y.shape
    normed = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6) * part.norm.weight
    return x + part.out_proj((normed * F.silu(z.view(B, L, H, D).float())).to(z.dtype).reshape(B, L, -1))


def feed_forward(layer: nn.Module, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add the routed and shared experts; returns the layer's output, its balancing loss and the experts' shares."""
    part = layer.mlp
    t = layer.post_attention_layernorm(h).flatten(0, 1)
    probabilities = F.linear(t, part.gate.weight).float().softmax(-1)
    picked, index = probabilities.topk(config.TOP_K, -1)
    dense = torch.zeros_like(probabilities).scatter(-1, index, picked / picked.sum(-1, keepdim=True))
    share = torch.zeros_like(probabilities).scatter(-1, index, 1.0 / config.TOP_K).mean(0)
    gate, up = F.linear(t, part.experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (config.EXPERTS, -1)).chunk(2, -1)
    hidden = F.silu(gate) * up * dense[..., None].to(up.dtype)
    routed = F.linear(hidden.flatten(-2), part.experts.down_proj.permute(1, 0, 2).flatten(1))
    shared = part.shared_expert(t) * torch.sigmoid(part.shared_expert_gate(t))
    balance = config.EXPERTS * (share * probabilities.mean(0)).sum()
    return h + (routed + shared).view_as(h), balance, share


def head(norm: nn.Module, weight: Tensor, x: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the mean cross-entropy (nats) over targets, weighted."""
    losses = F.cross_entropy(F.linear(norm(x), weight).float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp_min(1)


class Trainer:
    """The compiled pieces of one model."""

    def __init__(self, model: Qwen3_5MoeForCausalLM, *, compiled: bool) -> None:
        self.model = model
        pieces = (attention, prepare, overlaps, moves, answers, finish, feed_forward, head)
        (
            self.attention,
            self.prepare,
            self.overlaps,
            self.moves,
            self.answers,
            self.finish,
            self.feed_forward,
            self.head,
        ) = (torch.compile(piece, dynamic=False) if compiled else piece for piece in pieces)

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: Rows) -> Tensor:
        """Run the delta rule in chunks, states cut at document ends; returns (B, L, H, D) float32."""
        q, k, v, g, beta = (t.unflatten(2, (-1, CHUNK)) for t in (q, k, v, g, beta))
        lower, decay = self.overlaps(k, g, beta, rows.same)
        solved = _Inverse.apply(lower)
        wanted, recalled, carry, gain, since = self.moves(k, v, g, beta, solved, rows.from_start, rows.to_end)
        states = [torch.zeros_like(gain[:, :, 0])]
        for n in range(gain.shape[2] - 1):
            states.append(gain[:, :, n] + carry[:, :, n] @ states[-1])
        return self.answers(q, k, decay, since, wanted, recalled, torch.stack(states, 2))

    def hidden(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the last residual stream, the summed balancing loss and the shares per layer (L, E)."""
        base = self.model.model
        rows = Rows(self.model, ids, dtype)
        x = base.embed_tokens(ids)
        balances, shares = [], []
        for layer, kind in zip(base.layers, config.LAYER_TYPES, strict=True):
            if kind == "full_attention":
                x = self.attention(layer, x, rows.mask, rows.cos, rows.sin)
            else:
                *inputs, z = self.prepare(layer, x, rows.taps)
                with torch.autocast(ids.device.type, enabled=False):
                    y = self.delta(*inputs, rows)
                x = self.finish(layer, x, y, z)
            x, balance, share = self.feed_forward(layer, x)
            balances.append(balance)
            shares.append(share)
        return x, torch.stack(balances).sum(), torch.stack(shares)

    def loss(self, ids: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cross-entropy, the balancing loss and the shares."""
        x, balance, shares = self.hidden(ids, dtype)
        return self.head(self.model.model.norm, self.model.lm_head.weight, x, targets, weights), balance, shares


@torch.no_grad()
def check(model: Qwen3_5MoeForCausalLM) -> float:
    """Return the largest difference of the logits from the transformers class, for a row of two documents."""
    ids = torch.randint(9, config.VOCAB, (1, 3 * CHUNK), generator=torch.Generator().manual_seed(0)).to(model.device)
    ids[0, 69] = END
    x, _, _ = Trainer(model, compiled=False).hidden(ids, torch.float32)
    logits = model.lm_head(model.model.norm(x))
    alone = [model(input_ids=part, use_cache=False).logits for part in (ids[:, :70], ids[:, 70:])]
    return float((logits - torch.cat(alone, 1)).abs().max())
