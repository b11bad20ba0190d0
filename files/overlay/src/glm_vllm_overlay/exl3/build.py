"""Compiles the EXL3 kernels: the part of exllamav3's sources that the experts need, with our bindings, for one GPU.

The sources come from the hash-pinned exllamav3 wheel of the environment and are neither copied nor imported: importing
that package would build all of its 194 units and change the process's CUDA allocator. No GPU is needed to compile; with
a torch that has no CUDA libraries (CI) the objects are made and checked, and nothing is linked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from glm_vllm_overlay.exl3.library import LIBRARY
from glm_vllm_overlay.node.errors import Refusal

EXLLAMAV3 = "1.6.5"
LICENCE = "LICENSE.exllamav3"
NVCC_FROM, NVCC_BELOW = (13, 0), (14, 0)
ARCH = "121a"
UNITS = (
    "quant/exl3_moe.cu",
    "quant/exl3_moe_coop.cu",
    "quant/exl3_devctx.cu",
    "quant/reconstruct.cu",
    "quant/comp_units/exl3_moe_inst_k4_cb1.cu",
    "quant/comp_units/exl3_moe_coop_inst_k4.cu",
)
OURS = ("grouped.cu", "bindings.cpp", "absent.cpp")
# Every kernel that the operators launch, by a part of its mangled name.
KERNELS = (
    "exl3_moe_coop_rot_kernel",
    "exl3_moe_coop_a_kernelILi4ELi1ELb1",
    "exl3_moe_coop_a_kernelILi4ELi1ELb0",
    "exl3_moe_coop_b_kernelILi4ELi1ELb1",
    "exl3_moe_coop_b_kernelILi4ELi1ELb0",
    "exl3_moe_kernelILi4ELi128ELi1",
    "exl3_moe_kernelILi4ELi256ELi1",
    "reconstruct_kernelILi4ELi1E",
    "grouped_rotate_kernel",
    "grouped_gemm_kernel",
    "grouped_activate_kernel",
    "grouped_reduce_kernel",
)
CUDA_FLAGS = (
    "-std=c++20", "-O3", "--use_fast_math", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC",
    "-Xcudafe", "--diag_suppress=177", "-Xcudafe", "--diag_suppress=20012",
)  # fmt: skip
HOST_FLAGS = ("-std=c++20", "-O2", "-fPIC")


@dataclass(frozen=True)
class Toolchain:
    """Where the compiler, the sources and the headers are. `headers`: folders searched for CUDA library headers."""

    cuda_home: Path
    sources: Path
    csrc: Path
    headers: tuple[Path, ...] = ()
    arch: str = ARCH
    cuobjdump: Path | None = None
    licence: str = field(default="", compare=False)

    @property
    def nvcc(self) -> Path:
        return self.cuda_home / "bin" / "nvcc"

    def nvcc_version(self) -> tuple[int, int]:
        """(major, minor); Refusal when there is no nvcc or it is outside the window that the kernels are known for."""
        if not self.nvcc.is_file():
            raise Refusal(f"no nvcc at {self.nvcc}: install CUDA 13.0 or set cuda_sm121_cuda_home to where it is")
        text = subprocess.run([self.nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        match = re.search(r"release (\d+)\.(\d+)", text)
        version = (int(match[1]), int(match[2])) if match else (0, 0)
        if not NVCC_FROM <= version < NVCC_BELOW:
            raise Refusal(
                f"{self.nvcc} is CUDA {version[0]}.{version[1]}; the kernels need 13.0 or newer and older than 14:"
                " set cuda_sm121_cuda_home to such a toolkit"
            )
        return version


def find_sources() -> tuple[Path, str]:
    """Folder of exllamav3's CUDA sources in this environment and its licence text; Refusal when it is not the pin."""
    try:
        package = metadata.distribution("exllamav3")
    except metadata.PackageNotFoundError:
        raise Refusal(f"exllamav3 is not installed beside the overlay: install exllamav3=={EXLLAMAV3}") from None
    if package.version != EXLLAMAV3:
        raise Refusal(f"exllamav3 {package.version} is installed; the bindings are written for {EXLLAMAV3}")
    licences = [file for file in package.files or () if file.name.startswith("LICENSE")]
    if not licences:
        raise Refusal("exllamav3 is installed without its licence, which has to go along: install it from its wheel")
    return Path(str(package.locate_file("exllamav3/exllamav3_ext"))), licences[0].read_text()


def find_csrc() -> Path:
    """Our own C++ sources: beside the checkout's `src`, or where the installed overlay put them."""
    places = (Path(__file__).parents[3] / "csrc", Path(sys.prefix) / "share" / "glm-vllm" / "csrc")
    for place in places:
        if (place / OURS[0]).is_file():
            return place
    raise Refusal(f"the overlay's csrc is neither at {places[0]} nor at {places[1]}: install the overlay again")


def source_digest(*roots: Path) -> str:
    """SHA-256 over every CUDA and C++ file below the roots, names included."""
    digest = hashlib.sha256()
    for root in roots:
        for file in sorted(root.rglob("*")):
            if file.suffix in (".cu", ".cuh", ".cpp", ".h"):
                digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def source_files(chain: Toolchain) -> list[Path]:
    """Every unit that is compiled."""
    return [chain.sources / unit for unit in UNITS] + [chain.csrc / unit for unit in OURS]


def _include_dirs(chain: Toolchain, work: Path) -> list[Path]:
    import torch

    torch_include = Path(torch.__file__).parent / "include"
    # The toolkit's own headers first: the engine's lock brings parts of a newer toolkit, which its nvcc cannot compile.
    dirs = [
        chain.cuda_home / "include",
        chain.sources,
        torch_include,
        torch_include / "torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    ]
    macros = Path("c10/cuda/impl/cuda_cmake_macros.h")
    if not (torch_include / macros).is_file():
        # The CPU build of torch ships c10's CUDA headers but not the one file that its CUDA build generates.
        generated = work / "generated"
        (generated / macros).parent.mkdir(parents=True, exist_ok=True)
        (generated / macros).write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
        dirs.append(generated)
    roots = [Path(path) for path in (*chain.headers, sysconfig.get_paths()["purelib"])]
    dirs += [path for root in roots for path in sorted(root.glob("nvidia/*/include"))]
    return dirs


def _compile(chain: Toolchain, source: Path, target: Path, includes: list[str]) -> None:
    if source.suffix == ".cu":
        code = ["-gencode", f"arch=compute_{chain.arch},code=sm_{chain.arch}"]
        command = [str(chain.nvcc), *CUDA_FLAGS, *code, *includes, "-c", str(source), "-o", str(target)]
    else:
        command = [os.environ.get("CXX", "g++"), *HOST_FLAGS, *includes, "-c", str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        error = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[-300:])
        raise Refusal(f"{source.name} does not compile ({' '.join(error.split())}): check the toolkit and its headers")


def compile_objects(chain: Toolchain, work: Path, sources: list[Path], jobs: int) -> list[Path]:
    """Compile each source into `work`, keeping objects whose inputs are unchanged; Refusal names the first failure.

    exllamav3's units include nothing of ours, so a change of ours leaves their objects valid.
    """
    import torch

    version = chain.nvcc_version()
    includes = [f"-I{path}" for path in _include_dirs(chain, work)]
    theirs, both = source_digest(chain.sources), source_digest(chain.sources, chain.csrc)
    objects = []
    for source in sources:
        digest = theirs if source.is_relative_to(chain.sources) else both
        inputs = repr((version, chain.arch, torch.__version__, CUDA_FLAGS, HOST_FLAGS, digest))
        objects.append(work / hashlib.sha256(inputs.encode()).hexdigest()[:16] / f"{source.name}.o")

    def one(source: Path, target: Path) -> None:
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(f".{os.getpid()}.o")
            _compile(chain, source, part, includes)
            part.rename(target)

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for task in [pool.submit(one, *pair) for pair in zip(sources, objects, strict=True)]:
            task.result()
    return objects


def kernel_architectures(cuobjdump: Path, file: Path) -> dict[str, set[str]]:
    """Mangled kernel name → architectures that `file` holds machine code for."""
    text = subprocess.run([cuobjdump, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    found: dict[str, set[str]] = {}
    arch = ""
    for line in text.splitlines():
        if match := re.match(r"arch = (sm_\w+)", line.strip()):
            arch = match[1]
        elif match := re.match(r"Function ([^:\s]+):", line.strip()):
            found.setdefault(match[1], set()).add(arch)
    return found


def check_architecture(chain: Toolchain, files: list[Path]) -> list[str]:
    """Names of the launched kernels; Refusal unless each has machine code for exactly this architecture."""
    dump = chain.cuobjdump or chain.cuda_home / "bin" / "cuobjdump"
    if not dump.is_file():
        raise Refusal(f"no cuobjdump at {dump}: the machine code cannot be checked without it")
    found: dict[str, set[str]] = {}
    for file in files:
        for name, architectures in kernel_architectures(dump, file).items():
            found.setdefault(name, set()).update(architectures)
    launched = []
    for kernel in KERNELS:
        names = [name for name in found if kernel in name]
        if not names:
            raise Refusal(f"kernel {kernel} is in none of the compiled units: the sources are not those of the pin")
        for name in names:
            if found[name] != {f"sm_{chain.arch}"}:
                raise Refusal(f"kernel {kernel} was compiled for {', '.join(sorted(found[name]))}, not sm_{chain.arch}")
        launched += names
    return sorted(launched)


def link(chain: Toolchain, objects: list[Path], library: Path) -> None:
    """Link against this environment's torch, which must be a CUDA build."""
    import torch

    lib = Path(torch.__file__).parent / "lib"
    cudart = next((p for p in sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/lib/libcudart.so.*"))), None)
    runtime = [str(cudart)] if cudart else [f"-L{chain.cuda_home / 'lib64'}", "-lcudart"]
    library.parent.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(".part")
    # The C driver and libstdc++ by its file name: some compilers would take libstdc++.a, and a second copy of the
    # library inside the process crashes in the first error message that formats a number.
    command = [
        os.environ.get("CC", "gcc"), "-shared", *map(str, objects), f"-L{lib}", "-ltorch", "-ltorch_cpu",
        "-ltorch_cuda", "-lc10", "-lc10_cuda", *runtime, "-l:libstdc++.so.6", "-lm", "-o", str(part),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise Refusal(f"the kernels do not link: {' '.join(result.stderr.split())[-300:]}")
    part.rename(library)


def build(chain: Toolchain, work: Path, target: Path, jobs: int) -> dict[str, object]:
    """Compile, check, and (with a CUDA torch) link into `target`; returns the manifest, kept beside the library.

    `files` of the manifest: name → SHA-256 of what was written to `target`; empty when nothing could be linked.
    """
    import torch

    objects = compile_objects(chain, work, source_files(chain), jobs)
    manifest: dict[str, object] = {
        "schema": 1,
        "arch": f"sm_{chain.arch}",
        "nvcc": ".".join(map(str, chain.nvcc_version())),
        "torch": torch.__version__,
        "exllamav3": EXLLAMAV3,
        "sources_sha256": source_digest(chain.sources, chain.csrc),
        "kernels": check_architecture(chain, [path for path in objects if path.name.endswith(".cu.o")]),
        "files": {},
    }
    if torch.version.cuda is None:
        return manifest
    link(chain, objects, target / LIBRARY)
    (target / LICENCE).write_text(chain.licence)
    names = (LIBRARY, LICENCE)
    manifest["files"] = {name: hashlib.sha256((target / name).read_bytes()).hexdigest() for name in names}
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def default_cuda_home() -> Path:
    """$CUDA_HOME, else the folder of the nvcc on PATH, else the toolkit of DGX OS."""
    if home := os.environ.get("CUDA_HOME"):
        return Path(home)
    standard = Path("/usr/local/cuda-13.0")
    nvcc = shutil.which("nvcc")
    return standard if (standard / "bin/nvcc").is_file() or nvcc is None else Path(nvcc).resolve().parent.parent
