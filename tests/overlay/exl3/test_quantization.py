"""The quantisation config and the wiring to vLLM's loader, without an engine."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
# Torch's CPU build lacks the operators that torchvision registers shapes for; vLLM imports it before any plugin.
pytest.importorskip("glm_vllm_twin.torchvision_ops").declare()

from glm_vllm_overlay.exl3 import quantization  # noqa: E402
from glm_vllm_overlay.exl3.checkpoint import unpack_experts  # noqa: E402
from glm_vllm_overlay.exl3.loader import CheckpointError  # noqa: E402
from glm_vllm_overlay.exl3.quantization import Exl3Config, Exl3MoEMethod  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from vllm.model_executor.layers.fused_moe import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402


def test_the_ledger_does_not_travel_to_the_workers() -> None:
    stamp = {"quant_method": "exl3", "bits": 4.0, "codebook": "mcg", "tensor_storage": {"x": "y" * 10000}}
    config = Exl3Config.from_config(stamp)
    assert (config.bits, config.codebook) == (4, "mcg") and type(config.bits) is int
    assert "tensor_storage" not in stamp and len(pickle.dumps(config)) < 1000


def test_fractional_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bits is 3.05: one whole bit width is served"):
        Exl3Config.from_config({"quant_method": "exl3", "bits": 3.05})


def test_a_foreign_stamp_promises_nothing() -> None:
    config = Exl3Config.from_config({"quant_method": "modelopt", "bits": 8})
    assert (config.bits, config.codebook) == (None, None)
    assert Exl3Config.override_quantization_method({"quant_method": "modelopt"}, None, SimpleNamespace()) is None


def test_linear_layers_stay_native_and_others_are_left_alone() -> None:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    config = Exl3Config(4, "mcg")
    assert isinstance(config.get_quant_method(LinearBase.__new__(LinearBase), "x"), UnquantizedLinearMethod)
    assert config.get_quant_method(torch.nn.Module(), "lm_head") is None


@pytest.mark.parametrize(("bits", "codebook"), [(None, None), (4, None), (None, "mcg")])
def test_experts_without_bits_or_codebook_are_refused(bits: int | None, codebook: str | None) -> None:
    layer = RoutedExperts.__new__(RoutedExperts)
    with pytest.raises(CheckpointError, match="names no bits or no codebook"):
        Exl3Config(bits, codebook).get_quant_method(layer, "experts")


def test_experts_get_our_method_from_ampere_on() -> None:
    layer = RoutedExperts.__new__(RoutedExperts)
    layer.__dict__["moe_config"] = SimpleNamespace()
    found = Exl3Config(4, "mcg").get_quant_method(layer, "experts")
    assert isinstance(found, Exl3MoEMethod) and (found.bits, found.codebook) == (4, "mcg")
    assert Exl3Config.get_min_capability() == 80


UP = "model.language_model.layers.2.mlp.experts.3.up_proj"


@pytest.fixture
def changed(checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """changed(function): a copy of the twin's checkpoint whose tensors and configuration went through the function."""

    def make(change: Callable[[dict, dict], None]) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(checkpoint("random"), folder)
        state, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        change(state, config)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def read(folder: Path) -> Exl3Config:
    """The configuration as vLLM makes it: from config.json, then compared with the files."""
    config = Exl3Config.from_config(json.loads((folder / "config.json").read_text())["quantization_config"])
    config.maybe_update_config(str(folder))
    return config


def _missing(state: dict, config: dict) -> None:
    del state[f"{UP}.suh"]


def _bits(state: dict, config: dict) -> None:
    config["quantization_config"]["bits"] = 3


def _codebook(state: dict, config: dict) -> None:
    config["quantization_config"]["codebook"] = "mul1"


def _three_bits(state: dict, config: dict) -> None:
    state[f"{UP}.trellis"] = state[f"{UP}.trellis"][..., :48].contiguous()


def _swapped(state: dict, config: dict) -> None:
    down = UP.replace("up_proj", "down_proj")
    state[f"{UP}.trellis"], state[f"{down}.trellis"] = state[f"{down}.trellis"], state[f"{UP}.trellis"]


def _rank_of_two(state: dict, config: dict) -> None:
    state[f"{UP}.trellis"] = state[f"{UP}.trellis"][:, :16].contiguous()


def _native(state: dict, config: dict) -> None:
    plain = unpack_experts(dict(state))
    state.clear()
    state.update(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_missing, "layer 2 has 23 of 24 suh tensors"),
        (_bits, "config.json promises bits 3, the tensors have 4: correct config.json"),
        (_codebook, "config.json promises codebook mul1, the tensors have mcg: correct config.json"),
        (_three_bits, "experts of 3, 4 bits are mixed; one width is served"),
        (_swapped, r"layer 2: a down_proj trellis is \[16, 32, 64\], not of 512 x 256"),
        (_rank_of_two, r"layer 2: a up_proj trellis is \[16, 16, 64\], not of 256 x 512"),
        (_native, "its experts are not packed EXL3: serve it without --quantization exl3"),
    ],
)
def test_a_wrong_checkpoint_is_refused_before_loading(changed, change: Callable, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"changed cannot be served: .*{message}"):
        read(changed(change))


@pytest.mark.parametrize("stamp", [{"quant_method": "exl3"}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}])
def test_bits_and_codebook_come_from_the_tensors(changed, stamp: dict) -> None:
    folder = changed(lambda state, config: config.update(quantization_config=stamp))
    config = read(folder)
    assert (config.bits, config.codebook) == (4, "mcg")
    claimed = Exl3Config.override_quantization_method(stamp, None, SimpleNamespace(name_or_path=str(folder)))
    assert claimed == (None if stamp["quant_method"] == "exl3" else "exl3")


def test_a_folder_without_tensors_is_left_to_whoever_reads_them(tmp_path: Path) -> None:
    """A rehearsal's; vLLM's own loader refuses it when there should be some."""
    (tmp_path / "config.json").write_text("{}")
    config = Exl3Config(4, "mcg")
    config.maybe_update_config(str(tmp_path))
    assert (config.bits, config.codebook) == (4, "mcg")


def test_a_native_checkpoint_of_another_method_is_not_claimed(changed) -> None:
    hf_config = SimpleNamespace(name_or_path=str(changed(_native)))
    assert Exl3Config.override_quantization_method({"quant_method": "fp8"}, None, hf_config) is None


class FakeLayer(torch.nn.Module):
    layer_name = "model.layers.3.mlp.experts"
    apply_router_weight_on_input = False
    activation = MoEActivation.SILU


def method(monkeypatch: pytest.MonkeyPatch, rank: int = 0, size: int = 1) -> Exl3MoEMethod:
    monkeypatch.setattr(quantization, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(quantization, "get_tensor_model_parallel_world_size", lambda: size)
    return Exl3MoEMethod(SimpleNamespace(), 4, "mcg")


def create(target: Exl3MoEMethod, layer: FakeLayer, **change: Any) -> None:
    sizes = {"num_experts": 2, "hidden_size": 256, "intermediate_size_per_partition": 128, "global_num_experts": 2}
    target.create_weights(layer, params_dtype=torch.bfloat16, **{**sizes, **change})


def test_parameters_have_the_names_that_vllm_maps_to(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FakeLayer()
    create(method(monkeypatch, 1, 2), layer)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "w13_trellis": (2, 2, 16, 8, 64),
        "w13_suh": (2, 2, 256),
        "w13_svh": (2, 2, 128),
        "w13_mcg": (2, 2),
        "w2_trellis": (2, 8, 16, 64),
        "w2_suh": (2, 128),
        "w2_svh": (2, 256),
        "w2_mcg": (2,),
    }


def test_loader_takes_vllms_call_and_never_says_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FakeLayer()
    create(method(monkeypatch, 1, 2), layer)
    svh = torch.arange(256).half()
    arguments = {"expert_id": 1, "shard_id": "w3", "return_success": True}
    assert layer.w13_svh.weight_loader(layer.w13_svh, svh, "experts.routed_experts.w13_svh", **arguments) is True
    assert torch.equal(layer.w13_svh[1, 1], svh[128:])
    assert layer.w13_svh.weight_loader(layer.w13_svh, svh, "w13_svh", expert_id=0, shard_id="w3") is None
    with pytest.raises(CheckpointError, match="appears twice"):
        layer.w13_svh.weight_loader(layer.w13_svh, svh, "experts.routed_experts.w13_svh", **arguments)


def engine(monkeypatch: pytest.MonkeyPatch, load_format: str = "auto", eager: bool = True, **additional: Any) -> None:
    """vLLM's configuration while it loads."""
    config = SimpleNamespace(
        additional_config=additional,
        load_config=SimpleNamespace(load_format=load_format),
        model_config=SimpleNamespace(enforce_eager=eager),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )
    monkeypatch.setattr(quantization, "get_current_vllm_config", lambda: config)


def test_an_incomplete_layer_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, target = FakeLayer(), method(monkeypatch)
    create(target, layer)
    engine(monkeypatch)
    with pytest.raises(CheckpointError, match="0 of 24 expert tensors arrived"):
        target.process_weights_after_loading(layer)


def test_random_weights_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal's: vLLM fills what floats with random numbers and leaves the trellis at zero, which decodes."""
    layer, target = FakeLayer(), method(monkeypatch)
    layer.swiglu_limit, layer.top_k = 10.0, 2
    create(target, layer)
    engine(monkeypatch, "dummy")
    target.process_weights_after_loading(layer)
    out = target.apply(layer, torch.randn(3, 256), torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int64))
    assert out.shape == (3, 256) and bool(torch.isfinite(out).all())


@pytest.mark.parametrize(("told", "limit"), [(10.0, 10.0), (None, 0.0)])
def test_the_backend_is_told_the_models_and_the_engines_settings(monkeypatch, told: float | None, limit: float) -> None:
    layer, target, made = FakeLayer(), method(monkeypatch), []
    layer.swiglu_limit, layer.top_k = told, 3
    create(target, layer)
    engine(monkeypatch, "dummy", exl3_backend="loop", exl3_check_overflow=True)
    monkeypatch.setattr(quantization, "make_backend", lambda *arguments: made.append(arguments))
    target.process_weights_after_loading(layer)
    [(name, experts, *rest)] = made
    assert (name, rest) == ("loop", [3, 64, True])
    assert (experts.bits, experts.codebook, experts.limit) == (4, "mcg", limit)
    assert experts.w2_svh.data_ptr() == layer.w2_svh.data_ptr()


def test_expert_parallel_weighted_inputs_and_another_activation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, target = FakeLayer(), method(monkeypatch)
    with pytest.raises(ValueError, match="without --enable-expert-parallel"):
        create(target, layer, global_num_experts=4)
    layer.apply_router_weight_on_input = True
    with pytest.raises(ValueError, match="applies the router's weight to the output"):
        create(target, layer)
    layer.apply_router_weight_on_input, layer.activation = False, MoEActivation.GELU
    with pytest.raises(ValueError, match="this model's experts want gelu"):
        create(target, layer)


def test_sizes_are_never_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert method(monkeypatch).maybe_roundup_sizes(4096, 1024, torch.bfloat16, None) == (4096, 1024)
    assert method(monkeypatch).topk_indices_dtype == torch.int64


def test_the_overflow_check_needs_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    engine(monkeypatch, eager=False, exl3_check_overflow=True)
    layer, target = FakeLayer(), method(monkeypatch)
    create(target, layer)
    monkeypatch.setattr(layer.exl3_loader, "finish", lambda: None)
    with pytest.raises(ValueError, match="set enforce-eager: true with it"):
        target.process_weights_after_loading(layer)
