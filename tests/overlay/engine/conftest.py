"""The tiny checkpoints' decoded weights, and vLLM's answers, each computed once a session."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
# A second thread slows these small matrices down, by a factor of twenty on a busy machine.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of this session's prompts; GLM_TEST_SEED repeats a session."""
    value = int(os.environ.get("GLM_TEST_SEED") or secrets.randbelow(2**31))
    print(f"\nGLM_TEST_SEED={value}")
    return value


@pytest.fixture(scope="session")
def decoded(checkpoint, tmp_path_factory: pytest.TempPathFactory):
    """Decoder of checkpoints, for Hugging Face, which knows no EXL3: decoded("chain") is its folder, in float32."""
    from glm_vllm_overlay.exl3.checkpoint import unpack_experts
    from safetensors.torch import load_file, save_file

    root, written = tmp_path_factory.mktemp("decoded"), {}

    def get(kind: str) -> Path:
        if kind not in written:
            source, folder = checkpoint(kind), root / kind
            folder.mkdir()
            state = unpack_experts(load_file(source / "model.safetensors"))
            state = {name: tensor.float() for name, tensor in state.items()}
            save_file(state, folder / "model.safetensors", {"format": "pt"})
            config = json.loads((source / "config.json").read_text())
            del config["quantization_config"]
            (folder / "config.json").write_text(json.dumps(config))
            written[kind] = folder
        return written[kind]

    return get


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory):
    """Runner of engine_job.py: engine([job, ...]) is {name: result}; each rank gets a CPU of its own."""

    def run(jobs: list[dict], ranks: int = 1, timeout: float = 600) -> dict:
        folder = tmp_path_factory.mktemp("engine")
        (folder / "jobs.json").write_text(json.dumps(jobs))
        environment = os.environ | ONE_THREAD
        if ranks > 1:
            cpus = sorted(os.sched_getaffinity(0))
            binding = "|".join(map(str, cpus[:ranks])) if len(cpus) >= ranks else "nobind"
            environment["VLLM_CPU_OMP_THREADS_BIND"] = binding
        command = [sys.executable, str(HERE / "engine_job.py"), str(folder / "jobs.json"), str(folder / "results.json")]
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        assert finished.returncode == 0, finished.stderr[-4000:]
        return json.loads((folder / "results.json").read_text())

    return run
