# SPDX-License-Identifier: Apache-2.0
"""A runner of programs that answers from a table, and a loader of the repository's Ansible modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

MODULES = Path(__file__).parents[3] / "plugins" / "modules"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"module_{name}", MODULES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def answers(
    table: dict[str, tuple[int, str]], calls: list[str] | None = None
) -> Callable[[Sequence[str]], tuple[int, str]]:
    """Answer with the entry whose key the command line starts with, the longest first; else (127, "")."""

    def run(command: Sequence[str]) -> tuple[int, str]:
        line = " ".join(command)
        if calls is not None:
            calls.append(line)
        keys = [key for key in table if line.startswith(key)]
        return table[max(keys, key=len)] if keys else (127, "")

    return run
