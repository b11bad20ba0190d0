"""Manifold-constrained hyper-connections (mHC): n residual streams mixed before and after each sub-layer.

Letters: T tokens, n streams, D hidden size. vLLM's own CPU version drops `norm_weight`, so the RMS norm before each
sub-layer would be lost without a word; this one applies it.
"""

import torch

from glm_vllm_twin.ops.norm import rms_norm


def mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates of one sub-layer and its input.

    `residual` is [T, n, D], `fn` [n*(2+n), n*D], `hc_scale` [3], `hc_base` [n*(2+n)]. Returns post [T, n, 1], comb [T,
    n, n] (doubly stochastic after the Sinkhorn rounds) and the sub-layer's input [T, D], normed if a weight is given.
    """
    n = residual.shape[-2]
    flat = residual.flatten(-2).float()
    mix = (flat @ fn.float().t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    pre = torch.sigmoid(mix[:, :n] * hc_scale[0] + hc_base[:n]) + hc_pre_eps
    post = torch.sigmoid(mix[:, n : 2 * n] * hc_scale[1] + hc_base[n : 2 * n]) * hc_post_mult_value
    comb = torch.softmax(mix[:, 2 * n :].view(-1, n, n) * hc_scale[2] + hc_base[2 * n :].view(n, n), -1)
    comb = comb + hc_sinkhorn_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_sinkhorn_eps)
    for _ in range(sinkhorn_repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_sinkhorn_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_sinkhorn_eps)
    collapsed = (pre[..., None] * residual.float()).sum(-2).to(residual.dtype)
    if norm_weight is not None:
        collapsed = rms_norm(collapsed, norm_weight, norm_eps)
    return post[..., None], comb, collapsed


def mhc_post(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    """Streams after a sub-layer: x [T, D] its output, residual [T, n, D]; both mixes as `mhc_pre` returned them."""
    mixed = torch.einsum("tij,tih->tjh", comb_res_mix.float(), residual.float())
    return (mixed + post_layer_mix.float() * x[:, None].float()).to(residual.dtype)


def mhc_post_pre(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mhc_post` of one sub-layer followed by `mhc_pre` of the next: streams, post, comb, next input."""
    residual = mhc_post(x, residual, post_layer_mix, comb_res_mix)
    gates = mhc_pre(
        residual,
        fn,
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
    )
    return residual, *gates
