"""`ablation_job.py MODEL DIRECTION RESULTS`: what the loader has in hand after the hook, without and with ablation.

RESULTS (torch.save): {"off" | "on": {class of a model: {name: weight}}, "refused": the sentence for another file,
"off_hook": whether nothing was put in vLLM's place while off, "metrics": [off, on]}.
"""

import gc
import hashlib
import os
import sys
from pathlib import Path

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING", ABLIT="0")

import torch  # noqa: E402
from glm_vllm_overlay.hooks import ablation  # noqa: E402
from vllm import LLM  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.model_executor.model_loader import base_loader  # noqa: E402

MODEL, DIRECTION, RESULTS = map(Path, sys.argv[1:])
SEEN: dict[str, dict[str, torch.Tensor]] = {}
ORIGINAL = base_loader.process_weights_after_loading


def look(model, *args, **kwargs):
    """In vLLM's place: what is loaded is kept for the test."""
    SEEN[type(model).__name__] = {
        name: parameter.detach().clone() for name, parameter in model.named_parameters() if "self_attn" in name
    }
    return ORIGINAL(model, *args, **kwargs)


def boot(settings: dict | None) -> dict:
    SEEN.clear()
    llm = LLM(
        str(MODEL),
        max_model_len=256,
        max_num_seqs=1,
        kv_cache_memory_bytes=32 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 0, "video": 0},
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
        additional_config={"ablation": settings} if settings else {},
    )
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return dict(SEEN)


def main() -> None:
    from prometheus_client import generate_latest

    base_loader.process_weights_after_loading = look
    settings = {
        "file": str(DIRECTION),
        "sha256": hashlib.sha256(DIRECTION.read_bytes()).hexdigest(),
        "layers": [1, 45],
        "alpha": 0.5,
    }
    results = {"off": boot(settings), "off_hook": base_loader.process_weights_after_loading is look}
    results["metrics"] = [generate_latest().decode()]
    os.environ["ABLIT"] = "1"
    for _ in range(2):  # vLLM may call it more than once
        ablation.register()
    results["on"] = boot(settings)
    results["metrics"].append(generate_latest().decode())
    try:
        boot(settings | {"sha256": "0" * 64})
        results["refused"] = ""
    except Exception as error:  # noqa: BLE001 - whatever ends the engine's start
        results["refused"] = str(error)
    torch.save(results, RESULTS)


if __name__ == "__main__":
    main()
