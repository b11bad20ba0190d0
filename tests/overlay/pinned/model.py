"""GLM-5.3-Flash as its files describe it: config.json and headers of the real shapes, over files without content."""

import json
import struct
from pathlib import Path

LAYERS, EXPERTS, HIDDEN, WIDTH = 45, 288, 4096, 2048
KINDS = ["linear_attention" if number % 4 != 3 else "full_attention" for number in range(LAYERS)]
TEXT = {
    "model_type": "glm5_next_text",
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_kpool": 4,
    "index_topk": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 128,
    "linear_num_heads": 64,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": WIDTH,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "layer_types": KINDS,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * (LAYERS - 3),
}
TARGET = {"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "text_config": TEXT}
DRAFTER = {
    "architectures": ["DFlash2DraftModel"],
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": HIDDEN,
    "sliding_window": 2048,
    "layer_types": ["sliding_attention"] * 5,
    "dflash_config": {"block_size": 8, "causal": False},
}
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I16": 2, "I32": 4}


def _packed(name: str, rows: int, columns: int) -> dict[str, tuple[str, list[int]]]:
    return {
        f"{name}.trellis": ("I16", [rows // 16, columns // 16, 64]),
        f"{name}.suh": ("F16", [rows]),
        f"{name}.svh": ("F16", [columns]),
        f"{name}.mcg": ("I32", [1]),
    }


def _attention(number: int) -> dict[str, tuple[str, list[int]]]:
    """The large matrices of one layer's attention, [out, in]."""
    head = 64 * 128
    if number < LAYERS and KINDS[number] == "linear_attention":
        shapes = {f"{kind}_proj": [head, HIDDEN] for kind in "qkv"}
        shapes |= {"o_proj": [HIDDEN, head], "b_proj": [64, HIDDEN]}
        shapes |= {f"{kind}_a_proj": [128, HIDDEN] for kind in "fg"} | {f"{kind}_b_proj": [head, 128] for kind in "fg"}
    else:
        shapes = {
            "q_a_proj": [1536, HIDDEN],
            "q_b_proj": [64 * 256, 1536],
            "kv_a_proj_with_mqa": [512, HIDDEN],
            "kv_b_proj": [64 * 512, 512],
            "o_proj": [HIDDEN, 64 * 256],
            "indexer.wq_b": [32 * 128, 1536],
            "indexer.wk": [128, HIDDEN],
        }
    return {f"self_attn.{name}.weight": ("BF16", shape) for name, shape in shapes.items()}


def tensors(experts: int = EXPERTS) -> dict[str, tuple[str, list[int]]]:
    """name → (dtype, shape) of every tensor whose size matters."""
    top = "model.language_model"
    found = {"lm_head.weight": ("BF16", [154880, HIDDEN]), f"{top}.embed_tokens.weight": ("BF16", [154880, HIDDEN])}
    found["model.visual.blocks.0.mlp.fc.weight"] = ("BF16", [1 << 15, 1 << 14])
    for number in range(LAYERS + 1):
        layer = f"{top}.layers.{number}"
        found |= {f"{layer}.{name}": entry for name, entry in _attention(number).items()}
        width = 12288 if number < 3 else WIDTH
        mlp = "mlp" if number < 3 else "mlp.shared_experts"
        for name in ("gate_proj", "up_proj"):
            found[f"{layer}.{mlp}.{name}.weight"] = ("BF16", [width, HIDDEN])
        found[f"{layer}.{mlp}.down_proj.weight"] = ("BF16", [HIDDEN, width])
        if number < 3:
            continue
        found[f"{layer}.mlp.gate.weight"] = ("F32", [EXPERTS, HIDDEN])
        for expert in range(experts):
            for name in ("gate_proj", "up_proj"):
                found |= _packed(f"{layer}.mlp.experts.{expert}.{name}", HIDDEN, WIDTH)
            found |= _packed(f"{layer}.mlp.experts.{expert}.down_proj", WIDTH, HIDDEN)
    return found


def write(folder: Path, config: dict, entries: dict[str, tuple[str, list[int]]]) -> Path:
    """A checkpoint folder: config.json and one safetensors file that is all header and hole."""
    header, end = {}, 0
    for name, (dtype, shape) in entries.items():
        size = SIZES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def write_target(folder: Path, **changes) -> Path:
    """The target, 164 GiB of holes; `changes` go into its text configuration."""
    return write(folder, TARGET | {"text_config": TEXT | changes}, tensors())


def write_drafter(folder: Path) -> Path:
    """The drafter, as large as the real one: 2.18 GiB."""
    entries = {"fc.weight": ("BF16", [HIDDEN, 5 * HIDDEN])}
    for number in range(5):
        layer = f"layers.{number}"
        entries[f"{layer}.self_attn.q_proj.weight"] = ("BF16", [HIDDEN, HIDDEN])
        for name in ("k_proj", "v_proj"):
            entries[f"{layer}.self_attn.{name}.weight"] = ("BF16", [1024, HIDDEN])
        entries[f"{layer}.self_attn.o_proj.weight"] = ("BF16", [HIDDEN, HIDDEN])
        for name in ("gate_proj", "up_proj"):
            entries[f"{layer}.mlp.{name}.weight"] = ("BF16", [12288, HIDDEN])
        entries[f"{layer}.mlp.down_proj.weight"] = ("BF16", [HIDDEN, 12288])
    return write(folder, DRAFTER, entries)
