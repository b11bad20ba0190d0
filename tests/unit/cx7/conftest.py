# SPDX-License-Identifier: Apache-2.0
"""The plugins of cx7-network, and the recorded outputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from ansible import module_utils

ROOT = Path(__file__).parents[3]
# As ansible.cfg does: the node program's own parts are ansible.module_utils.node.*
module_utils.__path__.append(str(ROOT / "files/overlay/src/glm_vllm_overlay"))


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "plugins" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plugin():
    return load


@pytest.fixture
def fixtures() -> Path:
    return ROOT / "tests/fixtures"
