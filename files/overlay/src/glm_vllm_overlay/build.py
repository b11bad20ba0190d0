"""`glm-vllm build`: compile the EXL3 kernels, FlashInfer's modules, or what the engine compiles by itself."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from glm_vllm_overlay import modules, rehearsal
from glm_vllm_overlay.exl3 import build as kernels
from glm_vllm_overlay.exl3.library import library_path
from glm_vllm_overlay.node import release
from glm_vllm_overlay.node.errors import Refusal
from glm_vllm_overlay.node.settings import SPECULATORS

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
        "--rehearsal",
        type=Path,
        metavar="SERVE_YAML",
        help="instead, what an engine of these options compiles by itself",
    )
    parser.add_argument("--speculator", choices=SPECULATORS, default="none", help="the rehearsal's")
    parser.add_argument("--drafter", type=Path, help="folder of the rehearsal's drafter")
    parser.add_argument("--planned", action="store_true", help="say only whether modules or rehearsal are to be made")
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
    if args.rehearsal:
        return run_rehearsal(args, jobs)
    return run_modules(args, jobs) if args.modules else run_kernels(args, jobs)


def say(args: argparse.Namespace, message: str, **facts: object) -> int:
    """The outcome, for a program or for people."""
    print(json.dumps({"schema": 1, "ok": True, "message": message, **facts}) if args.json else message)
    return 0


def run_modules(args: argparse.Namespace, jobs: int) -> int:
    """`--modules`: nothing is done when the list is whole and of this toolkit."""
    chain = kernels.Toolchain(args.cuda_home, Path(), Path())
    chain.nvcc_version()
    problem = release.modules_problem(modules.workspace() / release.MODULES, chain.nvcc)
    if args.planned or not problem:
        return say(args, f"{modules.workspace()}: {problem or 'whole'}", changed=bool(problem))
    files = modules.compile_modules(jobs, chain.nvcc)
    return say(args, f"{modules.workspace()}: {', '.join(files)}", changed=True, files=files)


def run_rehearsal(args: argparse.Namespace, jobs: int) -> int:
    """`--rehearsal`: nothing is done when the list is whole, of this toolkit and of this shape of engine."""
    chain = kernels.Toolchain(args.cuda_home, Path(), Path())
    chain.nvcc_version()
    folder = rehearsal.cache_folder()
    problem = release.rehearsal_problem(folder, chain.nvcc)
    if args.planned or not problem:
        return say(args, f"{folder} {problem or 'is whole'}", changed=bool(problem))
    document = rehearsal.rehearse(args.rehearsal, args.speculator, args.drafter, chain.nvcc, jobs)
    message = f"{folder}: {len(document['files'])} files after {document['prompts']} prompts"
    return say(args, f"{message}; FlashInfer {document['flashinfer']}", changed=True, files=document["files"])


def run_kernels(args: argparse.Namespace, jobs: int) -> int:
    """Neither `--modules` nor `--rehearsal`."""
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
