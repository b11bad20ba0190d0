"""What each rank keeps of a checkpoint, from its file headers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from glm_vllm_overlay.inspect import Checkpoint

# Tensors that vLLM's layers of this model and of its drafter divide among the ranks. Everything else is held by each
# rank: low-rank inputs, router, indexer, norms, residual streams.
SPLIT = re.compile(
    r"\.(?:[qkvbo]_proj|qkv(?:_proj)?|q_b_proj|kv_b_proj|[fg]_b_proj|gate_proj|up_proj|down_proj|[qkv]_conv1d"
    r"|embed_tokens)\.(?:weight|bias)$|(?:^|\.)lm_head\.weight$|\.(?:dt_bias|A_log)$"
)
INDEXER = re.compile(r"\.indexer\.")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class RankWeights:
    """Bytes on one rank."""

    experts: int
    dense: int

    @property
    def total(self) -> int:
        return self.experts + self.dense


def on_a_rank(checkpoint: Checkpoint, tp: int, layers: int | None = None) -> RankWeights:
    """Weights on each of `tp` ranks. layers: how many decoder layers are loaded, None for all that are stored."""
    dense = 0
    for name, size in checkpoint.native.items():
        match = LAYER.search(name)
        # The vision tower numbers layers of its own, and they are always loaded.
        if layers is not None and match and int(match[1]) >= layers and "visual" not in name:
            continue
        dense += -(-size // tp) if SPLIT.search(name) and not INDEXER.search(name) else size
    return RankWeights(checkpoint.expert_bytes(tp, layers), dense)
