"""What runs on the Python of the pinned vLLM 0.33.0, on no device: one process a session, its imports are slow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PINNED = ROOT / ".cache/vllm-0.33.0"
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints that are all headers: the target as it is, one that is no such model, and the drafter."""
    import model

    folder = tmp_path_factory.mktemp("headers")
    return {"target": model.write_target(folder / "target"), "drafter": model.write_drafter(folder / "drafter")}


@pytest.fixture(scope="session")
def found(models, tmp_path_factory) -> dict:
    """The answers of pinned_job.py."""
    if not (PINNED / "vllm").is_dir():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs .cache/vllm-0.33.0: run `make setup`")
    home = tmp_path_factory.mktemp("home")
    environment = os.environ | {
        "PYTHONPATH": f"{PINNED}:{ROOT}/files/overlay/src:{ROOT}/tests/gpu:{HERE}",
        "HOME": str(home),
        "GLM_ROOT": str(home),
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "64",
    }
    command = [sys.executable, str(HERE / "pinned_job.py"), *map(str, models.values())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
