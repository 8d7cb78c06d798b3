"""The transformers class, and a forward over its parameters that is fast to train.

The class computes experts one after another; here every expert runs on every token in one product, and the router's
zeros drop what was not chosen: the same function (`check` compares), four times the arithmetic, far fewer launches.
Sliding layers attend in blocks of one window. Rows hold several documents; a document never sees another.
"""

import config
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM

BOS = 2
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Parameters that are another one, and are not stored."""


def build(seed: int) -> Gemma4ForCausalLM:
    """Make a float32 model with fresh weights; `layer_scalar` becomes a trained parameter."""
    torch.manual_seed(seed)
    model = Gemma4ForCausalLM._from_config(
        Gemma4TextConfig(**config.text_config()), attn_implementation="eager", dtype=torch.float32
    )
    for layer in model.model.layers:
        del layer.layer_scalar
        layer.layer_scalar = nn.Parameter(torch.ones(1))
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            nn.init.constant_(norm.weight, layer.self_attn.head_dim**-0.25)  # scores are not divided by sqrt(head_dim)
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            nn.init.constant_(norm.weight, 0.5)
        nn.init.normal_(layer.router.proj.weight, std=0.5)
    return model


class Masks:
    """Additive attention masks of one batch, and the rotary tables of both kinds of layer."""

    def __init__(self, model: Gemma4ForCausalLM, ids: Tensor, dtype: torch.dtype) -> None:
        rows, length = ids.shape
        window = config.WINDOW_TOKENS
        document = (ids == BOS).cumsum(1)
        place = torch.arange(length, device=ids.device)
        seen = (document[:, :, None] == document[:, None, :]) & (place[:, None] >= place)
        self.full = _additive(seen, dtype)[:, None]
        blocks = length // window
        query = place.view(blocks, window)
        key = torch.cat((query - window, query), 1)
        near = (
            (query[:, :, None] >= key[:, None, :])
            & (query[:, :, None] - key[:, None, :] < window)
            & (key[:, None] >= 0)
        )
        doc_keys = document[:, key.clamp_min(0)]
        same = document.view(rows, blocks, window)[..., None] == doc_keys[:, :, None, :]
        self.sliding = _additive(same & near, dtype).flatten(0, 1)[:, None]
        position = place[None]
        probe = torch.zeros(1, device=ids.device)
        self.rotary = {kind: model.model.rotary_emb(probe, position, kind) for kind in set(config.LAYER_TYPES)}


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -1e30)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return x * cos[:, :, None] + torch.cat((-two, one), -1) * sin[:, :, None]


def _attention(layer: nn.Module, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, *, sliding: bool) -> Tensor:
    part = layer.self_attn
    rows, length, _ = x.shape
    shape = (rows, length, -1, part.head_dim)
    query = part.q_norm(part.q_proj(x).view(shape))
    raw_key = part.k_proj(x).view(shape)
    value = part.v_norm(part.v_proj(x).view(shape) if sliding else raw_key)
    key = part.k_norm(raw_key)
    query = _rotate(query, cos, sin).to(value.dtype)
    key = _rotate(key, cos, sin).to(value.dtype)
    groups = config.HEADS // key.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)))
    if sliding:
        window = config.WINDOW_TOKENS
        blocks = length // window
        q = q.unflatten(2, (blocks, window)).transpose(1, 2).flatten(0, 1)
        k, v = (_with_previous(t.unflatten(2, (blocks, window)).transpose(1, 2)).flatten(0, 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous(), attn_mask=mask, scale=1.0)
    if sliding:
        out = out.unflatten(0, (rows, blocks)).transpose(1, 2).flatten(2, 3)
    return part.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


def _with_previous(x: Tensor) -> Tensor:
    """Put the block before in front of each block: (B, n, H, W, D) -> (B, n, H, 2W, D)."""
    return torch.cat((F.pad(x[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)), x), 3)


def _route(router: nn.Module, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dense combine weights (T, E), the load balancing loss, and each expert's share of the choices."""
    scores = router.proj(router.norm(h) * router.scale * router.scalar_root_size)
    probabilities = scores.float().softmax(-1)
    picked, index = probabilities.topk(config.TOP_K, -1)
    picked = picked / picked.sum(-1, keepdim=True) * router.per_expert_scale[index]
    dense = torch.zeros_like(probabilities).scatter(-1, index, picked)
    share = torch.zeros_like(probabilities).scatter(-1, index, 1.0 / config.TOP_K).mean(0)
    return dense, config.EXPERTS * (share * probabilities.mean(0)).sum(), share


def _experts(experts: nn.Module, t: Tensor, dense: Tensor) -> Tensor:
    gate, up = F.linear(t, experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (config.EXPERTS, -1)).chunk(2, -1)
    hidden = F.gelu(gate, approximate="tanh") * up * dense[..., None].to(up.dtype)
    return F.linear(hidden.flatten(-2), experts.down_proj.permute(1, 0, 2).flatten(1))


def block(
    layer: nn.Module, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, sliding: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one decoder layer; returns its output, its load balancing loss and the experts' shares."""
    attended = _attention(layer, layer.input_layernorm(x), mask, cos, sin, sliding=sliding)
    h = x + layer.post_attention_layernorm(attended)
    flat = h.flatten(0, 1)
    shared = layer.post_feedforward_layernorm_1(layer.mlp(layer.pre_feedforward_layernorm(h)))
    dense, balance, share = _route(layer.router, flat)
    routed = _experts(layer.experts, layer.pre_feedforward_layernorm_2(flat), dense)
    routed = layer.post_feedforward_layernorm_2(routed).view_as(h)
    return (h + layer.post_feedforward_layernorm(shared + routed)) * layer.layer_scalar, balance, share


def head(model_norm: nn.Module, embedding: Tensor, x: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the mean cross-entropy (nats) over targets, weighted."""
    logits = F.linear(model_norm(x), embedding).float()
    logits = config.SOFTCAP * torch.tanh(logits / config.SOFTCAP)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp_min(1)


class Trainer:
    """The compiled pieces of one model."""

    def __init__(self, model: Gemma4ForCausalLM, *, compiled: bool) -> None:
        self.model = model
        self.block = torch.compile(block, dynamic=False) if compiled else block
        self.head = torch.compile(head, dynamic=False) if compiled else head

    def hidden(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the last residual stream, the summed balancing loss and the shares per layer (L, E)."""
        base = self.model.model
        masks = Masks(self.model, ids, dtype)
        x = base.embed_tokens(ids)
        balances, shares = [], []
        for layer, kind in zip(base.layers, config.LAYER_TYPES, strict=True):
            sliding = kind == "sliding_attention"
            x, balance, share = self.block(
                layer, x, masks.sliding if sliding else masks.full, *masks.rotary[kind], sliding
            )
            balances.append(balance)
            shares.append(share)
        return x, torch.stack(balances).sum(), torch.stack(shares)

    def loss(self, ids: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cross-entropy, the balancing loss and the shares."""
        x, balance, shares = self.hidden(ids, dtype)
        return (
            self.head(self.model.model.norm, self.model.model.embed_tokens.weight, x, targets, weights),
            balance,
            shares,
        )


@torch.no_grad()
def check(model: Gemma4ForCausalLM) -> float:
    """Return the largest difference of the logits from the transformers class on one random document."""
    ids = torch.randint(108, config.VOCAB, (1, 3 * config.WINDOW_TOKENS), generator=torch.Generator().manual_seed(0))
    ids[0, 0] = BOS
    ids = ids.to(model.device)
    x, _, _ = Trainer(model, compiled=False).hidden(ids, torch.float32)
    logits = config.SOFTCAP * torch.tanh(model.lm_head(model.model.norm(x)) / config.SOFTCAP)
    return float((logits - model(input_ids=ids, use_cache=False).logits).abs().max())
