"""The residual's streams: how a sublayer reads them, and how its result and they themselves make the next ones.

All of it in float32, whatever the rest runs in. Shapes: streams (B, L, S, D), `post` (B, L, S), `comb` (B, L, S, S).
"""

import config
import torch
import torch.nn.functional as F
from torch import Tensor, nn

S = config.STREAMS


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return `x` over its root mean square along the last axis, float32, times `weight` if there is one."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.EPS)
    return x if weight is None else x * weight


def weights(part: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parameters of one site."""
    return part.fn, part.base, part.scale


@torch.no_grad()
def set_base(base: Tensor, site: int) -> None:
    """Start a site so that it reads mostly stream `site` modulo S, writes to all, and leaves streams mostly apart."""
    pre, post, comb = base.split([S, S, S * S])
    pre.fill_(-2.0)[site % S] = 1.0
    post.copy_(0.5 * torch.randn(S))
    comb.copy_(3.0 * torch.eye(S).flatten())


def sinkhorn(comb: Tensor) -> Tensor:
    """Make matrices (..., S, S) of positive numbers nearly doubly stochastic: rows and columns in turn, columns last."""
    eps = config.HC_EPS
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(config.SINKHORN_STEPS - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def connect(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normed input of a sublayer (B, L, D), and how to mix its result with the streams."""
    with torch.autocast(x.device.type, enabled=False):
        m = F.linear(rms(x.flatten(-2)), fn)
        pre, post, comb = m.split([S, S, S * S], -1)
        pre_base, post_base, comb_base = base.split([S, S, S * S])
        pre = torch.sigmoid(pre * scale[0] + pre_base) + config.HC_EPS
        post = 2 * torch.sigmoid(post * scale[1] + post_base)
        comb = (comb * scale[2] + comb_base).unflatten(-1, (S, S)).softmax(-1) + config.HC_EPS
        u = sum(pre[..., j, None] * x[..., j, :] for j in range(S))
        return rms(u, norm), post, sinkhorn(comb)


def mix(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the next streams: the sublayer's result to each by `post`, the old ones by `comb`, first index summed."""
    kept = sum(comb[..., j, :, None] * x[..., j, None, :] for j in range(S))
    return post[..., None] * y.float()[..., None, :] + kept


def collapse(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    """Return the one stream that the head reads (B, L, D)."""
    with torch.autocast(x.device.type, enabled=False):
        w = torch.sigmoid(F.linear(rms(x.flatten(-2)), fn) * scale + base) + config.HC_EPS
        return sum(w[..., j, None] * x[..., j, :] for j in range(S))
