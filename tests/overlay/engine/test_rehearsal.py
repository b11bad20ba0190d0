"""`glm-vllm build --rehearsal` with the twin's engine: it starts without weights and answers every prompt.

A CPU compiles nothing that would be listed, and that is what the command then says. What a GPU compiles: ../../gpu.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from glm_vllm_overlay.node import release

pytestmark = pytest.mark.full  # an engine start; the rest is in tests/unit/test_rehearsal.py

SERVED = {
    "additional-config": {"exl3_backend": "reference"},
    "distributed-executor-backend": "mp",
    "enforce-eager": True,
    "kv-cache-memory-bytes": 1 << 34,
    "limit-mm-per-prompt": {"image": 0, "video": 0},
    "load-format": "auto",
    "master-addr": "192.0.2.11",
    "max-model-len": 1024,
    "max-num-batched-tokens": 256,
    "max-num-seqs": 2,
    "model-loader-extra-config": {"enable_weights_track": True},
    "nnodes": 2,
    "no-enable-prefix-caching": True,
    "quantization": "exl3",
    "tensor-parallel-size": 2,
}


def test_the_twins_engine_gets_through(checkpoint, tmp_path: Path) -> None:
    """Fails when random experts are refused, a width is not divided, a link leads nowhere, or a prompt does not fit."""
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    options = SERVED | {"model": str(checkpoint("random"))}
    text = "".join(f"{key}: {json.dumps(json.dumps(value)) if isinstance(value, dict) else json.dumps(value)}\n"
                   for key, value in options.items())  # fmt: skip
    (tmp_path / "serve.yaml").write_text(text)
    environment = {name: str(tmp_path / "r1-0123abcd" / name) for name in release.SHAPED} | {
        "CUDA_HOME": str(tmp_path / "cuda"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "glm_vllm_overlay", "build", "--json", f"--rehearsal={tmp_path}/serve.yaml"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    said = json.loads(done.stdout.splitlines()[-1])["message"]
    assert said.startswith(f"the rehearsal left nothing in {tmp_path}/r1-0123abcd"), done.stderr[-3000:]
    assert "the experts are random numbers, and no tensor was counted" in done.stderr
    assert not list(Path(tmp_path).glob("r1-0123abcd/rehearsal.*"))
