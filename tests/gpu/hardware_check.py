"""What a pair's hardware does with this release, without weights: a line a check, one JSON document, no secrets in it.

    python hardware_check.py WORK OUT.json [--only NAME …] [--rank 0|1 --master ADDRESS]

Needs vLLM 0.33.0, the built kernels ($GLM_EXL3_LIBRARY) and a CUDA device; without one each check that needs it says
so. Each runs in a process of its own with a time limit, so that one that fails or hangs hides no other. With --rank
and --master, on both nodes at the same time, the fabric's too. Exit 0 when no check failed. A line is
{"id", "state": "ok"|"failed"|"skipped", "detail", "seconds"}. playbooks/hardware_check.yml runs it on a pair.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCES, BENCHMARKS = HERE.parents[1] / "files/overlay/src", HERE.parents[1] / "files/overlay/benchmarks"
sys.path[:0] = [str(HERE), str(SOURCES), str(BENCHMARKS)]

from glm_vllm_overlay.node.redact import redact  # noqa: E402

Check = Callable[[argparse.Namespace], Any]
CHECKS: dict[str, tuple[Check, int, bool]] = {}  # id → what it does, its time limit in seconds, whether it takes a pair
PORT = 29577  # nothing of ours listens there
SOONEST = 10.0  # seconds: vLLM alone takes longer to import and load


class Failed(Exception):
    """What does not hold, in a sentence."""


class Skipped(Exception):
    """Why there is nothing to check here."""


def check(limit: int, pair: bool = False) -> Callable[[Check], Check]:
    """Register a function as the check of its name (dashes for underscores); it returns a detail or raises Failed."""

    def register(function: Check) -> Check:
        CHECKS[function.__name__.replace("_", "-")] = (function, limit, pair)
        return function

    return register


def close(name: str, ours: Any, reference: Any, tolerance: float) -> str:
    """‖ours - reference‖ / ‖reference‖, said; Failed beyond the tolerance or where something is not finite."""
    error = ((ours.double() - reference.double()).norm() / reference.double().norm()).item()
    if not error <= tolerance:
        raise Failed(f"{name}: relative error {error:.2e}, more than {tolerance:.0e}")
    return f"{name}: relative error {error:.1e}"


def program(file: Path, *arguments: object, limit: int) -> subprocess.CompletedProcess[str]:
    """Another script of ours, to its end."""
    command = [sys.executable, str(file), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)


def last_lines(done: subprocess.CompletedProcess[str]) -> str:
    return " | ".join((done.stdout + done.stderr).strip().splitlines()[-3:])[-600:]


# ---- the node by itself ---------------------------------------------------------------------------------------------
@check(60)
def device(options: argparse.Namespace) -> Any:
    import torch

    found = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    return (
        f"{found.name}, capability {found.major}.{found.minor}, {found.multi_processor_count} SMs, "
        f"{found.total_memory / 2**30:.1f} GiB, driver and clock {driver}, torch {torch.__version__}"
    )


@check(120)
def fp8_ds_mla(options: argparse.Namespace) -> Any:
    """The packed cache's writer, read back by its description: 512 fp8, four scales, 64 bfloat16."""
    import torch
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    latent, rope = (torch.randn(300, size, device="cuda", dtype=torch.bfloat16) for size in (512, 64))
    rope.zero_()  # what a model without RoPE writes there
    cache = torch.zeros(8, 64, 656, dtype=torch.uint8, device="cuda")
    slots = torch.randperm(512, device="cuda")[:300]
    ops.concat_and_cache_mla(latent, rope, cache, slots, "fp8_ds_mla", torch.ones(1, device="cuda"))
    rows = cache.view(512, 656)[slots]
    values = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(300, 4, 128)
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    if rows[:, 528:].any():
        raise Failed("the place of the rotary half is not zero")
    if int((cache.view(512, 656).any(1)).sum()) != 300:
        raise Failed("other slots than those named were written")
    return close("read back", (values * scales[..., None]).view(300, 512), latent, 0.04)


@check(300)
def deepgemm(options: argparse.Namespace) -> Any:
    """The indexer's logits: relu(q·k) summed over heads, against torch on the same fp8 values."""
    import torch
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits, is_deep_gemm_supported, mqa_logits_use_mx_scales

    if not is_deep_gemm_supported():
        raise Failed("vLLM says that DeepGEMM does not support this device")
    if mqa_logits_use_mx_scales():
        raise Skipped("this device takes another format of scales")
    torch.manual_seed(0)
    rows, keys, heads, size = 64, 1024, 32, 128
    q = torch.randn(rows, heads, size, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(keys, size, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(keys, device="cuda") + 0.5
    weights = torch.randn(rows, heads, device="cuda")
    starts = torch.zeros(rows, dtype=torch.int32, device="cuda")
    ends = torch.full((rows,), keys, dtype=torch.int32, device="cuda")
    ours = fp8_fp4_mqa_logits((q, None), (k, scales), weights, starts, ends, keys)
    products = torch.einsum("mhd,nd->mhn", q.float(), k.float()).relu() * scales
    return close("logits", ours[:, :keys].float(), torch.einsum("mhn,mh->mn", products, weights), 5e-3)


@check(300)
def flashkda(options: argparse.Namespace) -> Any:
    """The fused prefill of the linear layers against the recurrence, token by token, in float64."""
    import torch
    import vllm._flashkda_C  # noqa: F401

    torch.manual_seed(0)
    tokens, heads, size, bound = 200, 4, 128, -5.0
    q, k, v, gate = (torch.randn(1, tokens, heads, size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    beta = torch.randn(1, tokens, heads, device="cuda", dtype=torch.bfloat16)
    a_log, bias = torch.rand(heads, device="cuda"), torch.randn(heads, size, device="cuda")
    state = torch.randn(1, heads, size, size, device="cuda") * 0.1
    final, out = torch.empty_like(state), torch.empty_like(v)
    space = torch.ops._flashkda_C.get_workspace_size(tokens, heads, 1)
    bounds = torch.tensor([0, tokens], dtype=torch.int64, device="cuda")
    torch.ops._flashkda_C.fwd(
        q, k, v, gate, beta, size**-0.5, out, torch.empty(space, dtype=torch.uint8, device="cuda"), a_log, bias, bound,
        state, final, bounds, None, None,
    )  # fmt: skip

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()

    decay = (bound * torch.sigmoid(a_log.double().exp()[:, None] * (gate[0].double() + bias.double()))).exp()
    queries, keys, weight = unit(q[0]) * size**-0.5, unit(k[0]), torch.sigmoid(beta[0].double())

    def recurrence(memory: torch.Tensor) -> torch.Tensor:
        """memory [heads, keys, values]; the outputs of all tokens."""
        said = []
        for t in range(tokens):
            memory = memory * decay[t][..., None]
            new = (v[0, t].double() - torch.einsum("hk,hkv->hv", keys[t], memory)) * weight[t][:, None]
            memory = memory + torch.einsum("hk,hv->hkv", keys[t], new)
            said.append(torch.einsum("hk,hkv->hv", queries[t], memory))
        return torch.stack(said)

    # The state lies transposed in memory; either way round is settled by the first tokens.
    wanted = [recurrence(start) for start in (state[0].double(), state[0].double().transpose(1, 2))]
    best = min(wanted, key=lambda reference: (out[0].double() - reference).norm())
    return close("outputs", out[0], best, 2e-2)


@check(120)
def topk(options: argparse.Namespace) -> Any:
    """vLLM's persistent top-k of an index row, with drafts' rows and rows that are shorter than k."""
    import torch
    import vllm._custom_ops  # noqa: F401

    torch.manual_seed(0)
    wanted = 512
    for rows, width in ((1, 4096), (8, 65536), (32, 262144)):
        logits = torch.randn(rows, width, device="cuda")
        lengths = torch.randint(wanted // 2, width, (rows,), device="cuda", dtype=torch.int32)
        lengths[0] = width
        found = torch.empty(rows, wanted, dtype=torch.int32, device="cuda")
        space = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        torch.ops._C.persistent_topk(logits, lengths.view(-1, 1), found, space, wanted, width)
        for row, length in enumerate(lengths.tolist()):
            best = logits[row, :length].topk(min(wanted, length)).values.sort().values
            chosen = found[row][found[row] >= 0].long()
            if len(chosen) != len(best) or not torch.equal(logits[row][chosen].sort().values, best):
                raise Failed(f"{rows} rows of {width}: row {row} has other than the best {len(best)} of {length}")
    return "equal to torch's on 1, 8 and 32 rows up to 262144"


@check(300)
def moe_rows(options: argparse.Namespace) -> Any:
    """The packed experts at every number of rows that decoding has, against their decoded weights."""
    import torch
    from glm_vllm_overlay.exl3.execute import FusedBackend, ReferenceBackend
    from moe import make_experts, make_routing

    experts, hidden, width, top_k = 32, 4096, 1024, 8
    packed = make_experts(experts, hidden, width, "cuda")
    fused, reference = FusedBackend(packed, top_k), ReferenceBackend(packed)
    worst = 0.0
    for rows in range(1, 33):
        x = torch.randn(rows, hidden, device="cuda").half().float()
        ids, weights = make_routing(rows, experts, top_k, "cuda")
        weights = weights.half().float()
        ours, truth = fused.apply(x, weights, ids).double(), reference.apply(x, weights, ids).double()
        error = ((ours - truth).norm(dim=1) / truth.norm(dim=1)).max().item()
        if not error < 5e-3:
            raise Failed(f"{rows} rows: a token is off by {error:.1e}")
        worst = max(worst, error)
    return f"1 to 32 rows, worst token {worst:.1e}"


@check(420)
def moe_benchmark(options: argparse.Namespace) -> Any:
    """files/overlay/benchmarks/moe.py at the recipe's shape."""
    table = options.work / "moe.json"
    done = program(BENCHMARKS / "moe.py", "--out", table, "--tokens", 1, 8, 32, 1024, 4096, limit=400)
    if done.returncode:
        raise Failed(last_lines(done))
    return json.loads(table.read_text())


# ---- an engine on one node ------------------------------------------------------------------------------------------
@check(420)
def graph_capture(options: argparse.Namespace) -> Any:
    """A tiny packed model, eagerly and in CUDA graphs, against its decoded weights (tests/gpu/serving.py)."""
    out = options.work / "serving.json"
    cases = ("fused", "fused with CUDA graphs")
    done = program(HERE / "serving.py", options.work / "serving", out, "--cases", *cases, limit=400)
    told = json.loads(out.read_text()) if out.exists() else {"cases": {}}
    for case in told["cases"].values():
        case.pop("answers", None)
        case["error"] = case.get("error", "")[-400:]
    if done.returncode:
        raise Failed(json.dumps(told["cases"]) or last_lines(done))
    return told["cases"]


@check(580)
def speculators(options: argparse.Namespace) -> Any:
    """No speculation, MTP, DFlash2 as it is and split: text, prefix hits, drafts, cache (tests/gpu/speculation.py)."""
    out = options.work / "speculation.json"
    jobs = ("--jobs", 1, "--torch-topk")
    done = program(HERE / "speculation.py", options.work / "speculation", out, *jobs, limit=570)
    told = json.loads(out.read_text()) if out.exists() else {}
    if done.returncode:
        raise Failed("; ".join(told.get("problems", [])) or last_lines(done))
    return {case: value["startup"] for case, value in told.items() if isinstance(value, dict) and "startup" in value}


@check(60)
def backend(options: argparse.Namespace) -> Any:
    """What the engines of `speculators` chose; on 12.x it has to be the one that was made for it."""
    out = options.work / "speculation.json"
    if not out.exists():
        raise Failed("nothing to look at: `speculators` did not run")
    lines = {
        line for case in json.loads(out.read_text()).values() if isinstance(case, dict) for line in case["startup"]
    }
    chosen = sorted(line for line in lines if "backend" in line)
    import torch

    if torch.cuda.get_device_capability()[0] == 12 and "attention backend: FLASHINFER_MLA_SPARSE_SM120" not in chosen:
        raise Failed(f"not FLASHINFER_MLA_SPARSE_SM120: {'; '.join(chosen)}")
    return sorted(lines)


@check(420)
def pdl(options: argparse.Namespace) -> Any:
    """The same tokens with programmatic dependent launch and without."""
    import torch

    if torch.cuda.get_device_capability()[0] != 12:
        raise Skipped("hooks/pdl.py switches it on 12.x alone")
    said = {}
    for value in ("0", "1"):
        command = [sys.executable, str(HERE / "serving.py"), str(options.work / "serving"), "-", "--step", "generate"]
        environment = os.environ | {"GLM_PDL": value, "PYTHONPATH": f"{SOURCES}:{os.environ.get('PYTHONPATH', '')}"}
        extra = json.dumps({"additional_config": {"exl3_backend": "fused"}})
        done = subprocess.run(
            [*command, extra], env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
        if line is None:
            raise Failed(f"GLM_PDL={value}: {last_lines(done)}")
        said[value] = [answer["tokens"] for answer in json.loads(line.removeprefix("RESULT"))["answers"]]
    if said["0"] != said["1"]:
        raise Failed("other tokens with it than without")
    return f"{sum(map(len, said['0']))} tokens are the same"


# ---- the pair -------------------------------------------------------------------------------------------------------
@check(240, pair=True)
def nccl(options: argparse.Namespace) -> Any:
    """Sums of both ranks over both rails and over each alone: right, and GB/s (NCCL's bus bandwidth of two ranks)."""
    import torch
    import torch.distributed as dist

    fabric = fabric_environment()
    devices = [name for name in fabric.get("NCCL_IB_HCA", "").lstrip("=").split(",") if name]
    figures = {}
    for number, chosen in enumerate([devices, *([name] for name in devices if len(devices) > 1)]):
        os.environ.update(fabric | {"NCCL_IB_HCA": "=" + ",".join(chosen)} if chosen else fabric)
        where = f"tcp://{options.master}:{PORT + number}"
        dist.init_process_group("nccl", init_method=where, rank=options.rank, world_size=2)
        values = torch.full((64 << 20,), float(options.rank + 1), device="cuda", dtype=torch.bfloat16)
        dist.all_reduce(values)
        if not bool((values == 3).all()):
            raise Failed(f"{chosen or 'no rail named'}: the sum is wrong")
        torch.cuda.synchronize()
        start, rounds = time.monotonic(), 20
        for _ in range(rounds):
            dist.all_reduce(values)
        torch.cuda.synchronize()
        rate = rounds * values.nbytes / (time.monotonic() - start) / 1e9
        figures["+".join(chosen) or "default"] = round(rate, 2)
        dist.destroy_process_group()
    return figures


def fabric_environment() -> dict[str, str]:
    """What `glm-vllm fabric` wrote for this node's engine, or nothing."""
    try:
        lines = Path("/run/glm-vllm/fabric.env").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {name: value.strip('"') for name, value in pairs}


@check(300, pair=True)
def mp(options: argparse.Namespace) -> Any:
    """A tiny packed model on both nodes; rank 0 tells its tokens, rank 1 lends its device."""
    import serving

    folder = options.work / "serving/packed"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        serving.write_checkpoint(folder)  # the same bytes on both nodes: one seed
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--quantization", "exl3",
        "--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", str(options.rank), "--master-addr",
        options.master, "--master-port", str(PORT + 10), "--max-model-len", "4096", "--gpu-memory-utilization", "0.3",
        "--max-num-seqs", "4", "--kv-cache-dtype", "fp8", "--no-enable-flashinfer-autotune", "--limit-mm-per-prompt",
        '{"image":0,"video":0}', "--distributed-executor-backend", "mp",
    ]  # fmt: skip
    socket = options.work / "engine.sock"
    command += ["--headless"] if options.rank else ["--uds", str(socket)]
    environment = os.environ | fabric_environment() | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = options.work / "mp.log"
    with log.open("w") as out:
        engine = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        return _asked(socket, engine, log) if options.rank == 0 else _lent(engine, log)
    finally:
        engine.terminate()
        try:
            engine.wait(20)
        except subprocess.TimeoutExpired:
            engine.kill()


def _asked(socket_path: Path, engine: subprocess.Popen[bytes], log: Path) -> Any:
    import http.client
    import socket

    class Connection(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(120)
            self.sock.connect(str(socket_path))

    body = json.dumps({"model": "", "prompt": list(range(20, 60)), "max_tokens": 16, "temperature": 0})
    began = time.monotonic()
    while engine.poll() is None:
        try:
            connection = Connection("localhost")
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read().decode()
            if reply.status == 200:
                return f"answers after {time.monotonic() - began:.0f} s: {json.loads(text)['usage']}"
            raise Failed(f"the engine answered {reply.status}: {text[:200]}")
        except OSError:
            time.sleep(2)
    raise Failed(f"the engine ended: {_last_words(log)}")


def _last_words(log: Path) -> str:
    return " | ".join(log.read_text().strip().splitlines()[-3:])[-600:]


def _lent(engine: subprocess.Popen[bytes], log: Path) -> Any:
    """Rank 1 is there until rank 0 has what it wanted and goes. One that ends sooner than vLLM loads lent nothing."""
    began = time.monotonic()
    engine.wait(280)
    if time.monotonic() - began < SOONEST:
        raise Failed(f"the engine ended: {_last_words(log)}")
    return f"lent its device for {time.monotonic() - began:.0f} s"


# ---- running them ---------------------------------------------------------------------------------------------------
def no_device() -> bool:
    """Whether torch finds no CUDA device; asked in a process of its own, since CUDA can be asked only once."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False).returncode != 0


def carried_out(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One check in a process of its own; its line."""
    _, limit, pair = CHECKS[name]
    if pair and options.rank is None:
        return {"id": name, "state": "skipped", "detail": "needs both nodes", "seconds": 0}
    if options.no_device:
        return {"id": name, "state": "skipped", "detail": "no CUDA device", "seconds": 0}
    command = [sys.executable, str(Path(__file__).resolve()), str(options.work), "-", "--step", name]
    if options.rank is not None:
        command += ["--rank", str(options.rank), "--master", options.master]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
        try:
            process.wait(limit)
            line = {"state": "failed", "detail": f"ended with {process.returncode}"}
        except subprocess.TimeoutExpired:
            line = {"state": "failed", "detail": f"not within {limit} s"}
        finally:
            _end_group(process)
        out.seek(0)
        err.seek(0)
        told = [text.removeprefix("RESULT") for text in out.read().splitlines() if text.startswith("RESULT")]
        if told:
            line = json.loads(told[-1])
        elif process.returncode or "detail" not in line:
            line["detail"] += ": " + " | ".join(err.read().strip().splitlines()[-3:])[-600:]
    return {"id": name, **line, "seconds": round(time.monotonic() - began, 1)}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Engines that a check left behind end with it: they are in its process group."""
    import contextlib
    import signal

    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def step(name: str, options: argparse.Namespace) -> int:
    """The other side of `carried_out`."""
    try:
        line = {"state": "ok", "detail": CHECKS[name][0](options)}
    except Failed as error:
        line = {"state": "failed", "detail": str(error)}
    except Skipped as error:
        line = {"state": "skipped", "detail": str(error)}
    except Exception as error:
        import traceback

        traceback.print_exc()
        line = {"state": "failed", "detail": f"{type(error).__name__}: {error}"[:600]}
    print("RESULT" + json.dumps(line), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--rank", type=int, choices=(0, 1))
    parser.add_argument("--master", default="")
    parser.add_argument("--step", choices=list(CHECKS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        return step(options.step, options)
    if options.rank is not None and not options.master:
        parser.error("--rank needs --master, the head's address on the first rail")
    options.work.mkdir(parents=True, exist_ok=True)
    options.no_device = no_device()
    document: dict[str, Any] = {"schema": 1, "ok": False, "rank": options.rank, "checks": []}
    for name in options.only:
        line = carried_out(name, options)
        document["checks"].append(line)
        document["ok"] = all(found["state"] != "failed" for found in document["checks"])
        options.out.write_text(redact(json.dumps(document, indent=1)) + "\n")
        print(
            redact(f"{line['id']:<15} {line['state']:<8} {line['seconds']:6.1f} s  {str(line['detail'])[:300]}"),
            flush=True,
        )
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
