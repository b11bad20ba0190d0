"""`glm-vllm inspect CHECKPOINT`: what a checkpoint holds and whether this overlay serves it, from file headers alone.

Reads config.json, the index and the JSON header of every safetensors file: no tensor, no torch.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import struct
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm_vllm_overlay.node.errors import Unusable

EXPERT = re.compile(r"(?:^|\.)layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.([a-z0-9_]+)$")
PARTS = ("trellis", "suh", "svh")
MARKERS = ("mcg", "mul1")
DTYPES = {"trellis": "I16", "suh": "F16", "svh": "F16", "mcg": "I32", "mul1": "I32"}
KERNEL_BITS, KERNEL_CODEBOOK = 4, "mcg"
HEADER_LIMIT = 256 << 20


@dataclass
class Layer:
    """Census of one layer's experts."""

    experts: set[int] = field(default_factory=set)
    parts: Counter[str] = field(default_factory=Counter)
    trellis: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)  # (projection, shape) → count
    split_bytes: int = 0  # divided by the tensor-parallel size
    whole_bytes: int = 0  # held by every rank
    wrong: list[str] = field(default_factory=list)


@dataclass
class Checkpoint:
    """A checkpoint's headers, summed up. Sizes in bytes."""

    path: Path
    config: dict[str, Any]
    files: int = 0
    tensors: int = 0
    native: dict[str, int] = field(default_factory=dict)  # name → bytes of every tensor that is no packed expert
    native_dtypes: Counter[str] = field(default_factory=Counter)
    layers: dict[int, Layer] = field(default_factory=lambda: defaultdict(Layer))
    dense: list[str] = field(default_factory=list)  # packed modules outside the routed experts
    native_experts: int = 0
    file_problems: list[str] = field(default_factory=list)

    @property
    def expert_layers(self) -> list[int]:
        return sorted(number for number, layer in self.layers.items() if layer.parts)

    @property
    def all_bits(self) -> set[int]:
        return {shape[2] // 16 for layer in self.layers.values() for _, shape in layer.trellis}

    @property
    def bits(self) -> int | None:
        """K when the whole checkpoint has one."""
        return next(iter(self.all_bits)) if len(self.all_bits) == 1 else None

    @property
    def codebook(self) -> str | None:
        markers = {marker for layer in self.layers.values() for marker in MARKERS if layer.parts[marker]}
        if len(markers) > 1 or not self.expert_layers:
            return None
        return markers.pop() if markers else "3inst"

    @property
    def text(self) -> dict[str, Any]:
        return self.config.get("text_config", self.config)

    @property
    def native_bytes(self) -> int:
        return sum(self.native.values())

    def expert_bytes(self, tp: int, layers: int | None = None) -> int:
        """Bytes of packed experts on each of `tp` ranks, of the first `layers` layers or of all."""
        return sum(
            layer.split_bytes // tp + layer.whole_bytes
            for number, layer in self.layers.items()
            if layers is None or number < layers
        )

    def problems(self, stamp: dict[str, Any] | None = None, tp: int = 1) -> list[str]:
        """Why the overlay refuses this checkpoint at tensor-parallel size `tp`; empty when it serves it.

        `stamp` = the bits and codebook that config.json promises (None values promise nothing).
        """
        found = list(self.file_problems)
        if not self.expert_layers:
            return [*found, "its experts are not packed EXL3: serve it without --quantization exl3"]
        if self.native_experts:
            found.append(f"{self.native_experts} expert tensors are not packed beside others that are")
        if len(self.all_bits) != 1:
            found.append(f"experts of {', '.join(map(str, sorted(self.all_bits)))} bits are mixed; one width is served")
        if self.codebook is None:
            found.append("experts of the mcg and the mul1 codebook are mixed; one codebook is served")
        for key, actual in (("bits", self.bits), ("codebook", self.codebook)):
            promised = (stamp or {}).get(key)
            if promised is not None and actual is not None and promised != actual:
                found.append(f"config.json promises {key} {promised}, the tensors have {actual}: correct config.json")
        if self.dense:
            found.append(
                f"{len(self.dense)} modules outside the routed experts are packed too ({self.dense[0]}): vLLM builds"
                " those without quantisation; take a pack of the routed experts only"
            )
        found += self._census(tp)
        return found

    def _census(self, tp: int) -> list[str]:
        found = [problem for layer in self.layers.values() for problem in layer.wrong[:3]]
        experts, hidden = self.text.get("n_routed_experts"), self.text.get("hidden_size")
        width = self.text.get("moe_intermediate_size")
        if not experts or not hidden or not width:
            return [*found, "config.json names no n_routed_experts, hidden_size or moe_intermediate_size"]
        if width % (128 * tp) or hidden % 128:
            found.append(
                f"experts of width {width} cannot be split over {tp} ranks: the 128-wide rotation must not be cut"
            )
        if missing := set(self._moe_layers()) - set(self.expert_layers):
            found.append(f"layer {min(missing)} has no packed experts ({len(missing)} such layers)")
        names = (*PARTS, self.codebook) if self.codebook in MARKERS else PARTS
        for number in self.expert_layers:
            layer = self.layers[number]
            for part in names:
                if part and layer.parts[part] != experts * 3:
                    found.append(f"layer {number} has {layer.parts[part]} of {experts * 3} {part} tensors")
            for projection, shape in layer.trellis:
                rows, columns = (width, hidden) if projection == "down_proj" else (hidden, width)
                if shape[:2] != (rows // 16, columns // 16):
                    found.append(f"layer {number}: a {projection} trellis is {list(shape)}, not of {rows} x {columns}")
        return found

    def _moe_layers(self) -> list[int]:
        """Layers that must have experts by config.json; empty when it does not say."""
        kinds = self.text.get("mlp_layer_types")
        if not kinds:
            return []
        extra = range(len(kinds), len(kinds) + (self.text.get("num_nextn_predict_layers") or 0))
        return [i for i, kind in enumerate(kinds) if kind == "sparse"] + list(extra)

    def warnings(self) -> list[str]:
        """What the overlay serves all the same, but not at full speed or only after reading the tensors."""
        notes = []
        method = self.config.get("quantization_config", {}).get("quant_method")
        if self.expert_layers and method != "exl3":
            notes.append(f"config.json says quant_method {method!r}; the tensors are EXL3 and are served as such")
        if self.expert_layers and (self.bits, self.codebook) != (KERNEL_BITS, KERNEL_CODEBOOK):
            notes.append(
                f"the kernels serve {KERNEL_BITS}-bit {KERNEL_CODEBOOK}; this one needs exl3_backend reference"
            )
        return notes


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the headers under `path`; Unusable when it is no checkpoint folder or a header cannot be parsed."""
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise Unusable(f"{path} has no config.json: give the folder of a checkpoint") from None
    except ValueError as error:
        raise Unusable(f"{path}/config.json is not JSON ({error}): fetch the file again") from None
    checkpoint = Checkpoint(path, config)
    index = path / "model.safetensors.index.json"
    promised: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    names = sorted(set(promised.values())) or sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        raise Unusable(f"{path} holds no safetensors file: give the folder of a checkpoint")
    seen = 0
    for name in names:
        if not (path / name).is_file():
            checkpoint.file_problems.append(f"{name}, which the index names, is missing: fetch the checkpoint again")
            continue
        checkpoint.files += 1
        for tensor, entry in _header(path / name).items():
            if promised and promised.get(tensor) != name:
                checkpoint.file_problems.append(f"{tensor} lies in {name}, where the index does not expect it")
            seen += 1
            _count(checkpoint, tensor, entry)
    if promised and not checkpoint.file_problems and seen != len(promised):
        checkpoint.file_problems.append(f"{len(promised) - seen} tensors of the index are in none of the files")
    checkpoint.tensors = seen
    return checkpoint


def _header(file: Path) -> dict[str, Any]:
    """The tensors of one safetensors file: name → dtype, shape, data_offsets."""
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= size <= HEADER_LIMIT:
            raise Unusable(f"{file} is no safetensors file (header of {size} bytes): fetch it again")
        try:
            header = json.loads(stream.read(size))
        except ValueError:
            raise Unusable(f"{file} has a damaged header: fetch it again") from None
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if file.stat().st_size != 8 + size + end:
            raise Unusable(f"{file} is {file.stat().st_size} bytes, its header says {8 + size + end}: fetch it again")
    header.pop("__metadata__", None)
    return header


def _count(checkpoint: Checkpoint, name: str, entry: dict[str, Any]) -> None:
    size = entry["data_offsets"][1] - entry["data_offsets"][0]
    match = EXPERT.search(name)
    part = match[4] if match else name.rsplit(".", 1)[-1]
    if match is None or part not in DTYPES:
        if part in ("trellis",):
            checkpoint.dense.append(name.rsplit(".", 1)[0])
        checkpoint.native_experts += match is not None
        checkpoint.native[name] = size
        checkpoint.native_dtypes[entry["dtype"]] += 1
        return
    number, projection, shape = int(match[1]), match[3], tuple(entry["shape"])
    layer = checkpoint.layers[number]
    layer.experts.add(int(match[2]))
    layer.parts[part] += 1
    if entry["dtype"] != DTYPES[part]:
        layer.wrong.append(f"{name} is {entry['dtype']}, EXL3 stores {DTYPES[part]}")
    elif part == "trellis":
        if len(shape) == 3 and shape[2] % 16 == 0 and 1 <= shape[2] // 16 <= 8:
            layer.trellis[projection, shape] += 1
        else:
            layer.wrong.append(f"{name} has shape {list(shape)}, which is no trellis")
    elif part in MARKERS and math.prod(shape) != 1:
        layer.wrong.append(f"{name} has shape {list(shape)}, a marker is one number")
    if part == "trellis" or part == ("suh" if projection == "down_proj" else "svh"):
        layer.split_bytes += size
    else:
        layer.whole_bytes += size


def summarise(checkpoint: Checkpoint, tp: int) -> dict[str, Any]:
    """The report of `--json`."""
    stamp = checkpoint.config.get("quantization_config", {})
    exl3_stamp = {key: stamp.get(key) for key in ("bits", "codebook")} if stamp.get("quant_method") == "exl3" else None
    problems = checkpoint.problems(exl3_stamp, tp)
    layers = checkpoint.expert_layers
    return {
        "schema": 1,
        "ok": not problems,
        "checkpoint": str(checkpoint.path),
        "files": checkpoint.files,
        "tensors": checkpoint.tensors,
        "experts": {
            "layers": layers,
            "per_layer": sorted({len(checkpoint.layers[number].experts) for number in layers}),
            "bits": sorted(checkpoint.all_bits),
            "codebook": checkpoint.codebook,
            "bytes": checkpoint.expert_bytes(1),
        },
        "native": {
            "tensors": len(checkpoint.native),
            "bytes": checkpoint.native_bytes,
            "dtypes": dict(checkpoint.native_dtypes),
        },
        "per_rank": {
            "tensor_parallel": tp,
            "expert_bytes": checkpoint.expert_bytes(tp),
            # Which native tensors a rank shares or holds whole is the model's business: these are the bounds.
            "native_bytes": [checkpoint.native_bytes // tp, checkpoint.native_bytes],
        },
        "problems": problems,
        "warnings": checkpoint.warnings(),
    }


def _size(count: int) -> str:
    """Bytes for people."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `glm-vllm inspect`."""
    parser.add_argument("checkpoint", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size to compute bytes for (default: 2)")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 when the overlay serves the checkpoint, 1 when it does not."""
    if args.tp < 1:
        raise Unusable(f"--tp is {args.tp}: give the number of ranks, at least 1")
    report = summarise(read_checkpoint(args.checkpoint), args.tp)
    if args.json:
        print(json.dumps(report))
        return 0 if report["ok"] else 1
    experts, native, rank = report["experts"], report["native"], report["per_rank"]
    low, high = map(_size, rank["native_bytes"])
    print(f"{report['tensors']} tensors in {report['files']} files")
    print(
        f"experts  {len(experts['layers'])} layers of {'/'.join(map(str, experts['per_layer'])) or '0'},"
        f" {'/'.join(map(str, experts['bits'])) or 'no'} bits, codebook {experts['codebook']},"
        f" {_size(experts['bytes'])}"
    )
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(native["dtypes"].items()))
    print(f"native   {native['tensors']} tensors ({kinds}), {_size(native['bytes'])}")
    print(
        f"a rank   of {rank['tensor_parallel']}: {_size(rank['expert_bytes'])} of experts, {low} to {high} of the rest"
    )
    for warning in report["warnings"]:
        print(f"note     {warning}")
    for problem in report["problems"]:
        print(f"refused  {problem}")
    print("served by this overlay" if report["ok"] else "not served by this overlay")
    return 0 if report["ok"] else 1
