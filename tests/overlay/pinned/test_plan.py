"""`glm-vllm plan`: the pool as vLLM 0.33.0 cuts it, and whether a node's memory holds."""

import json
from pathlib import Path

import pytest

GIB = 1 << 30
LIVE = json.loads((Path(__file__).parent / "live_h200.json").read_text())

# An analysis with hand-written specs on the same planner, before any of this code: window 4096, budget 2048,
# 2 sequences, 24 GiB a rank, contexts of 1M. name → MiB a block, blocks, contexts.
ANALYSED = {
    "no draft": (34.35, 715, 2.87),
    "mtp": (34.35, 715, 2.91),
    "dflash2": (46.25, 531, 2.11),
    "bf16 state": (None, None, 2.94),
    "bf16 state, dflash2": (None, None, 2.29),
}


@pytest.mark.parametrize("name", ANALYSED)
def test_the_pool_is_cut_as_analysed(found, name):
    size, blocks, contexts = ANALYSED[name]
    cache = found["caches"][name]
    assert round(cache["contexts"], 2) == contexts
    if size:
        assert (round(cache["bytes"] / (1 << 20), 2), cache["blocks"]) == (size, blocks)


def test_the_block_is_the_platforms(found):
    """k=7 needs room for ten convolution states, k=2 for five; a bfloat16 state is half as large."""
    blocks = {name: found["caches"][name]["block"] for name in ANALYSED}
    assert blocks == {"no draft": 4608, "mtp": 4352, "dflash2": 4608, "bf16 state": 2560, "bf16 state, dflash2": 2560}


@pytest.mark.parametrize("case", LIVE["cases"])
def test_a_running_engine_has_the_cache_that_is_planned(found, case):
    """What vLLM 0.33.0 built on an H200 for tests/gpu/speculation.py, group by group and to the block."""
    assert found["live"][case] == LIVE["cases"][case]


def test_every_layer_is_in_one_group(found):
    kinds = {}
    for group in found["caches"]["dflash2"]["groups"]:
        kinds[group["kind"]] = kinds.get(group["kind"], 0) + group["layers"]
    assert kinds == {"MambaSpec": 34, "MLAAttentionSpec": 22, "CircularBufferSpec": 11, "SlidingWindowSpec": 5}
    assert [group["draft"] for group in found["caches"]["dflash2"]["groups"]] == [False] * 5 + [True]


@pytest.mark.parametrize("name", ANALYSED)
def test_the_longest_context_is_the_one_that_was_asked_for(found, name):
    """A pool of just what one request needs holds that request, and no longer one by a block."""
    cache = found["caches"][name]
    assert 1_000_000 <= cache["longest"] < 1_000_000 + cache["block"]
    assert cache["longest, a block less"] < 1_000_000


def plan(found, name) -> dict:
    answer = found["commands"][name]
    assert answer["code"] == 0, answer["err"]
    return json.loads(answer["out"])


def sizes(document) -> dict[str, float]:
    return {part["name"]: round(part["bytes"] / GIB, 2) for part in document["parts"]}


def test_the_parts_are_the_headers(found):
    """42 layers of experts on a rank: the published audit says 71.22 GiB to the digit."""
    document = plan(found, "fits")
    parts = sizes(document)
    assert parts["experts"] == 71.22
    assert 8 < parts["dense weights"] < 11
    assert 1 < parts["drafter"] < 1.3
    total = sum(part["bytes"] for part in document["parts"]) + document["kv_cache_memory_bytes"] + document["left"]
    assert total == document["memory"]


def test_auto_takes_whole_blocks_up_to_the_reserve(found):
    document = plan(found, "fits")
    block = document["cache"]["bytes_per_block"]
    assert document["kv_cache_memory_bytes"] % block == 0
    assert document["kv_cache_memory_bytes"] == document["cache"]["blocks"] * block
    assert document["reserve"] <= document["left"] < document["reserve"] + block
    assert document["utilisation"]["needed"] <= 0.87 <= document["utilisation"]["largest"]
    assert document["kv_cache_memory_bytes"] >= document["cache"]["bytes_per_request"]
    assert document["fits"]["requests"] >= 1 and document["fits"]["context"] == 1048576


def test_it_answers_the_same_twice(found):
    assert found["commands"]["fits"]["out"] == found["commands"]["again"]["out"]


def test_a_number_is_taken_as_it_is(found):
    assert plan(found, "own cache")["kv_cache_memory_bytes"] == 13 * GIB


def test_what_is_not_there_takes_nothing(found):
    """MTP loads layer 45 with its experts and no drafter; without images there is no vision at work."""
    assert "drafter" not in sizes(plan(found, "mtp")) and "drafter" not in sizes(plan(found, "none"))
    assert sizes(plan(found, "mtp"))["experts"] == pytest.approx(71.22 / 42 * 43, abs=0.01)
    assert "images" not in sizes(plan(found, "text only"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("safe at 0.87", "set it to at most 0.86"),
        ("safe", "needs 11.47 GiB of KV cache and"),
        ("safe", "set glm_vllm_overlay_max_model_len to at most "),
        ("too much cache", "lower glm_vllm_overlay_kv_cache_memory_bytes"),
        (
            "too much for the reserve",
            "glm_vllm_overlay_reserve_bytes asks for 4.00 GiB: set glm_vllm_overlay_kv_",
        ),
        ("utilisation", "set it to at most 0.91"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(found, name, words):
    answer = found["commands"][name]
    assert answer["code"] == 1
    assert words in answer["err"]
    assert answer["err"].count("glm-vllm plan: ") == 1


def test_the_remedies_hold(found):
    """What a refusal proposes is not refused."""
    assert found["commands"]["safe, shorter"]["code"] == 0
    answer = json.loads(found["commands"]["too much cache"]["out"])
    assert answer["ok"] is False and "kv_cache_memory_bytes" in answer["message"]


@pytest.mark.parametrize(
    ("name", "words"), [("no length", "do not say max-model-len"), ("no model", "/nonexistent has no config.json")]
)
def test_unusable_input(found, name, words):
    answer = found["commands"][name]
    assert answer["code"] == 2 and words in answer["err"]


def test_the_table_is_for_people(found):
    """Every part with a digit of its own in the picture, in the order and about the size of the table."""
    text = found["commands"]["table"]["out"]
    (line,) = (line for line in text.splitlines() if line.startswith("|"))
    assert len(line) == 98 and "".join(dict.fromkeys(line.strip("|."))) == "0123456789ab"
    assert line.count("3") == pytest.approx(96 * 71.22 / 121.63, abs=1)
    assert "KV cache" in text and "longest context 1048576" in text
