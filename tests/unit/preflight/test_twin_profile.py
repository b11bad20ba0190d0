"""The twin overrides what it must and nothing else, with a reason each."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[3]
INVENTORY = REPOSITORY / "inventory/twin"
PROFILE = INVENTORY / "group_vars/all/profile.yml"
BUILDER = REPOSITORY / "twin/engine/src/glm_vllm_twin/checkpoint/build.py"

# The whole of what may differ. A change of this list changes what the twin can prove.
ALLOWED = {
    "glm_profile": "twin",
    "glm_vllm_overlay_speculator": "mtp",
    "glm_vllm_overlay_kv_cache_dtype": "auto",
    "glm_vllm_overlay_max_model_len": 2048,
    "glm_vllm_overlay_enforce_eager": True,
    "glm_vllm_overlay_kv_cache_memory_bytes": ...,
    "glm_vllm_overlay_prefix_caching": False,
    "glm_vllm_overlay_exl3_backend": "reference",
    "glm_vllm_overlay_limit_mm": {"image": 0, "video": 0},
    "glm_vllm_overlay_wheelhouse": ...,
    "model_fetch_sources": ...,
    "cx7_network_rdma": "none",
    "cx7_network_min_gbps": ...,
    "cuda_sm121_enabled": False,
}


def refused(profile: dict) -> list[str]:
    """Keys that the twin may not set, or not to this value."""
    return [key for key, value in profile.items() if key not in ALLOWED or ALLOWED[key] not in (..., value)]


@pytest.fixture(scope="module")
def profile() -> dict:
    return yaml.safe_load(PROFILE.read_text())


def test_overrides_only_what_it_may(profile):
    assert refused(profile) == []


def test_another_key_or_value_is_refused(profile):
    assert refused(profile | {"glm_vllm_overlay_max_num_seqs": 2}) == ["glm_vllm_overlay_max_num_seqs"]
    assert refused(profile | {"glm_vllm_overlay_speculator": "none"}) == ["glm_vllm_overlay_speculator"]


def test_each_override_has_its_reason_on_the_line():
    for row in PROFILE.read_text().splitlines():
        key = re.match(r"([a-z0-9_]+):(.*)", row)
        if key and key[1] != "model_fetch_sources":
            assert re.search(r" # \S", key[2]), f"{key[1]} has no reason"


def test_no_other_file_of_the_twin_sets_a_role_variable(schema):
    for file in sorted(INVENTORY.rglob("*.yml")):
        if file != PROFILE:
            shown = set(re.findall(r"(?m)^\s*([a-z0-9_]+):", file.read_text()))
            assert not shown & set(schema.options), file


def test_the_weights_are_what_the_builder_makes(profile):
    """The builder imports torch, which this environment lacks: only its constants are read."""
    wanted = {"RECIPE", "name", "revision"}
    tree = ast.parse(BUILDER.read_text())
    tree.body = [
        node
        for node in tree.body
        if getattr(node, "name", "") in wanted
        or (isinstance(node, ast.Assign) and any(getattr(target, "id", "") in wanted for target in node.targets))
        or (isinstance(node, ast.Import) and node.names[0].name == "hashlib")
    ]
    builder: dict = {}
    exec(compile(tree, BUILDER, "exec"), builder)
    (source,) = profile["model_fetch_sources"]
    assert Path(source["path"]).name == builder["name"]("chain")
    assert source["revision"] == builder["revision"]("chain")
    assert source["licence"] == "none"
