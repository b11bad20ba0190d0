"""RMS norm and the two places where the architecture fuses it with something else."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, computed in float32, returned in x's type."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def fused_q_kv_rmsnorm(
    q: torch.Tensor, kv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms of the two MLA latents: q [T, q_lora_rank], kv [T, kv_lora_rank]."""
    return rms_norm(q, q_weight, eps), rms_norm(kv, kv_weight, eps)


def fused_eh_norm(
    positions: torch.Tensor,
    embeddings: torch.Tensor,
    previous: torch.Tensor,
    e_weight: torch.Tensor,
    h_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Input of the MTP layer, [T, 2*hidden]: normed embedding (zero at position 0), normed previous state."""
    embeddings = embeddings.masked_fill((positions == 0)[:, None], 0)
    return torch.cat([rms_norm(embeddings, e_weight, eps), rms_norm(previous, h_weight, eps)], -1)
