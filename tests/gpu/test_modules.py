"""A FlashInfer module that was compiled ahead is used as it is: the second process compiles nothing.

`sampling` stands for the three: it is built for every GPU, `sparse_mla_sm120` for SM12x only. Not yet run.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from glm_vllm_overlay.node.release import compiled_since, machine_code

SOURCES = Path(__file__).parents[2] / "files/overlay/src"
BUILD = """
from glm_vllm_overlay import cli, modules
modules.NEEDED = {"sampling": modules.NEEDED["sampling"]}
raise SystemExit(cli.main(["build", "--modules"]))
"""
USE = """
import flashinfer, torch
probabilities = torch.softmax(torch.randn(4, 1000, device="cuda"), -1)
print(flashinfer.sampling.top_p_sampling_from_probs(probabilities, 0.9))
"""


def test_what_is_compiled_ahead_is_not_compiled_again(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    environment = os.environ | {
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "FLASHINFER_CUDA_ARCH_LIST": f"{major}.{minor}{'a' if major >= 9 else ''}",
        "PYTHONPATH": f"{SOURCES}:{os.environ.get('PYTHONPATH', '')}",
    }
    subprocess.run([sys.executable, "-c", BUILD], env=environment, check=True, timeout=900)
    before = machine_code(environment)
    assert [file.name for file in before] == ["sampling.so"]
    subprocess.run([sys.executable, "-c", USE], env=environment, check=True, timeout=300)
    assert compiled_since(before, environment) == "compiled nothing at this start"
