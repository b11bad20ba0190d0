"""The format: decode against a bit-by-bit reading of the specification, and its inverses."""

import numpy
import pytest
import torch
from glm_vllm_overlay.exl3 import format as exl3

BITS = range(1, 9)


def words(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-32768, 32768, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(seed))


def slow_states(tile: torch.Tensor, bits: int) -> list[int]:
    """The specification, one bit at a time."""
    u = [int(w) & 0xFFFF for w in tile]
    stream = [((u[2 * j] | u[2 * j + 1] << 16) >> (31 - i)) & 1 for j in range(len(u) // 2) for i in range(32)]
    return [
        int("".join(str(stream[((t + 1) * bits - 16 + m) % (256 * bits)]) for m in range(16)), 2) for t in range(256)
    ]


@pytest.mark.parametrize("bits", BITS)
def test_states_follow_the_specification(bits: int) -> None:
    tile = words(16 * bits, seed=bits)
    assert exl3.unpack_states(tile).tolist() == slow_states(tile, bits)


@pytest.mark.parametrize("bits", BITS)
def test_packing_is_the_inverse_of_unpacking(bits: int) -> None:
    tiles = words(3, 2, 16 * bits, seed=bits)
    assert torch.equal(exl3.pack_states(exl3.unpack_states(tiles), bits), tiles)


def half(bits: int) -> numpy.float16:
    return numpy.array([bits], dtype=numpy.uint16).view(numpy.float16)[0]


@pytest.mark.parametrize("codebook", exl3.CODEBOOKS)
def test_codebooks_in_float16_arithmetic(codebook: str) -> None:
    """Every 101st state, in numpy's own float16."""
    table = exl3.codebook_table(codebook)
    for state in range(0, 65536, 101):
        if codebook == "mul1":
            z = state * 0x83DCD12D & 0xFFFFFFFF
            total = sum(z >> shift & 255 for shift in (0, 8, 16, 24))
            exact = float(half(0x6400 + total)) * float(half(0x1EEE)) + float(half(0xC931))
            expected = numpy.float16(exact)
        else:
            z = (state * 0xCBAC1FED if codebook == "mcg" else state * 89226354 + 64248484) & 0xFFFFFFFF
            z = (z & 0x8FFF8FFF) ^ 0x3B603B60
            expected = half(z & 0xFFFF) + half(z >> 16)
        assert float(table[state]) == float(expected), state


def test_codebook_statistics() -> None:
    """Root mean squares over all states, as computed independently for the format's specification."""
    for codebook, rms in (("mcg", 1.2441), ("3inst", 1.24371), ("mul1", 1.0003)):
        assert exl3.codebook_table(codebook).double().pow(2).mean().sqrt().item() == pytest.approx(rms, abs=5e-5)
    with pytest.raises(ValueError, match="unknown EXL3 codebook 'mgc'"):
        exl3.codebook_table("mgc")


def test_placement_is_the_tensor_core_fragment_order() -> None:
    tile = exl3.from_tiles(torch.arange(256).reshape(1, 1, 256))
    for t in range(256):
        lane, j = divmod(t, 8)
        row, column = 2 * (lane % 4) + j % 2 + 8 * (j // 2 % 2), lane // 4 + 8 * (j // 4)
        assert tile[row, column] == t


def test_tiles_are_laid_out_by_input_then_output() -> None:
    weight = torch.randn(128, 256)
    tiles = exl3.to_tiles(weight)
    assert tiles.shape == (8, 16, 256)
    assert torch.equal(exl3.from_tiles(tiles), weight)
    assert torch.equal(exl3.from_tiles(tiles[2:3, 5:6]), weight[32:48, 80:96])


def test_hadamard_is_sylvesters_and_its_own_inverse() -> None:
    h = exl3.hadamard(torch.float64)
    for i, j in ((0, 0), (1, 1), (3, 5), (127, 127), (64, 96)):
        assert h[i, j].item() * 128**0.5 == pytest.approx((-1) ** bin(i & j).count("1"))
    assert torch.allclose(h @ h, torch.eye(128, dtype=torch.float64))


@pytest.mark.parametrize("codebook", exl3.CODEBOOKS)
@pytest.mark.parametrize("bits", BITS)
def test_rotating_weights_and_rotating_activations_agree(bits: int, codebook: str) -> None:
    generator = torch.Generator().manual_seed(bits)
    packed = exl3.Packed(
        words(16, 8, 16 * bits, seed=bits),
        (torch.rand(256, generator=generator) - 0.5).half(),
        (torch.rand(128, generator=generator) - 0.5).half(),
        codebook,
    )
    x = torch.randn(5, 256, dtype=torch.float64, generator=generator)
    through_weight = x @ exl3.dequantise(packed, torch.float64)
    assert torch.allclose(exl3.linear(x, packed, torch.float64), through_weight, rtol=1e-9, atol=1e-9)


def test_stack_of_experts_decodes_like_each_alone() -> None:
    stack = exl3.Packed(words(3, 8, 8, 64), torch.rand(3, 128).half(), torch.rand(3, 128).half())
    whole = exl3.dequantise(stack)
    for e in range(3):
        one = exl3.Packed(stack.trellis[e], stack.suh[e], stack.svh[e])
        assert torch.allclose(whole[e], exl3.dequantise(one), atol=1e-6)


@pytest.mark.parametrize("part", ["trellis", "suh", "svh"])
def test_one_flipped_bit_changes_the_weight(part: str) -> None:
    tensors = {"trellis": words(8, 8, 64), "suh": torch.rand(128).half() + 0.5, "svh": torch.rand(128).half() + 0.5}
    before = exl3.dequantise(exl3.Packed(**tensors))
    tensors[part] = tensors[part].clone()
    tensors[part].view(torch.int16).view(-1)[17] ^= 1
    assert not torch.equal(exl3.dequantise(exl3.Packed(**tensors)), before)


def test_a_tensor_that_is_no_trellis_is_refused() -> None:
    with pytest.raises(ValueError, match="int16, this one is int32"):
        exl3.unpack_states(torch.zeros(64, dtype=torch.int32))
    for width in (0, 40, 144):  # no bit a weight, two and a half, nine
        with pytest.raises(ValueError, match=f"16 x .1..8. words a tile, this one has {width}"):
            exl3.unpack_states(torch.zeros(width, dtype=torch.int16))


def test_markers_are_the_multipliers() -> None:
    name, tensor = exl3.marker_tensor("mcg")
    assert (name, tensor.item(), tensor.dtype) == ("mcg", -877912083, torch.int32)
    assert exl3.marker_tensor("3inst") is None
