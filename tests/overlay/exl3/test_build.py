"""Compiling the kernels without a GPU: the version window, the hash, and the architecture of every launched kernel."""

import argparse
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest
from glm_vllm_overlay import build as command
from glm_vllm_overlay.exl3 import build
from glm_vllm_overlay.exl3.library import LIBRARY
from glm_vllm_overlay.node.errors import Refusal, Unusable

GIB = 1 << 30


def toolchain(tmp_path: Path, version: str = "13.0") -> build.Toolchain:
    """A toolkit whose nvcc only states its version."""
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
    nvcc.chmod(0o755)
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.cu").write_text("// a")
    return build.Toolchain(tmp_path / "cuda", sources, build.find_csrc())


@pytest.mark.parametrize("version", ["13.0", "13.5"])
def test_versions_in_the_window(tmp_path: Path, version: str) -> None:
    assert toolchain(tmp_path, version).nvcc_version() == tuple(map(int, version.split(".")))


@pytest.mark.parametrize("version", ["12.9", "14.0"])
def test_versions_outside_it(tmp_path: Path, version: str) -> None:
    with pytest.raises(Refusal, match=f"is CUDA {version}; the kernels need 13.0 or newer and older than 14"):
        toolchain(tmp_path, version).nvcc_version()


def test_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no nvcc at .*install CUDA 13.0"):
        build.Toolchain(tmp_path, tmp_path, tmp_path).nvcc_version()


def test_digest_follows_every_source(tmp_path: Path) -> None:
    chain = toolchain(tmp_path)
    before = build.source_digest(chain)
    (chain.sources / "a.cu").write_text("// b")
    changed = build.source_digest(chain)
    (chain.sources / "a.cu").rename(chain.sources / "b.cu")
    assert len({before, changed, build.source_digest(chain)}) == 3


def fake_cuobjdump(tmp_path: Path, listing: str) -> Path:
    tool = tmp_path / "cuobjdump"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listing}\nEND\n")
    tool.chmod(0o755)
    return tool


def listing(arch: str, kernels: tuple[str, ...] = build.KERNELS) -> str:
    return f"arch = {arch}\n" + "\n".join(f" Function _Z{name}x:\n  REG:1" for name in kernels)


def test_every_launched_kernel_must_have_code_for_the_gpu(tmp_path: Path) -> None:
    chain = toolchain(tmp_path)

    def check(text: str) -> list[str]:
        tool = fake_cuobjdump(tmp_path, text)
        return build.check_architecture(build.Toolchain(**{**vars(chain), "cuobjdump": tool}), [tmp_path / "a.o"])

    assert len(check(listing("sm_121a"))) == len(build.KERNELS)
    with pytest.raises(Refusal, match="was compiled for sm_120, not sm_121a"):
        check(listing("sm_120"))
    with pytest.raises(Refusal, match="was compiled for sm_120, sm_121a, not sm_121a"):
        check(listing("sm_121a") + "\n" + listing("sm_120"))
    for kernel in build.KERNELS:
        with pytest.raises(Refusal, match=f"kernel {kernel} is in none of the compiled units"):
            check(listing("sm_121a", tuple(name for name in build.KERNELS if name != kernel)))


def test_manifest_must_name_the_library(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="manifest.json is missing"):
        build.verify(tmp_path)
    (tmp_path / LIBRARY).write_bytes(b"kernels")
    (tmp_path / "manifest.json").write_text(
        json.dumps({"sha256": "47bb6a2fda3aee5ec8c4af4a5ef5eb7bfed9e8dc1dfcc5b6b1fa2bbd4dc6ca05"})
    )
    with pytest.raises(Refusal, match="is not the file that its manifest names"):
        build.verify(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(Unusable, match="is damaged"):
        build.verify(tmp_path)


@pytest.mark.parametrize(
    ("available", "jobs"), [(0, 1), (16 * GIB, 1), (31 * GIB, 1), (32 * GIB, 2), (110 * GIB, 8), (40 * GIB, 3)]
)
def test_jobs_leave_room(available: int, jobs: int) -> None:
    assert command.job_limit(available) == jobs


def test_memory_comes_from_meminfo(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       127535084 kB\nMemAvailable:   119500000 kB\n")
    assert command.memory_available(meminfo) == 119500000 * 1024


def real_toolchain(arch: str) -> build.Toolchain | None:
    """The machine's nvcc 13 with sources and headers of the build lock ($GLM_BUILD_SITE); None where they are not."""
    site = Path(os.environ.get("GLM_BUILD_SITE", "/nonexistent"))
    home = build.default_cuda_home()
    sources = site / "exllamav3/exllamav3_ext"
    dump = next(iter(site.glob("nvidia/*/bin/cuobjdump")), home / "bin/cuobjdump")
    if not (home / "bin/nvcc").is_file() or not sources.is_dir() or not dump.is_file():
        return None
    return build.Toolchain(home, sources, build.find_csrc(), (site,), arch, dump)


@pytest.mark.skipif(real_toolchain("121a") is None, reason="needs nvcc 13 and $GLM_BUILD_SITE")
def test_cross_compiles_for_the_pair(tmp_path: Path) -> None:
    """About two minutes the first time; objects are kept in $GLM_BUILD_CACHE."""
    chain = real_toolchain("121a")
    assert chain is not None
    cache = Path(os.environ.get("GLM_BUILD_CACHE", tmp_path / "work"))
    manifest = build.build(chain, cache, tmp_path / "target", jobs=2)
    assert manifest["arch"] == "sm_121a" and len(manifest["kernels"]) == len(build.KERNELS)


@pytest.mark.skipif(real_toolchain("120") is None, reason="needs nvcc 13 and $GLM_BUILD_SITE")
def test_code_for_another_blackwell_is_refused(tmp_path: Path) -> None:
    """One unit really compiled with the flag of sm_120 and read by the real cuobjdump."""
    wrong = real_toolchain("120")
    assert wrong is not None
    unit = tmp_path / "exl3_moe_inst_k4_cb1.cu.o"
    includes = [f"-I{path}" for path in build._include_dirs(wrong, tmp_path)]
    build._compile(wrong, wrong.sources / "quant/comp_units/exl3_moe_inst_k4_cb1.cu", unit, includes)
    assert set.union(*build.kernel_architectures(wrong.cuobjdump, unit).values()) == {"sm_120"}


def test_command_line_defaults() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args([])
    assert args.arch == "121a" and args.target.name == "glm-vllm"


def test_sources_must_be_the_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("exllamav3") is None:
        with pytest.raises(Refusal, match="install exllamav3==1.6.5"):
            build.find_sources()

    class Other:
        version = "1.6.4"

    monkeypatch.setattr(build.metadata, "distribution", lambda name: Other())
    with pytest.raises(Refusal, match="exllamav3 1.6.4 is installed; the bindings are written for 1.6.5"):
        build.find_sources()


def test_without_nvcc_on_path_the_toolkit_of_the_os_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert build.default_cuda_home() == Path("/opt/cuda")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert build.default_cuda_home() == Path("/usr/local/cuda-13.0")
