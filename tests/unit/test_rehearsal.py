"""`glm-vllm build --rehearsal` but for the engine: the model that stands in, its options, and what is left of it."""

from __future__ import annotations

import json
import os
import struct
import tarfile
from pathlib import Path

import pytest
from glm_vllm_overlay import cli, rehearsal
from glm_vllm_overlay.node import release
from glm_vllm_overlay.node.errors import Refusal, Unusable

NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V{}'\n"
KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
TEXT = {
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "linear_num_heads": 64,
    "index_n_heads": 32,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "vocab_size": 154880,
    "first_k_dense_replace": 3,
    "layer_types": [KINDS[number % 4] for number in range(45)],
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
    "indexer_types": ["full"] * 45,
}
DRAFTER = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "head_dim": 128,
    "dflash_config": {"block_size": 8, "target_layer_ids": [1, 12, 23, 34, 43]},
}
SERVED = {
    "model": "/m",
    "additional-config": '{"exl3_backend":"fused","ablation":{"file":"/f"}}',
    "distributed-executor-backend": "mp",
    "kv-cache-dtype": "fp8",
    "kv-cache-memory-bytes": 16972032000,
    "load-format": "auto",
    "master-addr": "192.0.2.11",
    "master-port": 29521,
    "max-num-batched-tokens": 4640,
    "model-loader-extra-config": '{"enable_weights_track":true}',
    "nnodes": 2,
    "tensor-parallel-size": 2,
}


def test_a_rank_s_share_of_what_is_divided_and_all_of_the_rest() -> None:
    """Layers share the cache by how many there are of each kind: none may go. Experts: in five, and in the last."""
    found = rehearsal.target_config({"model_type": "glm5_next", "text_config": TEXT}, 2)
    text = found["text_config"]
    assert found["model_type"] == "glm5_next"
    assert {name for name in TEXT if text[name] != TEXT[name]} == {*rehearsal.TARGET_WIDTHS, "mlp_layer_types"}
    assert [text[name] for name in rehearsal.TARGET_WIDTHS] == [32, 32, 32, 6144, 1024]
    # Three dense ones with linear attention, a sparse one with full, a sparse one with linear.
    assert text["mlp_layer_types"] == ["dense"] * 3 + ["sparse"] * 2 + ["dense"] * 39 + ["sparse"]
    assert TEXT["mlp_layer_types"] == ["dense"] * 3 + ["sparse"] * 42


def test_a_kind_that_comes_late_has_its_experts() -> None:
    text = TEXT | {"layer_types": ["a", "b", "a", "a", "b", "a"], "mlp_layer_types": ["x", "x", "x", "y", "x", "x"]}
    types = rehearsal.target_config({"text_config": text}, 1)["text_config"]["mlp_layer_types"]
    assert types == ["x", "x", "x", "y", "dense", "x"]


def test_a_width_that_does_not_divide() -> None:
    with pytest.raises(Refusal, match="says moe_intermediate_size 2048, which cannot be split over 3 ranks"):
        rehearsal.divide(TEXT, ["moe_intermediate_size"], 3)


def test_the_options_that_serve_but_what_is_the_pair_s() -> None:
    found = rehearsal.options(SERVED, Path("/w"))
    assert found == {
        "model": "/w",
        "additional-config": '{"exl3_backend": "fused"}',
        "gpu-memory-utilization": rehearsal.UTILISATION,
        "kv-cache-dtype": "fp8",
        "kv-cache-memory-bytes": 16972032000,
        "load-format": "dummy",
        "max-num-batched-tokens": 4640,
        "tensor-parallel-size": 1,
    }


def test_the_ladder() -> None:
    """Every 64 tokens of a step, one step and more, beyond the indexer's 2048 and its 8192 pools; never too long."""
    steps = rehearsal.ladder(4640, 1_000_000)
    assert set(range(64, 4641, 64)) | {1, 2, 3, 4, 33, 4640, 4705, 40000, 131072} <= set(steps)
    assert max(rehearsal.ladder(16384, 1_000_000)) == 131072
    assert len(rehearsal.ladder(16384, 1_000_000)) < 110
    assert max(rehearsal.ladder(2048, 1024)) <= 1022
    assert rehearsal.ladder(2048, 40)[-1] == 38


def test_prompts_are_ordinary_text_and_differ_from_the_first_token_on() -> None:
    texts = [rehearsal.prompt(50, number, 154880) for number in range(5)]
    assert all(20 <= token < 900 for text in texts for token in text)
    assert len({text[0] for text in texts}) == 5
    assert max(rehearsal.prompt(500, 3, 256)) < 256


def header(folder: Path, config: dict, experts: int = 0) -> Path:
    """A checkpoint folder: config.json, a tokenizer, and headers of 4-bit mcg experts."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    entries, end = {}, 0
    for expert in range(experts):
        for suffix, dtype, shape in (("trellis", "I16", [8, 8, 64]), ("mcg", "I32", [1])):
            size = 8 * 8 * 64 * 2 if suffix == "trellis" else 4
            name = f"model.language_model.layers.1.mlp.experts.{expert}.up_proj.{suffix}"
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
    text = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return folder


def test_what_stands_in_for_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found from a relative path too: links have to lead back. The stamp is what the tensors are, not what it was."""
    header(tmp_path / "m", {"text_config": TEXT, "quantization_config": {"quant_method": "wrong"}}, experts=1)
    header(tmp_path / "d", DRAFTER)
    monkeypatch.chdir(tmp_path)
    model, drafter = rehearsal.write_models(SERVED | {"model": "m"}, Path("d"), tmp_path / "w/deep")
    assert {file.name for file in model.iterdir()} == {"config.json", "tokenizer.json"}
    assert (model / "tokenizer.json").read_text() == "{}"
    config = json.loads((model / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "exl3", "bits": 4, "codebook": "mcg"}
    assert config["text_config"]["num_attention_heads"] == 32
    assert json.loads((drafter / "config.json").read_text()) == DRAFTER | {
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
    }
    assert rehearsal.write_models(SERVED | {"model": "m"}, None, tmp_path / "other")[1] is None


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The engine's environment with a toolkit, a serve.yaml and no caches; their folder."""
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC.format("13.0.88"))
    nvcc.chmod(0o755)
    folder = tmp_path / "r1-0123abcd"
    for name in release.SHAPED:
        monkeypatch.setenv(name, str(folder / name.lower()))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv(release.FLASHINFER, str(tmp_path / "modules"))
    monkeypatch.setenv("CUDA_CACHE_PATH", str(folder / "cuda"))
    for name in ("MAX_JOBS", "ABLIT", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "")  # what the command changes in its own process goes back
    return folder


def put(file: Path, text: str = "code") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def compiled(engine: Path) -> None:
    """What a rehearsal leaves: machine code of two compilers, what belongs to it, the driver's own."""
    put(engine / "triton_cache_dir/a/k.cubin")
    put(engine / "triton_cache_dir/a/k.json", "{}")
    put(engine / "tilelang_cache_dir/b/executable.so", "library")
    put(engine / "cuda/1/2")


def test_the_list_and_the_archive(engine: Path) -> None:
    compiled(engine)
    nvcc = engine.parent / "cuda/bin/nvcc"
    document = rehearsal.write_list(engine, engine.name, nvcc, "12.1")
    assert document == json.loads((engine / "rehearsal.json").read_text())
    assert document == {
        "schema": 1,
        "key": "r1-0123abcd",
        "toolkit": "13.0.88",
        "nvcc": str(nvcc),
        "arch": "12.1",
        "files": {"tilelang_cache_dir/b/executable.so": 7, "triton_cache_dir/a/k.cubin": 4},
    }
    assert release.rehearsal_problem(engine, nvcc) == ""
    with tarfile.open(engine / "rehearsal.tar") as archive:
        names = archive.getnames()
        archive.extractall(engine.parent / "other/r1-0123abcd", filter="data")
    assert "triton_cache_dir/a/k.json" in names and not [name for name in names if name.startswith("cuda")]
    assert names[-1] == "rehearsal.json" and names.count("rehearsal.json") == 1
    assert release.rehearsal_problem(engine.parent / "other/r1-0123abcd", nvcc) == ""
    assert sorted(file.name for file in engine.iterdir() if file.is_file()) == ["rehearsal.json", "rehearsal.tar"]


def test_a_second_archive_has_nothing_of_the_first(engine: Path) -> None:
    compiled(engine)
    for _ in range(2):
        rehearsal.write_list(engine, engine.name, engine.parent / "cuda/bin/nvcc", "12.1")
    with tarfile.open(engine / "rehearsal.tar") as archive:
        names = archive.getnames()
    assert "rehearsal.tar" not in names and names.count("rehearsal.json") == 1


def test_a_rehearsal_that_left_nothing_is_none(engine: Path) -> None:
    put(engine / "triton_cache_dir/a/k.json", "{}")
    with pytest.raises(Refusal, match="left nothing in .*its libraries keep their caches elsewhere"):
        rehearsal.write_list(engine, engine.name, engine.parent / "cuda/bin/nvcc", "12.1")
    assert not (engine / "rehearsal.json").exists()


def test_caches_that_are_not_in_one_place(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rehearsal.cache_folder() == engine
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere/triton")
    with pytest.raises(Unusable, match="the caches lie in several folders .*/elsewhere"):
        rehearsal.cache_folder()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    with pytest.raises(Unusable, match="TRITON_CACHE_DIR is not set: run this with the environment of the engine"):
        rehearsal.cache_folder()


def asked(capsys: pytest.CaptureFixture[str], *more: str) -> dict:
    code = cli.main(["build", "--json", "--rehearsal=/serve.yaml", *more])
    return json.loads(capsys.readouterr().out) | {"code": code}


@pytest.fixture
def played(engine: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """In the engine's place: compiles what one compiles; the arguments of each call."""
    calls = []

    def rehearse(*arguments: object) -> dict:
        calls.append(arguments)
        compiled(engine)
        listed = rehearsal.write_list(engine, engine.name, arguments[3], "12.1")
        return listed | {"prompts": 1, "flashinfer": "compiled nothing at this start"}

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    return calls


def test_it_is_done_once(engine: Path, played: list[tuple], capsys) -> None:
    assert (asked(capsys, "--planned")["changed"], played) == (True, [])
    done = asked(capsys, "--speculator=dflash2", "--drafter=/d", "--jobs=3")
    assert done["changed"] and set(done["files"]) == {
        "tilelang_cache_dir/b/executable.so",
        "triton_cache_dir/a/k.cubin",
    }
    nvcc = engine.parent / "cuda/bin/nvcc"
    assert played == [(Path("/serve.yaml"), "dflash2", Path("/d"), nvcc, 3)]
    assert [asked(capsys, *more)["changed"] for more in (["--planned"], [])] == [False, False]
    assert len(played) == 1


def test_again_after_an_update_of_the_toolkit_or_a_loss(engine: Path, played: list[tuple], capsys) -> None:
    asked(capsys)
    (engine.parent / "cuda/bin/nvcc").write_text(NVCC.format("13.0.99"))
    assert [asked(capsys, *more)["changed"] for more in (["--planned"], [], [])] == [True, True, False]
    (engine / "triton_cache_dir/a/k.cubin").unlink()
    assert [asked(capsys, *more)["changed"] for more in (["--planned"], [], [])] == [True, True, False]
    assert len(played) == 3


def test_a_toolkit_that_is_not_the_pair_s(engine: Path, played: list[tuple], capsys) -> None:
    (engine.parent / "cuda/bin/nvcc").write_text("#!/bin/sh\necho 'release 14.0, V14.0.1'\n")
    answer = asked(capsys, "--planned")
    assert answer["code"] == 1 and "is CUDA 14.0; the kernels need 13.0 or newer" in answer["message"]


def test_it_begins_from_nothing(engine: Path, tmp_path: Path) -> None:
    """An entry of Triton's that lost a file would end the engine; FlashInfer's and the driver's are not the shape's."""
    compiled(engine)
    put(Path(os.environ[release.FLASHINFER]) / "kept.so")
    put(tmp_path / "serve.yaml", "model: /nonexistent\n")
    with pytest.raises(Unusable, match="/nonexistent"):
        rehearsal.rehearse(tmp_path / "serve.yaml", "none", None, engine.parent / "cuda/bin/nvcc", 1)
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == ["2", "kept.so", "nvcc", "serve.yaml"]
