"""`glm-vllm build`: compile the EXL3 kernels, or FlashInfer's modules, with the toolkit's nvcc, for the pair's GPU."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from glm_vllm_overlay import modules
from glm_vllm_overlay.exl3 import build as kernels
from glm_vllm_overlay.exl3.library import library_path
from glm_vllm_overlay.node.errors import Refusal

GIB = 1 << 30


def job_limit(available: int) -> int:
    """Parallel compilations that fit beside a desktop and the page cache: one per 8 GiB above 16 GiB, 1 to 8."""
    return max(1, min(8, (available - 16 * GIB) // (8 * GIB)))


def memory_available(meminfo: Path) -> int:
    """MemAvailable of a /proc/meminfo, in bytes."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `glm-vllm build`."""
    parser.add_argument(
        "--modules", action="store_true", help="FlashInfer's modules instead, where the engine's environment says"
    )
    parser.add_argument(
        "--cuda-home", type=Path, default=kernels.default_cuda_home(), help="CUDA toolkit, 13.0 to 13.x"
    )
    parser.add_argument("--target", type=Path, default=library_path().parent, help="folder for the library")
    parser.add_argument("--work", type=Path, default=Path("/opt/glm-vllm/kernel-cache"), help="kept: objects")
    parser.add_argument(
        "--arch", default=kernels.ARCH, help="GPU architecture as nvcc writes it (default: %(default)s)"
    )
    parser.add_argument(
        "--exllamav3", type=Path, help="unpacked exllamav3_ext sources (default: the installed package)"
    )
    parser.add_argument(
        "--headers", type=Path, action="append", default=[], help="site folder with nvidia header wheels"
    )
    parser.add_argument("--cuobjdump", type=Path, help="cuobjdump (default: the toolkit's)")
    parser.add_argument("--jobs", type=int, help="parallel compilations (default: by free memory)")


def run(args: argparse.Namespace) -> int:
    """Build, print where and what; Refusal (exit 1) when anything about it is not as pinned."""
    available = memory_available(Path(os.environ.get("GLM_MEMINFO", "/proc/meminfo")))
    jobs = args.jobs or job_limit(available)
    return run_modules(args, jobs) if args.modules else run_kernels(args, jobs)


def run_modules(args: argparse.Namespace, jobs: int) -> int:
    """`--modules`."""
    kernels.Toolchain(args.cuda_home, Path(), Path()).nvcc_version()
    files = modules.compile_modules(jobs)
    if args.json:
        print(json.dumps({"schema": 1, "ok": True, "files": files}))
    else:
        print(f"{modules.workspace()}: {', '.join(files)}")
    return 0


def run_kernels(args: argparse.Namespace, jobs: int) -> int:
    """Without `--modules`."""
    sources, licence = (args.exllamav3, "") if args.exllamav3 else kernels.find_sources()
    chain = kernels.Toolchain(
        cuda_home=args.cuda_home,
        sources=sources,
        csrc=kernels.find_csrc(),
        headers=tuple(args.headers),
        arch=args.arch,
        cuobjdump=args.cuobjdump,
        licence=licence,
    )
    manifest = kernels.build(chain, args.work, args.target, jobs)
    if not manifest["files"]:
        raise Refusal(
            f"the kernels compile for {manifest['arch']}, but this environment's torch has no CUDA to link them with:"
            " install the release's lock"
        )
    if args.json:
        print(json.dumps({**manifest, "ok": True}))
    else:
        print(f"{args.target}: {len(manifest['kernels'])} kernels for {manifest['arch']}")
    return 0
