"""The loader: shards, and one sentence for everything that can be wrong."""

import pytest
import torch
from glm_vllm_overlay.exl3 import format as exl3
from glm_vllm_overlay.exl3.execute import Experts, ReferenceBackend
from glm_vllm_overlay.exl3.loader import CheckpointError, ExpertLoader, ExpertShape

EXPERTS, HIDDEN, WIDTH = 2, 256, 512


def shape(tp_size: int = 1, tp_rank: int = 0, **other: object) -> ExpertShape:
    base = {"experts": EXPERTS, "hidden": HIDDEN, "intermediate": WIDTH, "bits": 4, "codebook": "mcg"}
    return ExpertShape(**{**base, **other}, tp_size=tp_size, tp_rank=tp_rank)


def make_loader(geometry: ExpertShape) -> ExpertLoader:
    parameters = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in geometry.parameters().items()}
    return ExpertLoader("model.layers.3.mlp.experts", geometry, parameters)


def checkpoint(seed: int = 0) -> dict[tuple[int, str, str], torch.Tensor]:
    """(expert, shard, suffix) → tensor, as stored."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[tuple[int, str, str], torch.Tensor] = {}
    for expert in range(EXPERTS):
        for shard, rows, columns in (("w1", HIDDEN, WIDTH), ("w3", HIDDEN, WIDTH), ("w2", WIDTH, HIDDEN)):
            size = (rows // 16, columns // 16, 64)
            tensors[expert, shard, "trellis"] = torch.randint(-32768, 32768, size, generator=generator).short()
            tensors[expert, shard, "suh"] = torch.randn(rows, generator=generator).half()
            tensors[expert, shard, "svh"] = torch.randn(columns, generator=generator).half()
            tensors[expert, shard, "mcg"] = exl3.marker_tensor("mcg")[1]
    return tensors


def fill(loader: ExpertLoader, tensors: dict[tuple[int, str, str], torch.Tensor]) -> ExpertLoader:
    for (expert, shard, suffix), tensor in tensors.items():
        loader.load(suffix, expert, shard, tensor)
    return loader


def decoded(loader: ExpertLoader, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p = loader.parameters
    gate, up = (
        exl3.dequantise(exl3.Packed(*(p[f"w13_{part}"][expert, i] for part in ("trellis", "suh", "svh"))))
        for i in range(2)
    )
    return gate, up, exl3.dequantise(exl3.Packed(*(p[f"w2_{part}"][expert] for part in ("trellis", "suh", "svh"))))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_hold_the_columns_and_rows_of_the_whole(tp_size: int) -> None:
    tensors = checkpoint()
    ranks = [fill(make_loader(shape(tp_size, rank)), tensors) for rank in range(tp_size)]
    for expert in range(EXPERTS):
        whole = [
            exl3.dequantise(exl3.Packed(*(tensors[expert, shard, part] for part in ("trellis", "suh", "svh"))))
            for shard in ("w1", "w3", "w2")
        ]
        parts = [decoded(rank, expert) for rank in ranks]
        assert torch.allclose(torch.cat([part[0] for part in parts], 1), whole[0], atol=1e-5)
        assert torch.allclose(torch.cat([part[1] for part in parts], 1), whole[1], atol=1e-5)
        assert torch.allclose(torch.cat([part[2] for part in parts], 0), whole[2], atol=1e-5)
    for rank in ranks:
        rank.finish()
        for group in ("w13", "w2"):
            assert (rank.parameters[f"{group}_mcg"] == exl3.marker_tensor("mcg")[1]).all()
        assert rank.loaded == rank.expected == EXPERTS * 3 * 4


def test_ranks_partial_outputs_add_up() -> None:
    tensors, x = checkpoint(), torch.randn(3, HIDDEN)
    whole = decoded(fill(make_loader(shape()), tensors), 1)
    parts = [decoded(fill(make_loader(shape(2, rank)), tensors), 1) for rank in range(2)]

    def expert(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return ((x @ weights[0]).sigmoid() * (x @ weights[1])) @ weights[2]

    assert torch.allclose(expert(parts[0]) + expert(parts[1]), expert(whole), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("key", list(checkpoint()))
def test_every_missing_tensor_is_named(key: tuple[int, str, str]) -> None:
    tensors = checkpoint()
    del tensors[key]
    name = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}[key[1]]
    with pytest.raises(CheckpointError, match=rf"23 of 24 .*missing: .*mlp.experts.{key[0]}.{name}.{key[2]}"):
        fill(make_loader(shape()), tensors).finish()


def test_of_many_missing_tensors_three_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"0 of 24 .*missing: [^,]+, [^,]+, [^,]+ …$"):
        make_loader(shape()).finish()
    loader, tensors = make_loader(shape()), checkpoint()
    fill(loader, dict(list(tensors.items())[3:]))
    with pytest.raises(CheckpointError, match=r"21 of 24 .*missing: [^,]+, [^,]+, [^,…]+$"):
        loader.finish()


def outputs(tensors: dict[tuple[int, str, str], torch.Tensor]) -> torch.Tensor:
    """What two ranks that hold expert 0 alone add up to for three tokens, without the clamp, which would hide much."""
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    total = torch.zeros_like(x)
    for rank in range(2):
        loader = make_loader(shape(2, rank, experts=1))
        fill(loader, {key: tensor for key, tensor in tensors.items() if key[0] == 0}).finish()
        parts = {name: tensor for name, tensor in loader.parameters.items() if not name.endswith("_mcg")}
        backend = ReferenceBackend(Experts(4, "mcg", 0.0, **parts))
        total += backend.apply(x, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64))
    return total


@pytest.mark.parametrize("part", ["trellis", "suh", "svh", "mcg"])
@pytest.mark.parametrize("shard", ["w1", "w3", "w2"])
def test_a_flipped_bit_changes_the_output_or_fails_the_load(shard: str, part: str) -> None:
    tensors = checkpoint()
    before, generator = outputs(tensors), torch.Generator().manual_seed(2)
    for bit in range(32 if part == "mcg" else 16):
        damaged = tensors[0, shard, part].clone()
        words = damaged.view(1).view(torch.int16) if part == "mcg" else damaged.view(torch.int16).view(-1)
        place = bit // 16 if part == "mcg" else int(torch.randint(len(words), (), generator=generator))
        words[place] ^= torch.tensor(1 << bit % 16).to(torch.int16)
        try:
            after = outputs({**tensors, (0, shard, part): damaged})
        except CheckpointError as error:
            assert part == "mcg" or "not finite" in str(error)
        else:
            assert part != "mcg" and not torch.equal(before, after), (bit, place)


def test_a_flipped_bit_in_the_marker_is_refused() -> None:
    marker = exl3.marker_tensor("mcg")[1] ^ 4
    with pytest.raises(CheckpointError, match="experts.0.gate_proj.mcg is 0xCBAC1FE9, the only mcg multiplier known"):
        make_loader(shape()).load("mcg", 0, "w1", marker)


def test_swapped_projections_do_not_fit() -> None:
    tensors = checkpoint()
    with pytest.raises(CheckpointError, match=r"down_proj.trellis is int16\[16, 32, 64\].*needs int16\[32, 16, 64\]"):
        make_loader(shape()).load("trellis", 0, "w2", tensors[0, "w1", "trellis"])


def test_wrong_width_of_bits_says_so() -> None:
    with pytest.raises(CheckpointError, match=r"that is 3 bits a weight\); the model with 4 bits needs"):
        make_loader(shape()).load("trellis", 0, "w1", torch.zeros(16, 32, 48, dtype=torch.int16))


def test_an_already_sharded_tensor_is_refused() -> None:
    half = checkpoint()[0, "w1", "trellis"][:, :16]
    with pytest.raises(CheckpointError, match=r"is int16\[16, 16, 64\]"):
        make_loader(shape(2, 1)).load("trellis", 0, "w1", half)


@pytest.mark.parametrize(
    ("suffix", "tensor", "message"),
    [
        ("suh", torch.zeros(HIDDEN, dtype=torch.bfloat16), r"suh is bfloat16\[256\].*needs float16\[256\]"),
        ("suh", torch.full((HIDDEN,), float("nan")).half(), "not finite"),
        ("svh", torch.full((WIDTH,), float("inf")).half(), "svh holds a value that is not finite"),
        ("svh", torch.zeros(HIDDEN).half(), r"svh is float16\[256\].*needs float16\[512\]"),
        ("mcg", torch.zeros(2, dtype=torch.int32), r"must be one int32, it is int32\[2\]"),
        ("mcg", torch.tensor(0.5), r"must be one int32, it is float32"),
        ("mul1", torch.tensor(1, dtype=torch.int32), "marks the mul1 codebook, but the configuration says mcg"),
        ("weight", torch.zeros(WIDTH, HIDDEN), "packed experts have no tensor of that name"),
    ],
)
def test_wrong_tensors(suffix: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        make_loader(shape()).load(suffix, 0, "w1", tensor)


def test_twice_and_unknown_experts() -> None:
    loader, tensors = make_loader(shape()), checkpoint()
    loader.load("suh", 0, "w1", tensors[0, "w1", "suh"])
    with pytest.raises(CheckpointError, match="experts.0.gate_proj.suh appears twice"):
        loader.load("suh", 0, "w1", tensors[0, "w1", "suh"])
    for expert, shard in ((2, "w1"), (-1, "w1"), (0, "w4")):
        with pytest.raises(CheckpointError, match=f"no expert {expert} with shard {shard} exists in this model"):
            loader.load("suh", expert, shard, tensors[0, "w1", "suh"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codebook": "mgc"}, "'mgc' is unknown"),
        ({"bits": 9}, "1 to 8 bits"),
        ({"bits": 0}, "1 to 8 bits"),
        ({"intermediate": 192}, "cannot cut a 128-wide rotation"),
        ({"hidden": 200}, "cannot cut a 128-wide rotation"),
        ({"tp_size": 8}, "cannot cut a 128-wide rotation"),
    ],
)
def test_geometry_that_cannot_be_served(change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        shape(**{"tp_size": 1, **change})


def test_the_codebook_without_a_marker_needs_none() -> None:
    loader = make_loader(shape(codebook="3inst"))
    assert not [name for name in loader.parameters if name.endswith(("mcg", "mul1", "3inst"))]
    fill(loader, {key: tensor for key, tensor in checkpoint().items() if key[2] != "mcg"}).finish()
    assert loader.expected == EXPERTS * 3 * 3
    with pytest.raises(CheckpointError, match="marks the mcg codebook, but the configuration says 3inst"):
        loader.load("mcg", 0, "w1", exl3.marker_tensor("mcg")[1])


def test_bytes_of_the_recipes_layer() -> None:
    """6,322,176 bytes an expert and rank: with 288 experts and 42 layers the recipe's 71.22 GiB."""
    layer = ExpertShape(288, 4096, 2048, 4, "mcg", 2, 0)
    assert layer.packed_bytes() == 288 * 6322176
    assert round(layer.packed_bytes() * 42 / 2**30, 2) == 71.22
