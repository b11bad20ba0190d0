# SPDX-License-Identifier: Apache-2.0
"""Load a Python file of this repository by its path: Ansible puts no folder of ours on the import path.

That holds for this file too, so a plugin takes it up with
`load = runpy.run_path(str(Path(__file__).resolve().parents[1] / "controller/own_code.py"))["load"]`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[2]


def load(file: str) -> ModuleType:
    """The module of a file, given relative to the repository; each is executed once a process. Raises OSError."""
    name = "glm_" + file.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, REPOSITORY / file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up here while it is executed
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
