"""Compiling the kernels without a GPU: the version window, the hash, and the architecture of every launched kernel."""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from glm_vllm_overlay import build as command
from glm_vllm_overlay.exl3 import build
from glm_vllm_overlay.exl3.library import LIBRARY
from glm_vllm_overlay.node.errors import Refusal

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
    before = build.source_digest(chain.sources, chain.csrc)
    (chain.sources / "a.cu").write_text("// b")
    changed = build.source_digest(chain.sources, chain.csrc)
    (chain.sources / "a.cu").rename(chain.sources / "b.cu")
    assert len({before, changed, build.source_digest(chain.sources, chain.csrc)}) == 3


def test_headers_of_the_toolkit_come_before_those_of_wheels(tmp_path: Path) -> None:
    """The engine's lock has crt headers of 13.5 beside a runtime of 13.0: nvcc 13.0 fails on that mixture."""
    wheels = tmp_path / "site/nvidia/cu13/include"
    wheels.mkdir(parents=True)
    chain = build.Toolchain(**{**vars(toolchain(tmp_path)), "headers": (tmp_path / "site",)})
    dirs = build._include_dirs(chain, tmp_path)
    assert dirs.index(chain.cuda_home / "include") < dirs.index(wheels)


def test_objects_are_kept_until_their_inputs_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = toolchain(tmp_path)
    ours = tmp_path / "csrc"
    ours.mkdir()
    (ours / "own.cu").write_text("// own")
    chain = build.Toolchain(**{**vars(chain), "csrc": ours})
    compiled: list[str] = []

    def compile(chain: build.Toolchain, source: Path, target: Path, includes: list[str]) -> None:
        compiled.append(source.name)
        target.write_text("object")

    monkeypatch.setattr(build, "_compile", compile)

    def recompiled(chain: build.Toolchain = chain) -> set[str]:
        compiled.clear()
        sources = [chain.sources / "a.cu", chain.csrc / "own.cu"]
        objects = build.compile_objects(chain, tmp_path / "work", sources, jobs=1)
        assert [path.name for path in objects] == ["a.cu.o", "own.cu.o"] and all(path.is_file() for path in objects)
        return set(compiled)

    assert recompiled() == {"a.cu", "own.cu"}
    assert recompiled() == set()
    (ours / "own.cu").write_text("// changed")
    assert recompiled() == {"own.cu"}
    (chain.sources / "header.cuh").write_text("// changed")
    assert recompiled() == {"a.cu", "own.cu"}
    assert recompiled(build.Toolchain(**{**vars(chain), "arch": "120"})) == {"a.cu", "own.cu"}


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


@pytest.mark.parametrize(
    ("available", "jobs"), [(0, 1), (16 * GIB, 1), (31 * GIB, 1), (32 * GIB, 2), (110 * GIB, 8), (40 * GIB, 3)]
)
def test_jobs_leave_room(available: int, jobs: int) -> None:
    assert command.job_limit(available) == jobs


def test_memory_comes_from_meminfo(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       127535084 kB\nMemAvailable:   119500000 kB\n")
    assert command.memory_available(meminfo) == 119500000 * 1024


KERNELS = Path(os.environ.get("TWIN_CACHE", "/var/tmp/glm-twin")) / "kernels"


@pytest.fixture(scope="module")
def chain() -> build.Toolchain:
    """nvcc 13 of this machine, else of `twin/setup.sh kernels`, which brought sources, headers and cuobjdump too."""
    cu13 = KERNELS / "site/nvidia/cu13"
    home = cu13 if (cu13 / "bin/nvcc").is_file() else build.default_cuda_home()
    if not (home / "bin/nvcc").is_file() or not (cu13 / "bin/cuobjdump").is_file():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no compiler for the kernels: run make setup")
    sources = KERNELS / "site/exllamav3/exllamav3_ext"
    return build.Toolchain(home, sources, build.find_csrc(), (KERNELS / "site",), cuobjdump=cu13 / "bin/cuobjdump")


@pytest.fixture(scope="module")
def objects(chain: build.Toolchain) -> list[Path]:
    """Every unit, compiled for the pair: about 110 processor seconds the first time, then kept."""
    return build.compile_objects(chain, KERNELS / "objects", build.source_files(chain), jobs=os.cpu_count() or 1)


@pytest.mark.timeout(900)
def test_every_launched_kernel_is_compiled_for_the_pair(chain: build.Toolchain, objects: list[Path]) -> None:
    """By the pair's compiler from the pinned sources; fails when ARCH is another GPU's."""
    architectures: dict[str, set[str]] = {}
    for file in objects:
        if file.name.endswith(".cu.o"):
            architectures |= build.kernel_architectures(chain.cuobjdump, file)
    for kernel in build.KERNELS:
        found = [value for name, value in architectures.items() if kernel in name]
        assert found and all(value == {"sm_121a"} for value in found), kernel


@pytest.mark.timeout(900)
def test_code_for_another_blackwell_is_refused(chain: build.Toolchain, objects: list[Path]) -> None:
    """One unit really compiled with the flag of sm_120, among the others of sm_121a."""
    unit = "exl3_moe_inst_k4_cb1.cu"
    (source,) = (file for file in build.source_files(chain) if file.name == unit)
    (wrong,) = build.compile_objects(
        build.Toolchain(**{**vars(chain), "arch": "120"}), KERNELS / "objects", [source], jobs=1
    )
    files = [file for file in objects if file.name.endswith(".cu.o")]
    assert len(build.check_architecture(chain, files)) == len(build.KERNELS)
    with pytest.raises(Refusal, match="kernel exl3_moe_kernelILi4E.* was compiled for sm_120, not sm_121a"):
        build.check_architecture(chain, [wrong if file.name == wrong.name else file for file in files])


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> build.Toolchain:
    """A toolchain whose compiling and linking is over."""
    monkeypatch.setattr(build, "compile_objects", lambda *arguments: [tmp_path / "a.cu.o"])
    monkeypatch.setattr(build, "check_architecture", lambda chain, files: ["kernel"])
    monkeypatch.setattr(build, "link", lambda chain, objects, library: library.write_bytes(b"library"))
    return build.Toolchain(**{**vars(toolchain(tmp_path)), "licence": "MIT License"})


def test_manifest_names_what_was_written(
    built: build.Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    manifest = build.build(built, tmp_path, tmp_path, jobs=1)
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest
    assert (tmp_path / "LICENSE.exllamav3").read_text() == "MIT License"
    assert manifest["files"] == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in (LIBRARY, "LICENSE.exllamav3")
    }
    assert (manifest["arch"], manifest["nvcc"], manifest["exllamav3"]) == ("sm_121a", "13.0", "1.6.5")


def test_nothing_to_link_with_is_refused(
    built: build.Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release for a GPU never goes without kernels because its torch is a CPU build."""
    monkeypatch.setattr(command.kernels, "find_sources", lambda: (built.sources, "MIT License"))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = ["--cuda-home", str(built.cuda_home), "--target", str(tmp_path), "--work", str(tmp_path)]
    with pytest.raises(Refusal, match="this environment's torch has no CUDA to link them with: install the release"):
        command.run(parser.parse_args(arguments))
    assert not (tmp_path / "manifest.json").exists()


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
