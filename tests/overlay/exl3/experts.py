"""A small layer of packed experts, for the tests of the backends."""

import torch
from glm_vllm_overlay.exl3.execute import Experts

EXPERTS, HIDDEN, WIDTH, TOP_K = 5, 256, 128, 2


def make_experts(**change: object) -> Experts:
    generator = torch.Generator().manual_seed(0)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-32768, 32768, shape, dtype=torch.int16, generator=generator)

    def scale(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).half()

    fields = {
        "bits": 4,
        "codebook": "mcg",
        "limit": 0.2,
        "w13_trellis": words(EXPERTS, 2, HIDDEN // 16, WIDTH // 16, 64),
        "w13_suh": scale(EXPERTS, 2, HIDDEN),
        "w13_svh": scale(EXPERTS, 2, WIDTH) * 20,
        "w2_trellis": words(EXPERTS, WIDTH // 16, HIDDEN // 16, 64),
        "w2_suh": scale(EXPERTS, WIDTH),
        "w2_svh": scale(EXPERTS, HIDDEN),
    }
    return Experts(**{**fields, **change})
