"""`glm-vllm build --modules`, with FlashInfer's specifications in place: what it compiles, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

import pytest
from glm_vllm_overlay import cli, modules

NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release {0}, V{0}.88'\n"


class Spec:
    """As FlashInfer's JitSpecNvcc: `build` leaves a library, with the number of processes that it was allowed."""

    def __init__(self, name: str, error: Exception | None = None, leaves: bool = True) -> None:
        base = Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
        self.jit_library_path = base / f".cache/flashinfer/0/121a/cached_ops/{name}/{name}.so"
        self.error, self.leaves = error, leaves

    def build(self) -> None:
        if self.error:
            raise self.error
        if self.leaves:
            self.jit_library_path.parent.mkdir(parents=True, exist_ok=True)
            self.jit_library_path.write_text(os.environ["MAX_JOBS"])


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The engine's environment with a toolkit, an empty workspace and memory for three compilations."""
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC.format("13.0"))
    nvcc.chmod(0o755)
    (tmp_path / "meminfo").write_text(f"MemAvailable: {40 << 20} kB\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("GLM_MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "base"))
    monkeypatch.setenv("MAX_JOBS", "1")
    (tmp_path / "base").mkdir()
    flashinfer(monkeypatch)
    return tmp_path / "base"


def flashinfer(monkeypatch: pytest.MonkeyPatch, **different: Spec) -> None:
    """Put FlashInfer's modules in place; `different` replaces specifications by name."""
    for name, (package, function) in modules.NEEDED.items():
        module = types.ModuleType(package)
        setattr(module, function, lambda name=name: different.get(name) or Spec(name))
        for part in ("flashinfer", "flashinfer.jit"):
            monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
        monkeypatch.setitem(sys.modules, package, module)


def refused(capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    assert cli.main(["build", "--modules", "--json"]) == code
    return json.loads(capsys.readouterr().out)["message"]


def test_every_needed_module_by_as_many_processes_as_memory_allows(base: Path, capsys) -> None:
    assert cli.main(["build", "--modules", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    listed = json.loads((base / "modules.json").read_text())
    assert listed == {"schema": 1, "toolkit": "13.0.88", "files": files}
    assert set(files) == {"sparse_mla_sm120", "sampling", "topk"}
    assert {(base / file).read_text() for file in files.values()} == {"3"}


def asked(capsys: pytest.CaptureFixture[str], *more: str) -> bool:
    """Whether it did something, or with --planned would."""
    assert cli.main(["build", "--modules", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)["changed"]


def test_what_is_there_is_left_alone(base: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (asked(capsys, "--planned"), (base / "modules.json").exists()) == (True, False)
    assert asked(capsys)
    flashinfer(monkeypatch, topk=Spec("topk", RuntimeError("must not be asked")))
    assert (asked(capsys, "--planned"), asked(capsys)) == (False, False)


@pytest.mark.parametrize("library", [True, False])
def test_after_an_update_of_the_toolkit_or_a_loss_they_are_made_again(base: Path, capsys, library: bool) -> None:
    assert asked(capsys)
    if library:
        (base / json.loads((base / "modules.json").read_text())["files"]["topk"]).unlink()
    else:
        (base.parent / "cuda/bin/nvcc").write_text(NVCC.format("13.1"))
    assert (asked(capsys, "--planned"), asked(capsys), asked(capsys)) == (True, True, False)


def test_one_that_does_not_compile(base: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ninja: entering\nx.cu(3): error: identifier is undefined\nninja: build stopped"
    flashinfer(monkeypatch, topk=Spec("topk", RuntimeError(said)))
    message = refused(capsys)
    assert message.startswith(
        "FlashInfer's module topk does not compile (x.cu(3): error: identifier is undefined): check"
    )
    assert not (base / "modules.json").exists()


def test_one_that_leaves_nothing(base: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer(monkeypatch, sampling=Spec("sampling", leaves=False))
    assert "FlashInfer left no " in refused(capsys)
    assert not (base / "modules.json").exists()


def test_no_flashinfer(base: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.jit.mla", None)
    assert "module sparse_mla_sm120 does not compile" in refused(capsys)


def test_outside_the_engines_environment(base: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE")
    assert "FLASHINFER_WORKSPACE_BASE is not set" in refused(capsys, 2)


def test_another_compiler_than_the_pair_s(base: Path, capsys) -> None:
    (base.parent / "cuda/bin/nvcc").write_text(NVCC.format("14.0"))
    assert "is CUDA 14.0; the kernels need 13.0 or newer" in refused(capsys)
