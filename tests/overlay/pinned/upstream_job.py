"""upstream_job.py FOLDER: behaviour of the pinned vLLM that upstream repaired, as JSON: {case: [as it is, as it was]}.

Each case is carried out by a module of the wheel, and by a copy of it in FOLDER whose repaired lines were put back.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # a copy's errors are wanted

from glm_vllm_twin import torchvision_ops

torchvision_ops.declare()

import torch  # noqa: E402

FOLDER = Path(sys.argv[1])
CHARACTERS = ["<end>", "</think>", "t", "a", "b", "c"]
END, THOUGHT_ENDS, THINK, A, B, C = range(len(CHARACTERS))


def as_before(name: str, new: str, old: str) -> ModuleType:
    """A copy of the wheel's module with one passage put back."""
    source = Path(importlib.util.find_spec(name).origin).read_text()
    assert source.count(new) == 1, f"{name} no longer has: {new}"
    number = len(list(FOLDER.iterdir()))
    path = FOLDER / f"as_before_{number}.py"
    path.write_text(source.replace(new, old))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # data classes look themselves up
    spec.loader.exec_module(module)
    return module


# ---- structured output while tokens are drafted ---------------------------------------------------------------------
def grammar(module: ModuleType, text: str = "ab"):
    """vLLM's grammar over xgrammar that takes one text and then the end."""
    import xgrammar

    info = xgrammar.TokenizerInfo(CHARACTERS, vocab_size=len(CHARACTERS), stop_token_ids=[END])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(f'root ::= "{text}"')
    matcher = xgrammar.GrammarMatcher(compiled, max_rollback_tokens=8)
    return module.XgrammarGrammar(vocab_size=len(CHARACTERS), matcher=matcher, ctx=compiled)


def terminated(module: ModuleType) -> list:
    """Tokens after the end: in the step that ends, and in a step after it."""
    state, other = grammar(module), grammar(module)
    said = [state.accept_tokens("one", [A, B, END, C]), state.is_terminated(), state.accept_tokens("one", [C])]
    said += [state.validate_tokens([C]), other.validate_tokens([A, B, END, C]), other.is_terminated()]
    other.accept_tokens("two", [A, B, END])
    other.rollback(1)
    return [*said, other.is_terminated(), other.validate_tokens([END])]


class Reasoner:
    """Thought ends behind one token."""

    def is_reasoning_end(self, ids):
        return THOUGHT_ENDS in ids

    def is_reasoning_end_streaming(self, ids, delta):
        return THOUGHT_ENDS in delta


def manager(module: ModuleType, state):
    """(vLLM's manager of structured output with one request in thought, that request)."""
    found = object.__new__(module.StructuredOutputManager)
    found.enable_in_reasoning, found.reasoner_cls, found.tokenizer = False, object, None
    found.backend = SimpleNamespace(allocate_token_bitmask=lambda rows: torch.zeros(rows, 1, dtype=torch.int32))
    found._grammar_bitmask, found._full_mask = None, torch.tensor(-1, dtype=torch.int32)
    found.fill_bitmask_parallel_threshold = 128
    speculative = SimpleNamespace(num_speculative_tokens=5)
    found.vllm_config = SimpleNamespace(
        speculative_config=speculative,
        num_speculative_tokens=5,
        scheduler_config=SimpleNamespace(max_num_seqs=1),
        model_config=SimpleNamespace(is_diffusion=False),
    )
    structured = SimpleNamespace(
        reasoner=Reasoner(), reasoning_ended=False, grammar=state, masked_reasoning_end_ids=(),
        reasoning_parser_kwargs=None,
    )  # fmt: skip
    request = SimpleNamespace(
        structured_output_request=structured, use_structured_output=True, prompt_token_ids=[THINK],
        all_token_ids=[THINK], request_id="one",
    )  # fmt: skip
    return found, request


def boundary(module: ModuleType) -> list:
    """A draft in which the thought ends and the answer begins: what of it is kept, and what each place may hold."""
    from vllm.v1.structured_output import backend_xgrammar

    found, request = manager(module, grammar(backend_xgrammar))
    kept = [found.validate_tokens(request, draft) for draft in
            ([THINK, THOUGHT_ENDS, A, C], [THINK, THOUGHT_ENDS, C], [THINK, THINK])]  # fmt: skip
    draft = [THINK, THOUGHT_ENDS, A, B]
    masks = found.grammar_bitmask({"one": request}, ["one"], {"one": draft})
    rows = [[token for token in range(len(CHARACTERS)) if int(row[0]) >> token & 1] for row in masks[: len(draft) + 1]]
    return [kept, rows]


# ---- the prefix cache, the index, videos ----------------------------------------------------------------------------
def block_drop(module: ModuleType) -> dict:
    """By method, whether the last full block of a prefix may not be reused."""
    found = {}
    for method in ("dflash", "mtp", "eagle3"):
        config = object.__new__(module.SpeculativeConfig)
        object.__setattr__(config, "method", method)
        object.__setattr__(config, "disable_eagle_block_drop", False)
        found[method] = config.use_eagle_block_drop()
    return found


def index_workspace(module: ModuleType) -> dict:
    """Keys that the indexer gathers at most, at a million tokens: tokens, not pools, would be four times as many."""
    given = {}

    class Stub(torch.nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()

    class Operator(Stub):
        def __init__(self, *args, **kwargs):
            super().__init__()
            given["longest row"], given["gathered"] = args[5], args[6]

    replaced = {name: getattr(module, name) for name in
                ("ReplicatedLinear", "MergedColumnParallelLinear", "LayerNorm", "Glm5NextIndexerCache",
                 "Glm5NextTailCache")}  # fmt: skip
    operator = module.SparseAttnIndexerKpool
    try:
        for name in replaced:
            setattr(module, name, Stub)
        module.SparseAttnIndexerKpool = Operator
        text = SimpleNamespace(index_topk=2048, index_n_heads=32, index_head_dim=128, index_kpool=4, qk_rope_head_dim=0)
        config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=1_000_000),
            attention_config=SimpleNamespace(sparse_mla_prefill_workspace_factor=2),
        )
        module.Indexer(config, text, 64, 32, None, None, None)
    finally:
        for name, value in replaced.items():
            setattr(module, name, value)
        module.SparseAttnIndexerKpool = operator
    return given


def ring(module: ModuleType) -> dict:
    """The ring of raw keys behind the pools: one block a request however long it grows, no slot mapping of vLLM's."""
    spec = module.CircularBufferSpec(block_size=16, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
    return {"blocks": spec.max_num_blocks_per_req(None, 1_000_000), "generic slots": spec.uses_slot_mapping}


def video(module: ModuleType) -> list:
    """(time stamps of the placeholder, frames of the pixels by two) of clips of many lengths."""
    from transformers import Glm5NextVideoProcessor
    from transformers.video_utils import VideoMetadata

    processor = Glm5NextVideoProcessor()
    info = object.__new__(module.Glm5NextProcessingInfo)
    info.get_video_processor = lambda **_: processor
    pairs = []
    for seconds in (3, 12, 45, 400, 1500):
        frames = int(seconds * 24)
        metadata = {"fps": 24.0, "duration": float(seconds), "total_num_frames": frames, "do_sample_frames": True}
        stamps = info._get_video_second_idx_glm46v(metadata, frames)
        sampled = processor.sample_frames(VideoMetadata(total_num_frames=frames, fps=24.0, duration=float(seconds)))
        pairs.append([len(stamps), -(-len(sampled) // processor.temporal_patch_size)])
    return pairs


OUTPUT = "vllm.v1.structured_output"
CASES = {
    "termination, a step later": (
        terminated,
        f"{OUTPUT}.backend_xgrammar",
        "        if self._is_terminated:\n            return True\n",
        "",
    ),
    "termination, in the step": (
        terminated,
        f"{OUTPUT}.backend_xgrammar",
        "            self._is_terminated = self.matcher.is_terminated()\n            if self._is_terminated:\n"
        "                break\n",
        "            self._is_terminated = self.matcher.is_terminated()\n",
    ),
    "termination, taken back": (
        terminated,
        f"{OUTPUT}.backend_xgrammar",
        "        self.num_processed_tokens -= num_tokens\n        self._is_terminated = self.matcher.is_terminated()\n",
        "        self.num_processed_tokens -= num_tokens\n",
    ),
    "boundary, kept drafts": (
        boundary,
        OUTPUT,
        "        grammar_start, _ = self._get_constraint_bounds(request, spec_tokens)\n",
        "        grammar_start = 0\n",
    ),
    "boundary, masks": (
        boundary,
        OUTPUT,
        "apply_bitmask = not seen_padding and i >= constraint_start",
        "apply_bitmask = False",
    ),
    "block drop": (
        block_drop,
        "vllm.config.speculative",
        "return self.use_eagle() and not (self.use_dflash() or self.use_dspark())",
        "return self.use_eagle()",
    ),
    "index workspace": (
        index_workspace,
        "vllm.models.glm5next.common.attention",
        "get_max_prefill_buffer_size(vllm_config) // self.index_kpool",
        "get_max_prefill_buffer_size(vllm_config)",
    ),
    "ring": (
        ring,
        "vllm.v1.kv_cache_interface",
        "    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:\n"
        "        del vllm_config, max_len\n        return 1\n",
        "",
    ),
    "video": (
        video,
        "vllm.models.glm5next.common.multimodal",
        "    def _get_video_second_idx_glm46v(\n        self, metadata: dict[str, Any], total_frames: int\n",
        "    def _unused(\n        self, metadata: dict[str, Any], total_frames: int\n",
    ),
}


def outcome(case, module):
    """What a case says, or how it failed."""
    try:
        return case(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    answers = {}
    for name, (case, module, new, old) in CASES.items():
        answers[name] = [outcome(case, importlib.import_module(module)), outcome(case, as_before(module, new, old))]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
