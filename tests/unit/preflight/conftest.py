"""Inventories as plain data, held against the roles' own argument_specs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[3]


def load(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def rules() -> ModuleType:
    return load("glm_inventory_rules", "plugins/controller/inventory_rules.py")


@pytest.fixture(scope="session")
def schema(rules) -> Any:
    return load("glm_inventory_check", "plugins/action/inventory_check.py").schema(rules, REPOSITORY / "roles")


@pytest.fixture(scope="session")
def sparks() -> dict[str, Any]:
    """Every variable that inventory/sparks sets."""
    values: dict[str, Any] = {}
    for file in sorted((REPOSITORY / "inventory/sparks/group_vars/all").glob("*.yml")):
        values |= yaml.safe_load(file.read_text()) or {}
    return values


@pytest.fixture(scope="session")
def node_reach() -> ModuleType:
    return load("glm_node_reach", "plugins/action/node_reach.py")
