"""vLLM's Glm5Next classes, with every GPU-only operator they call replaced by its plain-torch counterpart.

`general_plugin()` imports this module in every process of vLLM; importing it makes the replacements, in memory.
Each replacement names the module that looks the operator up, so a renamed operator fails at import with its name.
"""

from types import ModuleType

from vllm.model_executor.layers import mhc as mhc_layers
from vllm.model_executor.layers import mla as mla_layers
from vllm.models.glm5next import Glm5NextForCausalLM, Glm5NextForConditionalGeneration, Glm5NextMTP
from vllm.models.glm5next.common import attention, kda, mtp
from vllm.models.glm5next.nvidia.sparse_indexer import SparseAttnIndexerKpool
from vllm.v1.attention.backends.mla.indexer import Glm5NextIndexerBackend, KpoolTailBackend

from glm_vllm_twin.indexer import KpoolMetadataBuilder, indexer_forward
from glm_vllm_twin.ops import conv, kpool, mhc, norm
from glm_vllm_twin.ops import kda as kda_ops

# As the checkpoint's configuration and vLLM's speculative configuration name them.
ARCHITECTURES = {
    "Glm5NextForConditionalGeneration": Glm5NextForConditionalGeneration,
    "Glm5NextForCausalLM": Glm5NextForCausalLM,
    "Glm5NextMTPModel": Glm5NextMTP,
}


class _ScatterStates:
    """vLLM's operator is an object whose GPU kernel can be warmed up."""

    def register_warmup(self, *_: object, **__: object) -> None:
        pass

    __call__ = staticmethod(kda_ops.scatter_states)


def _replace(owner: ModuleType | type, name: str, new: object) -> None:
    getattr(owner, name)
    setattr(owner, name, new)


_replace(kda, "chunk_kda_with_fused_gate", kda_ops.chunk_kda_with_fused_gate)
_replace(kda, "fused_recurrent_kda", kda_ops.fused_recurrent_kda)
_replace(kda, "gather_initial_states", kda_ops.gather_initial_states)
_replace(kda, "scatter_states", _ScatterStates())
_replace(kda, "causal_conv1d_fn", conv.causal_conv1d_fn)
_replace(kda, "causal_conv1d_update", conv.causal_conv1d_update)
_replace(attention, "fwht128_quant_fp8", kpool.rotate_and_quantise)
_replace(mla_layers, "fused_q_kv_rmsnorm", norm.fused_q_kv_rmsnorm)
_replace(mtp, "fused_eh_norm", norm.fused_eh_norm)
_replace(mhc_layers.MHCPreOp, "forward_cpu", lambda self, *args, **kwargs: mhc.mhc_pre(*args, **kwargs))
_replace(mhc_layers.MHCPostOp, "forward_cpu", lambda self, *args, **kwargs: mhc.mhc_post(*args, **kwargs))
_replace(mhc_layers.MHCFusedPostPreOp, "forward_cpu", lambda self, *args, **kwargs: mhc.mhc_post_pre(*args, **kwargs))
_replace(SparseAttnIndexerKpool, "forward_native", indexer_forward)
_replace(Glm5NextIndexerBackend, "get_builder_cls", staticmethod(lambda: KpoolMetadataBuilder))
_replace(KpoolTailBackend, "get_builder_cls", staticmethod(lambda: KpoolMetadataBuilder))

_indexer_init = attention.Indexer.__init__


def _init_indexer(self: attention.Indexer, *args: object, **kwargs: object) -> None:
    _indexer_init(self, *args, **kwargs)
    # vLLM's CPU linear layer repacks its weight and empties the original, which the indexer's forward pass reads.
    self.wk_weights_proj._cpu_skip_gemm_dispatch = True


_replace(attention.Indexer, "__init__", _init_indexer)
