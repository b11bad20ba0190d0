"""Benchmark of one layer of packed experts at the recipe's shape (one rank of two): time, bytes, decode cycles.

    python moe.py --out table.json        needs a CUDA device and the built kernels ($GLM_EXL3_LIBRARY)

Side by side for every number of tokens T: exllamav3's cooperative kernel and our grouped one (what the `fused` backend
chooses from), exllamav3's kernel for many rows, the `loop` backend, a loop over exllamav3's GEMM (with `--exllamav3`,
then it is compiled), and vLLM's BF16 Triton MoE on decoded weights where vLLM can be imported. Routing is distinct for
every launch, so that no cache holds the weights. The cooperative kernel is timed in a CUDA graph, and with it the
shipped path up to 32 tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from glm_vllm_overlay.exl3 import format as exl3
from glm_vllm_overlay.exl3.execute import GROUP_TOKENS, Experts, FusedBackend, LoopBackend

TOKENS = (1, 2, 4, 8, 16, 32, 128, 1024, 4096, 7168)
GB10 = {"bytes_per_s": 231e9, "sms": 48, "clock_hz": 2.4e9}
LIMIT = 10.0


def make_experts(experts: int, hidden: int, width: int, device: str, seed: int = 0) -> Experts:
    """Random packed experts with outputs of the size that real ones have: every word is a valid trellis."""
    generator = torch.Generator(device).manual_seed(seed)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-32768, 32768, shape, dtype=torch.int16, device=device, generator=generator)

    def scale(size: float, *shape: int) -> torch.Tensor:
        sign = torch.randint(0, 2, shape, device=device, generator=generator) * 2 - 1
        return (sign * size * (0.75 + 0.5 * torch.rand(shape, device=device, generator=generator))).half()

    rows, columns = hidden // 16, width // 16
    return Experts(
        bits=4,
        codebook="mcg",
        limit=LIMIT,
        w13_trellis=words(experts, 2, rows, columns, 64),
        w13_suh=scale(1.0, experts, 1, hidden).repeat(1, 2, 1),  # gate and up share it, as in the recipe's pack
        w13_svh=scale(0.02, experts, 2, width),
        w2_trellis=words(experts, columns, rows, 64),
        w2_suh=scale(1.0, experts, width),
        w2_svh=scale(0.02, experts, hidden),
    )


def make_routing(tokens: int, experts: int, top_k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 and weights float32 ``[tokens, top_k]``: uniform choice, weights that sum to 2.5 as in the model."""
    ids = torch.rand(tokens, experts, device=device).topk(top_k, dim=1).indices
    weights = torch.rand(tokens, top_k, device=device)
    return ids, 2.5 * weights / weights.sum(1, keepdim=True)


def seconds(run: Callable[[int], Any], count: int, warm: int = 3) -> float:
    """Mean time of `run(i)` over `count` calls, by device events."""
    for i in range(warm):
        run(i)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for i in range(count):
        run(i)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e-3 / count


def graph_seconds(run: Callable[[int], Any], launches: int) -> float:
    """Mean time of `run(i)` for i in 0..launches, captured into one CUDA graph."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i)
    return seconds(lambda _: graph.replay(), 5, warm=1) / launches


def copy_ceiling() -> float:
    """Bytes read plus written per second of a large device-to-device copy."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda _: target.copy_(source), 10)


def sm_clock() -> float:
    """Current SM clock in Hz, read while the device is busy."""
    import pynvml

    block = torch.randn(8192, 8192, device="cuda").half()
    for _ in range(40):
        block @ block
    pynvml.nvmlInit()
    clock = pynvml.nvmlDeviceGetClockInfo(pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.NVML_CLOCK_SM) * 1e6
    torch.cuda.synchronize()
    return clock


def triton_moe(experts: Experts) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """vLLM's BF16 MoE on the decoded weights; None where vLLM is not installed."""
    try:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe import fused_experts
    except ImportError:
        return None
    gate, up, down = experts.projections()
    count = gate.trellis.shape[0]
    w13 = torch.empty(count, 2 * experts.width, experts.hidden, dtype=torch.bfloat16, device="cuda")
    w2 = torch.empty(count, experts.hidden, experts.width, dtype=torch.bfloat16, device="cuda")
    for e in range(count):
        for i, part in enumerate((gate, up)):
            one = exl3.Packed(part.trellis[e], part.suh[e], part.svh[e])
            w13[e, i * experts.width : (i + 1) * experts.width] = exl3.dequantise(one).t()
        w2[e] = exl3.dequantise(exl3.Packed(down.trellis[e], down.suh[e], down.svh[e])).t()
    config = VllmConfig()

    def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        with set_current_vllm_config(config):
            return fused_experts(x, w13, w2, weights, ids.int())

    return run


def gemm_loop_of(experts: Experts, sources: Path | None) -> Any | None:
    """The loop over exllamav3's GEMM, compiled from its CUDA sources; None without them."""
    if sources is None:
        return None
    from gemm_loop import GemmLoop, load
    from glm_vllm_overlay.exl3 import build

    major, minor = torch.cuda.get_device_capability()
    arch = "121a" if (major, minor) == (12, 1) else f"{major}{minor}"
    load(build.Toolchain(build.default_cuda_home(), sources, Path(), arch=arch), Path("/tmp/glm-exl3-work"), 8)
    yardstick = GemmLoop(experts)
    x = torch.randn(16, experts.hidden, device="cuda").bfloat16()
    ids, weights = make_routing(16, experts.w2_suh.shape[0], 8, "cuda")
    ours, theirs = LoopBackend(experts).apply(x, weights, ids).float(), yardstick.apply(x, weights, ids).float()
    error = float((ours - theirs).norm() / ours.norm())
    assert error < 5e-3, f"the yardstick computes something else: relative difference {error}"
    return yardstick


class RowsKernel:
    """exllamav3's own kernel for many rows (`exl3_moe`), with scratch for every row. A yardstick: never shipped."""

    batch = 7168

    def __init__(self, fused: FusedBackend, experts: Experts) -> None:
        groups = torch.ops.glm_exl3.concurrency(0)
        self.fused, self.experts = fused, experts
        self.state = torch.empty(2, groups, self.batch, experts.hidden, dtype=torch.float16, device="cuda")
        self.mid = torch.empty(2, groups, self.batch, experts.width, dtype=torch.float16, device="cuda")

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device="cuda")
        for start in range(0, x.shape[0], self.batch):
            part = slice(start, start + self.batch)
            flat = ids[part].flatten()
            order = torch.argsort(flat, stable=True)
            counts = torch.zeros(self.fused.tables.shape[1] + 1, dtype=torch.int64, device="cuda")
            counts.scatter_add_(0, flat, torch.ones_like(flat))
            torch.ops.glm_exl3.moe_rows(
                x[part], counts, order // ids.shape[1], weights[part].flatten()[order], self.fused.tables,
                self.experts.bits, self.experts.limit, self.state, self.mid, out[part],
            )  # fmt: skip
        return out


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rows of the table for the shape in `args`."""
    experts = make_experts(args.experts, args.hidden, args.width, "cuda")
    fused = FusedBackend(experts, args.top_k)
    loop = LoopBackend(experts)
    rows_kernel = RowsKernel(fused, experts)
    triton = triton_moe(experts)
    gemm = gemm_loop_of(experts, args.exllamav3)
    expert_bytes = sum(
        t.numel() * t.element_size() // args.experts
        for packed in experts.projections()
        for t in (packed.trellis, packed.suh, packed.svh)
    )
    tiles = 3 * args.hidden * args.width // 256
    properties = torch.cuda.get_device_properties(0)
    ceiling, clock = copy_ceiling(), sm_clock()
    rows = []
    for tokens in args.tokens:
        x = torch.randn(tokens, args.hidden, device="cuda").bfloat16()
        launches = 64 if tokens <= 32 else 4
        routes = [make_routing(tokens, args.experts, args.top_k, "cuda") for _ in range(launches)]
        active = sum(ids.unique().numel() for ids, _ in routes) / launches
        times: dict[str, float | None] = {"coop": None, "triton_bf16": None}
        halves = [(x.half(), weights.half(), ids) for ids, weights in routes]

        def routed(run: Callable[..., Any], x: torch.Tensor = x, routes: list[Any] = routes) -> Callable[[int], Any]:
            """`run(x, weights, ids)` with the routing of launch i."""
            return lambda i: run(x, routes[i % len(routes)][1], routes[i % len(routes)][0])

        if tokens <= fused.scratch.tokens:
            times["coop"] = graph_seconds(lambda i: fused._coop(*halves[i]), launches)
        times["rows"] = seconds(lambda i: rows_kernel(*halves[i % launches]), launches)
        out = torch.empty(tokens, args.hidden, device="cuda")
        if tokens <= GROUP_TOKENS:
            times["grouped"] = seconds(lambda i: fused._grouped(*halves[i % launches], out), launches)
        if tokens in (8, 1024):
            times["loop"] = seconds(routed(loop.apply), 3, warm=1)
        if gemm is not None:
            times["gemm_loop"] = seconds(routed(gemm.apply), 4, warm=4)
        if triton is not None:
            times["triton_bf16"] = seconds(routed(triton), launches)
        shipped = routed(fused.apply)
        times["shipped"] = graph_seconds(shipped, launches) if times["coop"] else seconds(shipped, launches)
        best = times["coop"] or times["shipped"]
        cycles = best * clock * properties.multi_processor_count
        rows.append(
            {
                "tokens": tokens,
                "active_experts": active,
                "seconds": times,
                "bytes_over_ceiling": active * expert_bytes / best / ceiling,
                "sm_cycles_per_tile": cycles / (active * tiles),
                "gb10_seconds": max(
                    active * expert_bytes / GB10["bytes_per_s"], cycles / (GB10["sms"] * GB10["clock_hz"])
                ),
                "gb10_bound": "bytes"
                if active * expert_bytes / GB10["bytes_per_s"] > cycles / (GB10["sms"] * GB10["clock_hz"])
                else "cycles",
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return {
        "schema": 1,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": properties.name,
        "driver": _driver(),
        "sms": properties.multi_processor_count,
        "sm_clock_hz": clock,
        "copy_bytes_per_s": ceiling,
        "shape": {"experts": args.experts, "hidden": args.hidden, "width": args.width, "top_k": args.top_k, "bits": 4},
        "rows": rows,
    }


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


def table(report: dict[str, Any]) -> str:
    """Markdown table of a report, times in µs."""

    def us(value: float | None) -> str:
        return "–" if value is None else f"{value * 1e6:.0f}"

    lines = [
        "| T | active experts | shipped | coop | grouped | rows | GEMM loop | loop | BF16 Triton"
        " | bytes / ceiling | SM cycles a tile | GB10, predicted |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        t = row["seconds"]
        lines.append(
            f"| {row['tokens']} | {row['active_experts']:.1f} | {us(t['shipped'])} | {us(t['coop'])}"
            f" | {us(t.get('grouped'))} | {us(t['rows'])} | {us(t.get('gemm_loop'))}"
            f" | {us(t.get('loop'))} | {us(t['triton_bf16'])}"
            f" | {row['bytes_over_ceiling']:.2f} | {row['sm_cycles_per_tile']:.0f}"
            f" | {us(row['gb10_seconds'])} ({row['gb10_bound']}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--experts", type=int, default=288)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024, help="expert width on one rank")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--exllamav3", type=Path, help="exllamav3's CUDA sources (exllamav3_ext), for its GEMM")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    args = parser.parse_args()
    report = measure(args)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
