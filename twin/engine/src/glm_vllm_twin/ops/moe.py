"""Routed experts in plain torch, with the clamp that vLLM's bf16 CPU kernel leaves out."""

import torch
import torch.nn.functional as F


def swiglu(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """SwiGLU of [..., 2*I], gate first. With a limit the gate is clamped from above and the up half on both sides."""
    gate, up = gate_up.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def routed_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """Weighted sum over each token's experts, [T, H] in x's type, accumulated in float32.

    x is [T, H]; w13 [E, 2*I, H]; w2 [E, H, I]; weights and ids [T, top_k]. Ids outside [0, E) are other ranks' experts.
    """
    out = torch.zeros(x.shape, dtype=torch.float32)
    tokens = x.float()
    for expert in range(w13.shape[0]):
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        hidden = swiglu(tokens[token] @ w13[expert].float().t(), limit)
        out.index_add_(0, token, hidden @ w2[expert].float().t() * topk_weights[token, choice, None].float())
    return out.to(x.dtype)
