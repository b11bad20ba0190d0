"""Hooks on the pinned vLLM 0.33.0: groups of the drafter's cache, ends of prefill chunks, facts of a start."""

import pytest

# Thousands of tokens in a GiB of one rank's pool; window 2048, steps of 4640, k=7. length → stock, split.
TOKENS = {1_000_000: (87.5, 116.0), 850_000: (85.6, 113.1), 256_000: (62.3, 80.3)}


@pytest.mark.parametrize("length", TOKENS)
def test_the_drafter_no_longer_widens_the_blocks(found, length):
    stock, split = (found["caches"][f"{kind} {length}"] for kind in ("stock", "split"))
    assert (round(stock["tokens per GiB"] / 1000, 1), round(split["tokens per GiB"] / 1000, 1)) == TOKENS[length]
    assert split["bytes"] == found["caches"]["no draft"]["bytes"] < stock["bytes"]


def test_the_drafters_layers_are_in_the_fewest_groups_that_fit(found):
    stock, split = (found["caches"][f"{kind} 1000000"]["groups"] for kind in ("stock", "split"))
    assert [group for group in split if not group["draft"]] == [group for group in stock if not group["draft"]]
    drafts = [group for group in split if group["draft"]]
    assert [group["layers"] for group in drafts] == [3, 2]
    assert {group["block_size"] for group in split} == {group["block_size"] for group in stock} == {4608, 16}


def test_no_layer_reaches_into_another_or_beyond_its_block(found):
    """Groups may overlap, for a block belongs to one at a time; layers of a group may not."""
    placed = found["tensors"]["placed"]
    assert len(placed) == len({name for _, name, *_ in placed}) == 34 + 33 + 5
    strides = {stride for *_, stride in placed}
    assert len(strides) == 1
    for group in {entry[0] for entry in placed}:
        reached = 0
        for _, name, offset, size, stride in sorted((e for e in placed if e[0] == group), key=lambda e: e[2]):
            assert offset >= reached, name
            reached = offset + size
            assert reached <= stride, name


def test_chunks_end_on_pools_whatever_else_is_in_the_step(found):
    for step in ("2048 blocks", "4640 blocks", "2048 no blocks"):
        ends = found["chunks"][f"PoolAlignedScheduler {step}"]
        assert ends[-1] == 30001
        assert [end for end in ends[:-1] if end % 4] == []


def test_vllms_own_ends_are_left_alone_where_they_are_whole(found):
    """Steps that hold a block: the same chunks, so nothing is lost by asking."""
    assert found["chunks"]["PoolAlignedScheduler 4640 blocks"] == found["chunks"]["AsyncScheduler 4640 blocks"]


def test_without_it_chunks_end_inside_pools(found):
    """What this is for: steps below a block, and no prefix caching."""
    for step in ("2048 blocks", "2048 no blocks"):
        assert any(end % 4 for end in found["chunks"][f"AsyncScheduler {step}"][:-1])


def test_no_step_is_lost_by_it(found):
    """At most three tokens a chunk: as many steps as without, give or take one."""
    for step in ("2048 blocks", "2048 no blocks"):
        with_it, without = (
            len(found["chunks"][f"{kind} {step}"]) for kind in ("PoolAlignedScheduler", "AsyncScheduler")
        )
        assert abs(with_it - without) <= 1


def test_a_start_is_told_what_the_layers_are(found):
    assert found["start"]["problems"] == []
    assert found["start"]["facts"] == {
        "attention backend": ["FLASHINFER_MLA_SPARSE_SM120"],
        "kv cache": ["fp8_ds_mla"],
        "head size": [512],
        "heads a rank": [32],
        "index_topk": 2048,
        "ranks": 2,
        "autotune": False,
        "capability": [12, 1],
        "pdl": False,
    }
