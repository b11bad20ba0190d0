"""The arithmetic of a plan: what the cache may take, and that a refusal's remedy is not refused."""

import dataclasses
import re

import pytest
from glm_vllm_overlay.node.errors import Refusal
from glm_vllm_overlay.plan.budget import GIB, Budget, Part, Wish, judge, room_for_cache, settle

WISH = Wish(memory=120 * GIB, utilisation=0.85, reserve=4 * GIB, start_cost=6 * GIB, profile="full", kv=None)
PARTS = (
    Part("system", 4 * GIB, "estimate", inside=False),
    Part("processes", 6 * GIB, "setting", inside=False),
    Part("experts", 80 * GIB, "headers"),
    Part("graphs", 2 * GIB, "estimate"),
)
BLOCK = 3 * GIB // 10


def refusal(budget: Budget, needed: int = GIB, longest: int = 1000) -> str:
    with pytest.raises(Refusal) as refused:
        judge(budget, needed, longest, 1_000_000)
    return str(refused.value)


def wish(**changes) -> Wish:
    return dataclasses.replace(WISH, **changes)


def test_the_share_of_memory_is_one_limit_and_the_reserve_the_other():
    assert room_for_cache(WISH, PARTS) == 20 * GIB  # 102 of the share, less 82
    assert room_for_cache(wish(utilisation=0.95), PARTS) == 24 * GIB  # 120 less 92 and the reserve of 4
    assert room_for_cache(wish(reserve=12 * GIB), PARTS) == 16 * GIB


def test_auto_is_whole_blocks():
    budget = settle(WISH, PARTS, BLOCK)
    assert budget.kv % BLOCK == 0 and 20 * GIB - BLOCK < budget.kv <= 20 * GIB
    assert budget.inside == budget.kv + 82 * GIB
    assert budget.left == 120 * GIB - 92 * GIB - budget.kv
    judge(budget, needed=budget.kv, longest=1_000_000, max_model_len=1_000_000)


def test_auto_is_nothing_where_nothing_is_left():
    assert settle(wish(memory=90 * GIB), PARTS, BLOCK).kv == 0


def test_a_number_is_kept():
    assert settle(wish(kv=7 * GIB + 1), PARTS, BLOCK).kv == 7 * GIB + 1


def test_utilisation_that_vllm_would_not_start_with():
    words = refusal(settle(wish(utilisation=0.95), PARTS, BLOCK))
    [largest] = re.findall(r"at most ([\d.]+)$", words)
    assert "glm_vllm_overlay_gpu_memory_utilization 0.95" in words and largest == "0.91"
    judge(settle(wish(utilisation=float(largest)), PARTS, BLOCK), GIB, 1000, 1000)


def test_a_number_above_the_share():
    words = refusal(settle(wish(kv=22 * GIB), PARTS, BLOCK))
    assert "lower glm_vllm_overlay_kv_cache_memory_bytes, or raise the share to 0.87" in words
    judge(settle(wish(kv=22 * GIB, utilisation=0.87), PARTS, BLOCK), GIB, 1000, 1000)


def test_a_number_that_leaves_less_than_the_reserve():
    words = refusal(settle(wish(kv=25 * GIB, utilisation=0.9), PARTS, BLOCK))
    assert "leaves 3.00 GiB of a node and glm_vllm_overlay_reserve_bytes asks for 4.00 GiB" in words
    [most] = re.findall(r"glm_vllm_overlay_kv_cache_memory_bytes to at most (\d+)", words)
    judge(settle(wish(kv=int(most), utilisation=0.9), PARTS, BLOCK), GIB, 1000, 1000)


def test_a_context_that_does_not_fit():
    words = refusal(settle(WISH, PARTS, BLOCK), needed=21 * GIB, longest=900_000)
    assert "one request of 1000000 tokens needs 21.00 GiB" in words
    assert words.endswith("set glm_vllm_overlay_max_model_len to at most 900000")


def test_weights_that_fill_a_node():
    assert "nothing fits beside the weights" in refusal(settle(wish(utilisation=0.68), PARTS, BLOCK), longest=0)
