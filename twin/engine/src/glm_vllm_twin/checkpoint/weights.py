"""Configuration and weights of the tiny checkpoints, written with the tokenizer into one folder.

The routed experts are packed as the real checkpoint's are: EXL3, 4 bits, mcg, in the main layers and in the MTP layer.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from glm_vllm_twin import torchvision_ops

torchvision_ops.declare()

from glm_vllm_overlay.exl3.checkpoint import pack_experts  # noqa: E402
from transformers import GenerationConfig, Glm5NextConfig, Glm5NextForConditionalGeneration  # noqa: E402
from transformers.utils import logging  # noqa: E402

from glm_vllm_twin.checkpoint import vocabulary  # noqa: E402

LAYERS = 5
HIDDEN = 256
MTP = f"model.language_model.layers.{LAYERS}."
# The MTP layer copies the sparse-attention layer: it must be one, and its weights already have the right shapes.
MTP_SOURCE = "model.language_model.layers.3."

TEXT = dict(
    vocab_size=vocabulary.SIZE,
    hidden_size=HIDDEN,
    intermediate_size=512,
    # 256 a rank of two: EXL3 needs a multiple of 128. Not the hidden size, so that no projection passes for another.
    moe_intermediate_size=512,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    kv_lora_rank=128,
    q_lora_rank=128,
    qk_rope_head_dim=0,
    v_head_dim=64,
    qk_nope_head_dim=64,
    max_position_embeddings=8192,
    mlp_layer_types=["dense"] + ["sparse"] * (LAYERS - 1),
    layer_types=["linear_attention"] * 3 + ["indexed_attention"] + ["linear_attention"] * (LAYERS - 4),
    indexer_types=["full"] * LAYERS,
    index_topk=64,
    index_head_dim=128,
    index_n_heads=4,
    index_kpool=4,
    linear_head_dim=32,
    linear_num_heads=4,
    # Not declared by Hugging Face's configuration, read by vLLM.
    mhc=True,
    mla_use_nope=True,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    num_nextn_predict_layers=1,
    indexer_rope_interleave=True,
)
VISION = dict(
    depth=2,
    hidden_size=64,
    num_heads=4,
    out_hidden_size=HIDDEN,
    intermediate_size=128,
    projection_intermediate_size=128,
)


def _config(kind: str) -> Glm5NextConfig:
    ids = vocabulary.vocabulary()
    end = ids[vocabulary.END]
    text = TEXT | dict(pad_token_id=end, bos_token_id=end, eos_token_id=end)
    if kind == "random":
        # Low enough to clamp ordinary activations: an engine that forgets the clamp is found out.
        text |= dict(swiglu_limit=0.5)
    return Glm5NextConfig(
        text_config=text,
        vision_config=VISION,
        image_token_id=ids[vocabulary.IMAGE],
        video_token_id=ids[vocabulary.VIDEO],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
        # vLLM's MTP proposer asks a multimodal target for this name.
        image_token_index=ids[vocabulary.IMAGE],
        architectures=["Glm5NextForConditionalGeneration"],
    )


def _random_weights(config: Glm5NextConfig) -> dict[str, torch.Tensor]:
    """Weights under the hub's tensor names, bfloat16, without the MTP layer. Scales keep activations near 1."""
    model = Glm5NextForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("A_log"):
                weight.uniform_(0.0, 1.5, generator=generator)
            elif key.endswith("dt_bias"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5 - 3.0)
            elif weight.ndim >= 2:
                scale = 1.0 if "embed" in key else (0.12 if "lm_head" in key else 0.6) / weight.shape[-1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        for key, buffer in model.named_buffers():
            if "e_score" in key:
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.01)
    with tempfile.TemporaryDirectory() as folder:
        # save_pretrained turns the model's fused parameters back into the hub's names.
        model.to(torch.bfloat16).save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def _add_mtp(weights: dict[str, torch.Tensor], drafting: torch.Tensor) -> None:
    """Add one MTP layer; `drafting` [hidden, 2*hidden] maps (embedding, previous hidden state) to its input."""
    for key in [key for key in weights if key.startswith(MTP_SOURCE) and "hc_" not in key]:
        weights[key.replace(MTP_SOURCE, MTP)] = weights[key].clone()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{MTP}{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights[f"{MTP}embed_tokens.weight"] = weights["model.language_model.embed_tokens.weight"].clone()
    weights[f"{MTP}eh_proj.weight"] = drafting.to(torch.bfloat16)


def successors() -> torch.Tensor:
    """The successor of each token, [512]: one cycle through all of them that contains the reply."""
    path = vocabulary.chain()
    others = [i for i in torch.randperm(vocabulary.SIZE, generator=torch.Generator().manual_seed(3)).tolist()]
    cycle = torch.tensor(path + [i for i in others if i not in path])
    successors = torch.empty(vocabulary.SIZE, dtype=torch.long)
    successors[cycle] = cycle.roll(-1)
    return successors


def _chain_head(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Output head that makes each token predict its successor: a successor's row is its predecessor's embedding."""
    embedding = weights["model.language_model.embed_tokens.weight"].float()
    head = torch.empty_like(embedding)
    head[successors()] = embedding
    return head


def _whisper_chain(weights: dict[str, torch.Tensor]) -> None:
    """Lift each token's successor out of the flat random logits, whose near ties rounding would decide.

    The random part is small, since bfloat16's error grows with it: an expert or a pool chosen otherwise at a near tie
    then moves a logit by some hundredths, and first choices are clear by some tenths.
    """
    noisy = weights["lm_head.weight"].float() + 0.008 * _chain_head(weights)
    weights["lm_head.weight"] = noisy.to(torch.bfloat16)


def _spell_chain(weights: dict[str, torch.Tensor]) -> None:
    """Let the chain alone decide: sampling at temperature 1 says the same as greedy decoding, on any machine.

    Attention and experts still run, at a fraction of their strength, so that they cannot outvote the embedding that the
    residual streams carry, and show in the log-probabilities only.
    """
    weights["lm_head.weight"] = (0.2 * _chain_head(weights)).to(torch.bfloat16)
    for key, weight in weights.items():
        if "language_model" in key and key.endswith(("o_proj.weight", "down_proj.weight")):
            weights[key] = (weight.float() * 0.3).to(torch.bfloat16)


def _drafting(kind: str) -> torch.Tensor:
    """The MTP layer's input map: noise alone, or the embedding plus a share of the previous state's noise.

    The share decides how often a draft is right: 0.2 never flips the embedding's choice, 5 flips it about every other
    time.
    """
    generator = torch.Generator().manual_seed(9)
    if kind == "random":
        return torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.04
    noise = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    return torch.cat([torch.eye(HIDDEN), noise * (0.2 if kind == "chain" else 5.0)], 1)


def write(kind: str, folder: Path) -> None:
    """Write weights, configuration and tokenizer of one kind into an empty folder."""
    torch.manual_seed(0)
    logging.disable_progress_bar()
    config = _config(kind)
    weights = _random_weights(config)
    if kind == "random":
        _whisper_chain(weights)
    else:
        _spell_chain(weights)
    _add_mtp(weights, _drafting(kind))
    # The experts are noise: packed noise of the same strength is drawn at once, and a search for the packed weights
    # nearest to these would take minutes.
    weights, config.quantization_config = pack_experts(weights, search=False)
    save_file({key: w.contiguous() for key, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    ids = vocabulary.vocabulary()
    ends = [ids[token] for token in vocabulary.ENDS]
    GenerationConfig(eos_token_id=ends, pad_token_id=ends[0]).save_pretrained(folder)
    vocabulary.save(folder)
