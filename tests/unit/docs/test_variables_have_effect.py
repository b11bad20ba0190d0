"""A public variable does something in this release, or its description says that it doesn't yet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
OPTIONS = {
    name: option
    for spec in sorted((ROOT / "roles").glob("*/meta/argument_specs.yml"))
    for name, option in yaml.safe_load(spec.read_text())["argument_specs"]["main"]["options"].items()
}
# What acts on a machine. The inventory's rules only look, and so does the list of ports to keep free.
ACTING = "\n".join(
    file.read_text()
    for pattern in ("roles/*/tasks/**/*.yml", "roles/*/templates/*", "roles/*/vars/**/*.yml", "roles/*/defaults/*.yml")
    for file in sorted(ROOT.glob(pattern))
    if file != ROOT / "roles/cuda-sm121/vars/main.yml"
)
RENDERED = (ROOT / "plugins/filter/serve_yaml.py").read_text()


def acts(name: str) -> bool:
    """Whether a role uses the variable in an expression, or the renderer of serve.yaml takes it."""
    inside = re.search(rf"\b{name}\b(?!:)", ACTING)
    return bool(inside) or f'wanted("{name.removeprefix("glm_vllm_overlay_")}")' in RENDERED


@pytest.mark.parametrize("name", OPTIONS)
def test_it_acts_or_says_that_it_does_not(name):
    words = OPTIONS[name]["description"]
    idle = "No effect yet" in (words if isinstance(words, str) else " ".join(words))
    assert acts(name) != idle
