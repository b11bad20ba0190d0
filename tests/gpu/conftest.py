"""Needs a CUDA device and the built kernels ($GLM_EXL3_LIBRARY): tests/gpu/run_all.sh builds and runs them."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "files/overlay/src"))
sys.path.insert(0, str(Path(__file__).parents[2] / "files/overlay/benchmarks"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
