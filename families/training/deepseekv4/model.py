"""The transformers class, and a forward over its parameters that is fast to train.

The class computes experts one after another and materialises a mask over all keys; here every expert runs on every
token in one product, queries attend by blocks of one window, and entries are pooled with one gather per layer: the same
function (`check` compares). Rows hold several documents, each with its own windows of entries from its first token on;
a document never sees another.

What the class does not say and training needs: the router's bias follows the load without a gradient; the indexer
learns, from inputs without a gradient, to give each entry the share of attention it gets from all heads together; and
until training is late every visible entry is attended to, then only those the indexer picks.
"""

import attention
import config
import streams
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

BOS = 0
TIED: dict[str, str] = {}
"""Parameters that are another one, and are not stored: none here."""
BIAS_STEP = 5e-3
STD = 0.05


def hash_table(layer: int) -> Tensor:
    """Return the experts of each token id in a hash layer (VOCAB, TOP_K): a different draw for every token."""
    generator = torch.Generator().manual_seed(1000 + layer)
    return torch.rand(config.VOCAB, config.EXPERTS, generator=generator).argsort(1)[:, : config.TOP_K].contiguous()


def build(seed: int) -> DeepseekV4ForCausalLM:
    """Make a float32 model with fresh weights; each site reads mostly one stream, and streams stay mostly apart."""
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM._from_config(
        DeepseekV4Config(**config.published_config()), attn_implementation="eager", dtype=torch.float32
    )
    deep = (2 * len(config.RATIOS)) ** -0.5
    for name, p in model.named_parameters():
        if name.endswith(("o_b_proj.weight", "down_proj.weight", "experts.down_proj")):
            nn.init.normal_(p, std=0.08 * deep)
        elif name.endswith(("_hc.fn", "hc_head.hc_fn")):
            nn.init.normal_(p, std=0.3)
        elif name.endswith("scale"):
            nn.init.constant_(p, 0.03)
        elif name.endswith("mlp.gate.weight"):
            nn.init.normal_(p, std=0.04)
        elif p.ndim >= 2 and not name.endswith("position_bias"):
            nn.init.normal_(p, std=STD)
    for number, layer in enumerate(model.model.layers):
        for site, part in enumerate((layer.attn_hc, layer.ffn_hc)):
            streams.set_base(part.base, 2 * number + site)
        if number < config.HASH_LAYERS:
            layer.mlp.gate.tid2eid.copy_(hash_table(number))
    return model


def route(gate: nn.Module, t: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return dense combine weights (T, E), float32, and each expert's share of the choices."""
    with torch.autocast(t.device.type, enabled=False):
        scores = F.softplus(F.linear(t.float(), gate.weight.float())).sqrt()
    hashed = hasattr(gate, "tid2eid")
    index = gate.tid2eid[ids] if hashed else (scores.detach() + gate.e_score_correction_bias).topk(config.TOP_K).indices
    picked = scores.gather(1, index)
    picked = picked / (picked.sum(-1, keepdim=True) + 1e-20) * config.SCALING
    dense = torch.zeros_like(scores).scatter_add(1, index, picked)
    share = torch.zeros_like(scores).scatter_add(1, index, torch.ones_like(picked)).mean(0) / config.TOP_K
    return dense, share


def gated(both: Tensor) -> Tensor:
    """Return the activation of the gate and up halves, both bounded."""
    gate, up = both.chunk(2, -1)
    return F.silu(gate.clamp(max=config.LIMIT)) * up.clamp(-config.LIMIT, config.LIMIT)


def feed_forward(
    u: Tensor, dense: Tensor, gate_up: Tensor, down: Tensor, shared_gate_up: Tensor, shared_down: Tensor
) -> Tensor:
    """Return what the routed and the shared experts make of normed tokens (T, D)."""
    hidden = gated(F.linear(u, gate_up.flatten(0, 1)).unflatten(-1, (config.EXPERTS, -1)))
    hidden = hidden * dense[..., None].to(hidden.dtype)
    routed = F.linear(hidden.flatten(-2), down.permute(1, 0, 2).flatten(1))
    return routed + F.linear(gated(F.linear(u, shared_gate_up)), shared_down)


def head(x: Tensor, hc: tuple[Tensor, Tensor, Tensor], norm: Tensor, weight: Tensor) -> Tensor:
    """Return the logits (B, L, V), float32, of streams (B, L, S, D)."""
    return F.linear(streams.rms(streams.collapse(x, *hc), norm), weight).float()


def cross_entropy(
    x: Tensor, hc: tuple[Tensor, Tensor, Tensor], norm: Tensor, weight: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    """Return the mean cross-entropy (nats) over targets, weighted."""
    losses = F.cross_entropy(head(x, hc, norm, weight).flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp_min(1)


class Trainer:
    """The compiled pieces of one model. `late` says that entries are picked as at run time."""

    def __init__(self, model: DeepseekV4ForCausalLM, *, compiled: bool) -> None:
        self.model = model
        self.late = True
        pieces = (streams.connect, streams.mix, attention.queries_and_rows, attention.entries, attention.attend,
                  attention.finish, feed_forward, cross_entropy)  # fmt: skip
        (self.connect, self.mix, queries_and_rows, entries, attend, finish, self.feed_forward, self.cross_entropy) = (
            torch.compile(piece, dynamic=False) if compiled else piece for piece in pieces
        )
        self.attention = attention.Attention(queries_and_rows, entries, attend, finish)

    def hidden(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the last streams, the indexers' summed loss, and the experts' shares per layer (L, E)."""
        base = self.model.model
        rows = attention.Rows(self.model, ids)
        x = base.embed_tokens(ids).float()[:, :, None].expand(-1, -1, config.STREAMS, -1).contiguous()
        index_loss = x.new_zeros(())
        shares = []
        for layer, rate in zip(base.layers, config.RATIOS, strict=True):
            u, post, comb = self.connect(x, *streams.weights(layer.attn_hc), layer.input_layernorm.weight)
            y, loss = self.attention(layer.self_attn, u, rows, rate, dtype, late=self.late)
            x = self.mix(x, y, post, comb)
            index_loss = index_loss + loss
            u, post, comb = self.connect(x, *streams.weights(layer.ffn_hc), layer.post_attention_layernorm.weight)
            part, flat = layer.mlp, u.flatten(0, 1)
            dense, share = route(part.gate, flat, ids.flatten())
            shared = part.shared_experts
            y = self.feed_forward(
                flat, dense, part.experts.gate_up_proj, part.experts.down_proj,
                torch.cat((shared.gate_proj.weight, shared.up_proj.weight)), shared.down_proj.weight,
            )  # fmt: skip
            x = self.mix(x, y.view_as(u), post, comb)
            shares.append(share)
        return x, index_loss, torch.stack(shares)

    def loss(self, ids: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cross-entropy, the indexers' loss and the shares; while training, move the routers' biases."""
        x, index_loss, shares = self.hidden(ids, dtype)
        loss = self.cross_entropy(x, *self._head(), targets, weights)
        if torch.is_grad_enabled():
            self.balance(shares.detach())
        return loss, index_loss, shares

    @torch.no_grad()
    def balance(self, shares: Tensor) -> None:
        """Raise the bias of experts chosen less than their even share, lower that of the others, by a step at most."""
        for layer, share in zip(self.model.model.layers, shares, strict=True):
            if not hasattr(layer.mlp.gate, "tid2eid"):
                layer.mlp.gate.e_score_correction_bias += BIAS_STEP * (1 - share / share.mean()).clamp_min(-1)

    def _head(self) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
        base = self.model.model
        return (
            (base.hc_head.hc_fn, base.hc_head.hc_base, base.hc_head.hc_scale),
            base.norm.weight,
            self.model.lm_head.weight,
        )

    def final(self, ids: Tensor) -> Tensor:
        """Return what the head multiplies (B, L, D), float32."""
        hc, norm, _ = self._head()
        return streams.rms(streams.collapse(self.hidden(ids, torch.float32)[0], *hc), norm)

    def logits(self, ids: Tensor, at: Tensor | None = None) -> Tensor:
        """Return the logits of every position (B, L, V), or of one position of each row (B, V), float32."""
        x = self.hidden(ids, torch.float32)[0]
        if at is not None:
            x = x[torch.arange(len(x), device=x.device), at]
        return head(x, *self._head())


@torch.no_grad()
def check(model: DeepseekV4ForCausalLM) -> float:
    """Return the largest difference of the logits from the transformers class, for a row of two documents."""
    length, split = 4 * config.WINDOW_TOKENS, 101
    ids = torch.randint(9, config.VOCAB, (1, length), generator=torch.Generator().manual_seed(0)).to(model.device)
    ids[0, 0] = ids[0, split] = BOS
    logits = Trainer(model, compiled=False).logits(ids)
    alone = [model(input_ids=part, use_cache=False).logits for part in (ids[:, :split], ids[:, split:])]
    return float((logits - torch.cat(alone, 1)).abs().max())
