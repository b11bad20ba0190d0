"""A scheduler whose prefill chunks end on whole pools of the indexer: `--scheduler-cls` of vLLM's engine core.

The pooled indexer stores one key for each `index_kpool` tokens, and its prefill kernel builds a key from the tokens of
the running batch alone. A chunk that ends inside a pool leaves that pool's first tokens behind. vLLM's own scheduler
ends chunks on KV blocks where a block fits a step; this one also keeps every other end on a pool: a step smaller than a
block, prefix caching off, a prompt that the encoder's budget cuts.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from glm_vllm_overlay.hooks import compat

logger = init_logger("vllm.glm_vllm_overlay.scheduler")


def pool_aligned(start: int, tokens: int, prefill_end: int, pool: int) -> int:
    """Tokens of the chunk [start, start + tokens) after its end was brought back to a multiple of `pool`.

    The last chunk of a prefill (it reaches `prefill_end`) and decoding (it starts there) are left as they are. 0 means
    that the chunk waits for a step with more room.
    """
    end = start + tokens
    if start >= prefill_end or end >= prefill_end:
        return tokens
    return max(0, end // pool * pool - start)


class PoolAlignedScheduler(AsyncScheduler):
    """AsyncScheduler, its non-final chunk ends on whole pools; `unaligned_ends` counts those that are not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        compat.require("scheduler")
        super().__init__(*args, **kwargs)
        self.pool = int(getattr(self.vllm_config.model_config.hf_text_config, "index_kpool", None) or 1)
        self.unaligned_ends = 0
        # vLLM asks for a chunk's end only where the recurrent states are cached; pools need it always.
        self.ends_on_blocks = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split = True

    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        computed = num_new_local_computed_tokens, num_external_computed_tokens
        if self.ends_on_blocks:
            num_new_tokens = super()._mamba_block_aligned_split(request, num_new_tokens, *computed)
        return self._aligned(request, request.num_computed_tokens + sum(computed), num_new_tokens)

    def _try_schedule_encoder_inputs(self, request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any) -> Any:
        inputs, tokens, *rest = super()._try_schedule_encoder_inputs(request, num_computed_tokens, *args, **kwargs)
        return inputs, self._aligned(request, num_computed_tokens, tokens), *rest

    def _aligned(self, request: Any, start: int, tokens: int) -> int:
        # As vLLM has it: a resumed request prefills its own answer too.
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        return pool_aligned(start, tokens, prefill_end, self.pool)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]
            if request.is_prefill_chunk and request.num_computed_tokens % self.pool:
                self.unaligned_ends += 1
                logger.warning_once("a prefill chunk ended inside a pool of the indexer: please report this")
