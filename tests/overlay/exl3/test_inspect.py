"""`glm-vllm inspect`: a census from headers, at the real size within seconds, and every reason to refuse."""

import argparse
import json
import re
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from glm_vllm_overlay import inspect
from glm_vllm_overlay.node.errors import Unusable

SIZES = {"I16": 2, "F16": 2, "I32": 4, "BF16": 2}
HIDDEN, WIDTH, EXPERTS = 256, 256, 2


def write_shard(file: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A safetensors file of zeros whose data is a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)


def expert_tensors(layer: int, expert: int, hidden: int, width: int) -> dict[str, tuple[str, list[int]]]:
    result: dict[str, tuple[str, list[int]]] = {}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        rows, columns = (width, hidden) if projection == "down_proj" else (hidden, width)
        module = f"model.language_model.layers.{layer}.mlp.experts.{expert}.{projection}"
        result |= {
            f"{module}.trellis": ("I16", [rows // 16, columns // 16, 64]),
            f"{module}.suh": ("F16", [rows]),
            f"{module}.svh": ("F16", [columns]),
            f"{module}.mcg": ("I32", []),
        }
    return result


def write_checkpoint(
    folder: Path, tensors: dict[str, tuple[str, list[int]]], shards: int = 1, **text: Any
) -> dict[str, Any]:
    """A folder with config, index and `shards` files; returns the config for changing."""
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        write_shard(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    base = {
        "n_routed_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_nextn_predict_layers": 1,
    }
    config = {
        "text_config": {**base, **text},
        "quantization_config": {"quant_method": "exl3", "bits": 4, "codebook": "mcg"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.fixture
def tensors() -> dict[str, tuple[str, list[int]]]:
    """Two sparse layers and the MTP layer."""
    result = {"lm_head.weight": ("BF16", [16, HIDDEN])}
    for layer in (1, 2, 3):
        for expert in range(EXPERTS):
            result |= expert_tensors(layer, expert, HIDDEN, WIDTH)
    return result


def report(folder: Path, tp: int = 2) -> dict[str, Any]:
    return inspect.summarise(inspect.read_checkpoint(folder), tp)


def test_a_good_checkpoint(tmp_path: Path, tensors: dict) -> None:
    write_checkpoint(tmp_path, tensors, shards=3)
    found = report(tmp_path)
    assert found["ok"] and not found["problems"] and not found["warnings"]
    assert found["experts"] == {
        "layers": [1, 2, 3],
        "per_layer": [EXPERTS],
        "bits": [4],
        "codebook": "mcg",
        "bytes": 3 * EXPERTS * 3 * (256 * 256 // 2 + 512 + 512 + 4),
    }
    assert found["native"]["bytes"] == 16 * HIDDEN * 2
    # A rank of two: half of each trellis, half of svh (gate, up) or suh (down), the other scale and the marker whole.
    assert found["per_rank"]["expert_bytes"] == 3 * EXPERTS * 3 * (256 * 256 // 4 + 256 + 512 + 4)


CHANGES = {
    "a missing tensor": (lambda t: t.pop(next(k for k in t if k.endswith("up_proj.suh"))), "layer 1 has 5 of 6 suh"),
    "mixed bits": (
        lambda t: t.update({k: ("I16", [16, 16, 48]) for k in [k for k in t if "layers.2" in k and "trellis" in k]}),
        "experts of 3, 4 bits are mixed",
    ),
    "mixed codebooks": (
        lambda t: t.update(
            {k.replace("mcg", "mul1"): t.pop(k) for k in [k for k in t if "layers.2" in k and "mcg" in k]}
        ),
        "of the mcg and the mul1 codebook are mixed",
    ),
    "packed attention": (
        lambda t: t.update({"model.language_model.layers.0.self_attn.o_proj.trellis": ("I16", [16, 16, 64])}),
        r"1 modules outside the routed experts are packed too \(model.language_model.layers.0.self_attn.o_proj\)",
    ),
    "a native expert": (
        lambda t: t.update({"model.language_model.layers.2.mlp.experts.0.up_proj.weight": ("BF16", [256, 256])}),
        "1 expert tensors are not packed beside others",
    ),
    "a layer without experts": (
        lambda t: [t.pop(k) for k in [k for k in t if "layers.3" in k]],
        r"layer 3 has no packed experts \(1 such layers\)",
    ),
    "wrong dtype": (
        lambda t: t.update({k: ("BF16", v[1]) for k, v in list(t.items()) if k.endswith("experts.0.up_proj.svh")}),
        "up_proj.svh is BF16, EXL3 stores F16",
    ),
    "wrong shape": (
        lambda t: t.update({k: ("I16", [8, 32, 64]) for k in list(t) if k.endswith("experts.0.up_proj.trellis")}),
        r"a up_proj trellis is \[8, 32, 64\], not of 256 x 256",
    ),
    "a trellis of 20 words": (
        lambda t: t.update({k: ("I16", [16, 16, 20]) for k in list(t) if k.endswith("experts.0.up_proj.trellis")}),
        r"up_proj.trellis has shape \[16, 16, 20\], which is no trellis",
    ),
    "a missing marker": (lambda t: t.pop(next(k for k in t if k.endswith("mcg"))), "layer 1 has 5 of 6 mcg tensors"),
    "a marker of two": (
        lambda t: t.update({k: ("I32", [2]) for k in list(t) if k.endswith("experts.0.up_proj.mcg")}),
        "a marker is one number",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_reasons_to_refuse(tmp_path: Path, tensors: dict, change: str) -> None:
    alter, message = CHANGES[change]
    alter(tensors)
    write_checkpoint(tmp_path, tensors)
    found = report(tmp_path)
    assert not found["ok"]
    import re

    assert any(re.search(message, problem) for problem in found["problems"]), found["problems"]


def test_stamp_and_tensors_must_agree(tmp_path: Path, tensors: dict) -> None:
    config = write_checkpoint(tmp_path, tensors)
    config["quantization_config"]["bits"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "config.json promises bits 3, the tensors have 4: correct config.json" in report(tmp_path)["problems"]


def test_another_stamp_is_a_note(tmp_path: Path, tensors: dict) -> None:
    config = write_checkpoint(tmp_path, tensors)
    config["quantization_config"] = {"quant_method": "modelopt"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = report(tmp_path)
    assert found["ok"] and "quant_method 'modelopt'; the tensors are EXL3" in found["warnings"][0]


def test_other_widths_are_served_by_the_reference_only(tmp_path: Path, tensors: dict) -> None:
    three = {k: ("I16", [*v[1][:2], 48]) if k.endswith("trellis") else v for k, v in tensors.items()}
    config = write_checkpoint(tmp_path, three)
    config["quantization_config"]["bits"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = report(tmp_path)
    assert found["ok"] and "this one needs exl3_backend reference" in found["warnings"][0]


def test_ranks_that_would_cut_the_rotation(tmp_path: Path, tensors: dict) -> None:
    write_checkpoint(tmp_path, tensors)
    assert any("cannot be split over 4 ranks" in problem for problem in report(tmp_path, tp=4)["problems"])


def test_native_checkpoints_are_none_of_ours(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path, {"lm_head.weight": ("BF16", [16, HIDDEN])})
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = report(tmp_path)
    assert found["problems"] == ["its experts are not packed EXL3: serve it without --quantization exl3"]
    assert found["warnings"] == []


@pytest.mark.parametrize("key", ["n_routed_experts", "hidden_size", "moe_intermediate_size"])
def test_a_configuration_without_sizes(tmp_path: Path, tensors: dict, key: str) -> None:
    config = write_checkpoint(tmp_path, tensors)
    del config["text_config"][key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert report(tmp_path)["problems"] == [
        "config.json names no n_routed_experts, hidden_size or moe_intermediate_size"
    ]


def test_hidden_sizes_that_would_cut_the_rotation(tmp_path: Path, tensors: dict) -> None:
    write_checkpoint(tmp_path, tensors, hidden_size=192)
    assert any("the 128-wide rotation must not be cut" in problem for problem in report(tmp_path)["problems"])


def test_a_configuration_that_does_not_list_its_layers(tmp_path: Path, tensors: dict) -> None:
    write_checkpoint(tmp_path, tensors, mlp_layer_types=None)
    assert report(tmp_path)["ok"]


def test_one_file_needs_no_index(tmp_path: Path, tensors: dict) -> None:
    write_checkpoint(tmp_path, tensors)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert report(tmp_path)["ok"]


def test_files_that_are_not_what_the_index_says(tmp_path: Path, tensors: dict) -> None:
    write_checkpoint(tmp_path, tensors, shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    assert f"lies in {first.name}, where the index does not expect it" in report(tmp_path)["problems"][0]
    write_checkpoint(tmp_path, tensors, shards=2)
    some = dict(list(tensors.items())[::2][:-1])
    write_shard(first, some)
    assert report(tmp_path)["problems"][0] == "1 tensors of the index are in none of the files"


def test_damaged_folders(tmp_path: Path, tensors: dict) -> None:
    with pytest.raises(Unusable, match="has no config.json"):
        inspect.read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Unusable, match="config.json is not JSON"):
        inspect.read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Unusable, match="holds no safetensors file"):
        inspect.read_checkpoint(tmp_path)
    write_checkpoint(tmp_path, tensors, shards=2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(Unusable, match="its header says"):
        inspect.read_checkpoint(tmp_path)
    file.write_bytes(whole[:8] + b"{" + whole[9:].replace(b"}", b"]"))
    with pytest.raises(Unusable, match="has a damaged header"):
        inspect.read_checkpoint(tmp_path)
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(Unusable, match="is no safetensors file"):
        inspect.read_checkpoint(tmp_path)
    file.unlink()
    problems = report(tmp_path)["problems"]
    assert "model-00002-of-00002.safetensors, which the index names, is missing" in problems[0]
    assert not any("are in none of the files" in problem for problem in problems)  # said once is enough


def test_real_size_within_five_seconds_and_a_gibibyte(tmp_path: Path) -> None:
    """150,226 tensors in 120 shards: 43 layers of 288 experts, and 1,618 native tensors."""
    tensors: dict[str, tuple[str, list[int]]] = {f"native.{i}.weight": ("BF16", [64, 64]) for i in range(1618)}
    for layer in range(3, 46):
        for expert in range(288):
            tensors |= expert_tensors(layer, expert, 4096, 2048)
    assert len(tensors) == 150_226
    write_checkpoint(
        tmp_path, tensors, shards=120, n_routed_experts=288, hidden_size=4096, moe_intermediate_size=2048,
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 42,
    )  # fmt: skip
    code = (
        "import argparse, sys; from glm_vllm_overlay import inspect; parser = argparse.ArgumentParser();"
        "parser.add_argument('--json', action='store_true'); inspect.add_arguments(parser);"
        "code = inspect.run(parser.parse_args(sys.argv[1:]));"
        "print(open('/proc/self/status').read(), file=sys.stderr); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "--json"],
        capture_output=True, text=True, check=False, env={"PYTHONPATH": str(Path(inspect.__file__).parents[1])},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert found["experts"]["layers"] == list(range(3, 46)) and found["tensors"] == 150_226
    assert round((found["per_rank"]["expert_bytes"] - 43 * 288 * 3 * 4) / 43 / 288) == 6_322_176
    # Processor time: on a busy machine the clock on the wall measures the others too.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    # Its own pages: getrusage would count what the test's process held before it became this one.
    assert int(re.search(r"VmHWM:\s+(\d+) kB", done.stderr)[1]) < 1 << 20


def test_command_prints_a_verdict(tmp_path: Path, tensors: dict, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, tensors)
    assert inspect.run(argparse.Namespace(checkpoint=tmp_path, tp=2, json=False)) == 0
    assert "3 layers of 2, 4 bits, codebook mcg" in (text := capsys.readouterr().out) and "served by" in text
    assert "experts  3 layers of 2, 4 bits, codebook mcg, 0.6 MiB" in text
    with pytest.raises(Unusable, match="--tp is 0: give the number of ranks"):
        inspect.run(argparse.Namespace(checkpoint=tmp_path, tp=0, json=False))
    assert inspect.run(argparse.Namespace(checkpoint=tmp_path, tp=4, json=False)) == 1
    assert "refused  experts of width 256 cannot be split over 4 ranks" in capsys.readouterr().out
