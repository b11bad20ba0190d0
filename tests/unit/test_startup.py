"""What a start refuses, as functions of facts; what vLLM's layers tell is tests/overlay/pinned's."""

import functools

import pytest
from glm_vllm_overlay.hooks import pdl, startup

GB10 = {
    "attention backend": {"FLASHINFER_MLA_SPARSE_SM120"},
    "kv cache": {"fp8_ds_mla"},
    "head size": {512},
    "heads a rank": {32},
    "index_topk": 2048,
    "ranks": 2,
    "autotune": False,
    "capability": (12, 1),
    "pdl": False,
}
DRAFTER = {
    "drafter's backend": {"FLASH_ATTN"},
    "drafter's kv cache": {"auto"},
    "drafter is causal": {False},
    "drafts": 7,
}


def test_a_right_start():
    assert startup.target_problems(GB10, pdl=False) == []
    assert startup.target_problems(GB10 | {"pdl": True}, pdl=True) == []
    assert startup.target_problems(GB10 | {"autotune": True, "ranks": 1}, pdl=False) == []
    assert startup.drafter_problems(DRAFTER) == []


def test_another_capability_has_other_backends():
    hopper = {"capability": (9, 0), "attention backend": {"FLASHMLA_SPARSE"}, "heads a rank": {4}, "pdl": True}
    assert startup.target_problems(GB10 | hopper, pdl=False) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"attention backend": {"TRITON_MLA"}}, "attention backend TRITON_MLA was selected"),
        ({"attention backend": {"FLASHINFER_MLA_SPARSE_SM120", "TRITON_MLA"}}, "was selected, not FLASHINFER"),
        ({"attention backend": set()}, "attention backend none was selected"),
        ({"kv cache": {"auto"}}, "set glm_vllm_overlay_kv_cache_dtype: fp8"),
        ({"head size": {576}}, "it is another model"),
        ({"index_topk": 1024}, "it is another model"),
        ({"heads a rank": {12}}, "[12] heads a rank do not fit"),
        ({"pdl": True}, "glm_vllm_overlay_pdl is false"),
        ({"autotune": True}, "set glm_vllm_overlay_flashinfer_autotune: false"),
        ({"autotune": True, "capability": (9, 0)}, "it deadlocks pairs"),
    ],
)
def test_one_sentence_for_what_must_not_serve(wrong, words):
    [sentence] = startup.target_problems(GB10 | wrong, pdl=False)
    assert words in sentence


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"drafter's backend": {"TRITON_ATTN"}}, "is TRITON_ATTN, not FLASH_ATTN"),
        ({"drafter's kv cache": {"fp8_ds_mla"}}, "is fp8_ds_mla, not bfloat16"),
        ({"drafter is causal": {False, True}}, "is causal"),
    ],
)
def test_a_drafter_that_would_draft_badly(wrong, words):
    [sentence] = startup.drafter_problems(DRAFTER | wrong)
    assert words in sentence


def platform(family: int) -> type:
    """A class hierarchy as vLLM's: the answer is cached and lies in the middle."""

    class Platform:
        @classmethod
        def is_device_capability_family(cls, asked: int) -> bool:
            return asked == family

    class Cuda(Platform):
        @classmethod
        @functools.cache
        def is_arch_support_pdl(cls) -> bool:
            return True

    return type("Nvml", (Cuda,), {})


@pytest.mark.parametrize(("family", "answer"), [(120, False), (90, True), (100, True)])
def test_pdl_is_off_on_12_and_nowhere_else(family, answer):
    kind = platform(family)
    assert kind.is_arch_support_pdl() is True
    pdl.turn_off(kind)
    pdl.turn_off(kind)
    assert kind.is_arch_support_pdl() is answer
    assert kind().is_arch_support_pdl() is answer


def test_a_platform_that_knows_no_pdl_is_left_alone():
    pdl.turn_off(type("Cpu", (), {}))
