"""The ablation hook: its arithmetic, what it refuses, and what a real engine has loaded with and without it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from glm_vllm_overlay.hooks.ablation import Ablation, ablate, project  # noqa: E402
from glm_vllm_overlay.node.errors import Refusal  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

HERE = Path(__file__).parent
HIDDEN = 48


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("alpha", [1.0, 0.5, 2.0])
def test_the_direction_is_taken_out(alpha):
    weight, vector = drawn(HIDDEN, 20), drawn(HIDDEN, seed=1)
    unit = vector / vector.norm()
    wanted = (torch.eye(HIDDEN, dtype=torch.float64) - alpha * torch.outer(unit, unit).double()) @ weight.double()
    changed = weight.clone()
    relative = project(changed, unit, alpha)
    assert torch.allclose(changed.double(), wanted, atol=1e-6)
    assert relative == pytest.approx(((wanted - weight.double()).norm() / weight.double().norm()).item(), rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_come_to_the_same_bits_as_one(ranks):
    weight, vector = drawn(HIDDEN, 64).bfloat16(), drawn(HIDDEN, seed=1)
    unit, whole = vector / vector.norm(), weight.clone()
    project(whole, unit, 1.0)
    parts = [part.contiguous() for part in weight.clone().chunk(ranks, dim=1)]
    for part in parts:
        project(part, unit, 1.0)
    assert torch.equal(torch.cat(parts, dim=1), whole)


# ---- refusals, on a stand-in for a loaded model ----


class Model(torch.nn.Module):
    """Layers as vLLM names them, with plain projections."""

    def __init__(self, numbers=range(4), method=None) -> None:
        super().__init__()
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        layers = torch.nn.ModuleDict()
        for number in numbers:
            projection = torch.nn.Linear(16, HIDDEN, bias=False)
            projection.weight.data = drawn(HIDDEN, 16, seed=number)
            projection.quant_method = method or UnquantizedLinearMethod()
            layers[str(number)] = torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({"o_proj": projection})})
        self.language_model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": layers})})


@pytest.fixture
def wish(tmp_path):
    """Builder of what to ablate, from the tensors of a file."""

    def build(tensors=None, layers=(1, 2), alpha=1.0, content=None) -> Ablation:
        file = tmp_path / "direction.safetensors"
        save_file({"r": drawn(HIDDEN, seed=9)} if tensors is None else tensors, file)
        if content is not None:
            file.write_bytes(content)
        return Ablation(file, hashlib.sha256(file.read_bytes()).hexdigest(), layers, alpha)

    return build


def test_the_layers_of_the_range_and_no_other(wish):
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    changes = ablate(model, wish())
    assert list(changes) == [1, 2] and all(0 < change < 1 for change in changes.values())
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert [name.split(".")[3] for name in changed] == ["1", "2"]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"r": torch.ones(HIDDEN + 1)}, f"holds [{HIDDEN + 1}] float32"),
        ({"r": torch.ones(HIDDEN).bfloat16()}, f"holds [{HIDDEN}] bfloat16"),
        ({"r": torch.ones(1, HIDDEN)}, "needs one float32 vector of 48 numbers"),
        ({"r": torch.ones(HIDDEN), "s": torch.ones(HIDDEN)}, "needs one float32 vector"),
        ({}, "holds nothing"),
        ({"r": torch.zeros(HIDDEN)}, "has length 0.0"),
        ({"r": torch.full((HIDDEN,), float("nan"))}, "has length nan"),
        ({"r": torch.full((HIDDEN,), float("inf"))}, "has length inf"),
    ],
)
def test_a_file_that_is_no_direction(wish, tensors, words):
    with pytest.raises(Refusal) as refused:
        ablate(Model(), wish(tensors))
    assert words in str(refused.value) and "glm_vllm_overlay_ablation_file" in str(refused.value)


def test_a_file_that_is_no_safetensors_file(wish):
    with pytest.raises(Refusal, match="is no safetensors file"):
        ablate(Model(), wish(content=b"words"))


def test_a_missing_file(wish):
    asked = wish()
    asked.file.unlink()
    with pytest.raises(Refusal, match="cannot be read"):
        ablate(Model(), asked)


def test_another_file_than_was_deployed(wish):
    asked = wish()
    save_file({"r": drawn(HIDDEN, seed=10)}, asked.file)
    with pytest.raises(Refusal, match="not the file that was deployed"):
        ablate(Model(), asked)


def test_a_range_without_layers(wish):
    with pytest.raises(Refusal, match="no layer from 7 to 9: set glm_vllm_overlay_ablation_layers"):
        ablate(Model(), wish(layers=(7, 9)))


def test_a_quantised_projection(wish):
    model = Model(method=SimpleNamespace())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Refusal, match="layer 1 is quantised"):
        ablate(model, wish())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_direction_that_changes_nothing(wish):
    model = Model()
    for number in (1, 2):  # no weight has any of it
        model.language_model["model"]["layers"][str(number)]["self_attn"]["o_proj"].weight.data[0] = 0
    direction = torch.zeros(HIDDEN)
    direction[0] = 1
    with pytest.raises(Refusal, match="changes no weight"):
        ablate(model, wish({"r": direction}))


@pytest.mark.parametrize(
    "settings", [None, {}, {"file": "/f"}, {"file": "/f", "sha256": "", "layers": [1], "alpha": 1}]
)
def test_a_unit_that_asks_without_saying_what(settings):
    with pytest.raises(Refusal, match="set glm_vllm_overlay_ablation_enabled and glm_vllm_overlay_ablation_file"):
        Ablation.of(settings)


# ---- in an engine ----


@pytest.fixture(scope="module")
def loaded(checkpoint, tmp_path_factory) -> dict:
    """Loaded weights, refusals and metrics of ablation_job.py."""
    folder, model = tmp_path_factory.mktemp("ablation"), checkpoint("sometimes")
    hidden = json.loads((model / "config.json").read_text())["text_config"]["hidden_size"]
    save_file({"r": drawn(hidden, seed=3)}, folder / "direction.safetensors")
    command = [sys.executable, HERE / "ablation_job.py", model, folder / "direction.safetensors", folder / "results.pt"]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    vector = load_file(folder / "direction.safetensors")["r"]
    return torch.load(folder / "results.pt") | {"log": done.stdout + done.stderr, "direction": vector, "model": model}


@pytest.mark.full
def test_off_is_the_checkpoint_bit_for_bit(loaded):
    stored = load_file(loaded["model"] / "model.safetensors")
    weights = loaded["off"]["Glm5NextForConditionalGeneration"]
    projections = {name: weight for name, weight in weights.items() if name.endswith("o_proj.weight")}
    assert loaded["off_hook"] and projections
    for name, weight in projections.items():
        assert torch.equal(
            weight, stored[name.replace("language_model.model", "model.language_model")].to(weight.dtype)
        )


@pytest.mark.full
def test_on_changes_the_projections_of_the_range_and_nothing_else(loaded):
    off, on = (loaded[state]["Glm5NextForConditionalGeneration"] for state in ("off", "on"))
    unit = loaded["direction"] / loaded["direction"].norm()
    for name, weight in off.items():
        wanted = weight.clone()
        number = int(name.split(".layers.")[1].split(".")[0])
        if name.endswith("o_proj.weight") and number >= 1:
            project(wanted, unit, 0.5)
            assert not torch.equal(wanted, weight)
        assert torch.equal(on[name], wanted), name


@pytest.mark.full
def test_the_drafter_is_not_touched(loaded):
    off, on = (loaded[state]["Glm5NextMTP"] for state in ("off", "on"))
    assert any(name.endswith("o_proj.weight") for name in off)
    assert all(torch.equal(weight, on[name]) for name, weight in off.items())


@pytest.mark.full
def test_the_journal_names_each_layer_and_the_metric_the_state(loaded):
    assert loaded["log"].count("ablation: layer 1, relative change ") == 1
    assert "ablation: layer 0," not in loaded["log"]
    off, on = loaded["metrics"]
    assert "\nglm_ablation_enabled 0.0\n" in off and "\nglm_ablation_enabled 1.0\n" in on


@pytest.mark.full
def test_the_engine_does_not_start_with_another_file(loaded):
    assert "not the file that was deployed" in loaded["refused"]
