"""rehearsal_job.py TARGET DRAFTER WORK: what the pinned vLLM's parser makes of a rehearsal's options, as JSON."""

import contextlib
import json
import sys
from pathlib import Path

from glm_vllm_twin import torchvision_ops

torchvision_ops.declare()  # vLLM imports the registry's torchvision, whose compiled half needs CUDA

from glm_vllm_overlay import rehearsal  # noqa: E402
from glm_vllm_overlay.node.check_config import read_config  # noqa: E402

SERVED = Path(__file__).parents[2] / "golden/sparks/spark-a/etc/glm-vllm/serve.yaml"
FACTS = (
    "load_format",
    "tensor_parallel_size",
    "distributed_executor_backend",
    "kv_cache_memory_bytes",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "quantization",
    "cudagraph_capture_sizes",
    "additional_config",
    "speculative_config",
)


def main() -> None:
    target, drafter, work = map(Path, sys.argv[1:])
    served = read_config(SERVED) | {"model": str(target)}
    text, answers = SERVED.read_text(), {}
    for speculator in ("none", "mtp", "dflash2"):
        model, small = rehearsal.write_models(served, drafter if speculator == "dflash2" else None, work / speculator)
        found = rehearsal.engine_arguments(rehearsal.options(served, model), speculator, small, text)
        answers[speculator] = {name: getattr(found, name) for name in FACTS} | {
            "model": found.model == str(model),
            "sparse": json.loads((model / "config.json").read_text())["text_config"]["mlp_layer_types"].count("sparse"),
        }
    print(json.dumps(answers), file=sys.__stdout__)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        main()
