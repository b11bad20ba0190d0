"""docs/engine.md: each flag and variable of the recipe has a verdict, each cited line of vLLM says what is claimed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/engine.md").read_text(encoding="utf-8")
VLLM = ROOT / ".cache/vllm-0.33.0/vllm"

# What the recipe sets on the command line, in its speculative configuration and in the environment.
NAMES = """
--served-model-name --host --port --tensor-parallel-size --nnodes --node-rank --headless --master-addr --master-port
--distributed-executor-backend --enable-prompt-tokens-details --tool-call-parser --enable-auto-tool-choice
--reasoning-parser --enable-prefix-caching --no-enable-flashinfer-autotune --quantization --max-model-len
--gpu-memory-utilization --max-num-seqs --max-num-batched-tokens --kv-cache-dtype --load-format --kv-cache-memory-bytes
--cudagraph-capture-sizes --chat-template --limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb
--skip-mm-profiling --enforce-eager --language-model-only --long-prefill-token-threshold --prefix-match-unit
--default-chat-template-kwargs --media-io-kwargs --speculative-config
method model num_speculative_tokens kv_cache_dtype draft_sample_method rejection_sample_method
draft_tensor_parallel_size
NCCL_IB_DISABLE NCCL_IB_ROCE_VERSION_NUM NCCL_NET NCCL_NET_PLUGIN NCCL_NVLS_ENABLE NCCL_CUMEM_ENABLE
NCCL_IB_MERGE_NICS NCCL_CROSS_NIC NCCL_IGNORE_CPU_AFFINITY NCCL_DEBUG NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS
NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME NCCL_IB_HCA NCCL_IB_GID_INDEX VLLM_HOST_IP
HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_HOME VLLM_CACHE_ROOT VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
VLLM_ENGINE_READY_TIMEOUT_S VLLM_NO_USAGE_STATS DO_NOT_TRACK VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
PYTORCH_CUDA_ALLOC_CONF TORCH_CUDA_ARCH_LIST FLASHINFER_CUDA_ARCH_LIST FLASHINFER_DISABLE_VERSION_CHECK
TRITON_CACHE_DIR TILELANG_CACHE_DIR VLLM_PREFIX_CACHE_RETENTION_INTERVAL VLLM_PREFIX_CACHE_RETENTION_INTERVAL_SWA
INSTANTTENSOR_* VLLM_API_KEY
EXL3_FUSED_MOE EXL3_FAT_KERNEL EXL3_FAT_GROUPED EXL3_FAT_SORTED EXL3_FAT_BATCHED EXL3_TEMP_ROWS_FUSED
EXL3_MOE_ROW_TILE GLM53_EXL3_MOE_FAST GLM53_COOP_GEOMETRY GLM53_DENSE_FP8 GLM53_KDA_BF16_LARGE_M GLM53_DENSE_EXL3
GLM53_ADAPTIVE_K GLM53_MIXED_PREFILL_CHUNK GLM53_APC_NO_STORE GLM53_APC_RETENTION_INTERVAL GLM53_APC_RETENTION_SWA
GLM53_DRAFT_KV_COMPACT GLM53_INDEXER_WORKSPACE GLM53_SPINWAIT_MS GLM53_KV_CAPACITY_LOG
GLM53_SUPPRESS_STOPS_IN_REASONING GLM53_DEFAULT_REASONING_EFFORT GLM53_EXPOSE_CACHE_RESET GLM53_EXTRA_ENV
GLM53_LOAD_CLONE GLM53_LOAD_PREFETCH GLM53_COLD_LOAD_UMA GLM53_COLD_LOAD_STAGE_MMAP
ABLIT ABLIT_METHOD ABLIT_LAYERS ABLIT_ALPHA ABLIT_DIRECTION ABLIT_INCLUDE_MTP ABLIT_DIR
""".split()
ROWS = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (.+) \|$", PAGE, re.MULTILINE)
# `file.py:12` `name`, the name being what stands on that line.
CITED = re.findall(r"`([\w/]+\.py):(\d+)`(?: `(\w+)`)?", PAGE)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_one_verdict(name):
    """One row each, with a reason."""
    (row,) = [row for row in ROWS if row[0] == name]
    assert row[1] in ("kept", "native now", "dropped because") and len(row[2]) > 6


def test_native_now_is_cited():
    """A claim about vLLM has a line of vLLM, or the row that has one."""
    for name, verdict, reason in ROWS:
        if verdict == "native now":
            assert re.search(r"\.py:\d+`", reason) or reason.startswith("see `"), name


def test_what_we_set_is_told():
    """The unit's variables and the fabric's are on the page, each by its name."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "roles/glm-vllm-overlay/vars/main").glob("*.yml")]
    ours = set(
        re.findall(r"^\s+((?:VLLM|NCCL|HF|TORCH|FLASHINFER|PYTORCH|TRITON)_\w+):", "\n".join(texts), re.MULTILINE)
    )
    code = (ROOT / "files/overlay/src/glm_vllm_overlay/node/fabric.py").read_text(encoding="utf-8")
    ours |= set(re.findall(r'"((?:NCCL|GLOO|TP|VLLM)_[A-Z_]+)":', code))
    told = {"NCCL_IB_ADDR_FAMILY", "VLLM_CPU_OMP_THREADS_BIND", "FLASHINFER_WORKSPACE_BASE"}
    assert len(ours) > 20 and {name for name in ours - told if name not in PAGE} == set()


@pytest.mark.parametrize(("file", "line", "name"), CITED)
def test_cited_lines_say_so(file, line, name):
    """The pinned wheel has that file, and near that line that name."""
    if not VLLM.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs .cache/vllm-0.33.0: run `make setup`")
    lines = (VLLM / file).read_text(encoding="utf-8").splitlines()
    near = "\n".join(lines[max(0, int(line) - 3) : int(line) + 2])
    assert name and int(line) <= len(lines) and name in near
