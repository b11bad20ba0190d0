"""Does it fit? One node's memory, part by part, and what follows for the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from glm_vllm_overlay.node.errors import Refusal

GIB = 1 << 30

# Estimates, for want of a measurement on two Sparks by us. With the recipe's settings and 14 GiB of KV cache, owners
# were left with 5 to 6 GiB; these parts and MARGIN add up to that.
SYSTEM = {"full": 4 * GIB, "safe": 11 * GIB}  # kernel, driver and services; `safe` with a desktop or a shared head
GRAPHS = 2 * GIB
ACTIVATIONS_PER_TOKEN = 512 << 10  # of a step: four residual streams and the widest projections
IMAGES = 2 * GIB  # vision tower at work, and the processor's cache
MARGIN = 2 * GIB

VARIABLE = "glm_vllm_overlay_"


@dataclass(frozen=True)
class Part:
    """A share of a node's memory in bytes. basis: headers, vLLM, setting or estimate."""

    name: str
    bytes: int
    basis: str
    inside: bool = True  # of what vLLM's memory utilisation counts


@dataclass(frozen=True)
class Wish:
    """What the deployment asks for. Bytes, but `utilisation`, a share of `memory`. kv: None for as much as fits."""

    memory: int
    utilisation: float
    reserve: int
    start_cost: int
    profile: str
    kv: int | None


@dataclass(frozen=True)
class Budget:
    """The plan of one node."""

    wish: Wish
    parts: tuple[Part, ...]  # without the cache and the reserve
    kv: int

    @property
    def inside(self) -> int:
        """Bytes that vLLM's utilisation has to cover, the cache included."""
        return self.kv + sum(part.bytes for part in self.parts if part.inside)

    @property
    def left(self) -> int:
        """Bytes of the node that nothing is planned for, the reserve included; below zero when it does not fit."""
        return self.wish.memory - self.kv - sum(part.bytes for part in self.parts)

    @property
    def utilisation_needed(self) -> float:
        return math.ceil(100 * self.inside / self.wish.memory) / 100

    @property
    def utilisation_largest(self) -> float:
        """Above it vLLM refuses to start, since it asks for so much available memory even with explicit KV bytes."""
        taken = sum(part.bytes for part in self.parts if part.name in ("system", "processes"))
        return math.floor(100 * (self.wish.memory - taken) / self.wish.memory) / 100


def room_for_cache(wish: Wish, parts: tuple[Part, ...]) -> int:
    """Bytes that the cache may take: within the utilisation, and with the reserve left over. Below zero: too few."""
    inside = sum(part.bytes for part in parts if part.inside)
    everything = sum(part.bytes for part in parts)
    return min(int(wish.utilisation * wish.memory) - inside, wish.memory - everything - wish.reserve)


def settle(wish: Wish, parts: tuple[Part, ...], bytes_per_block: int) -> Budget:
    """The budget with the cache that was asked for, or else the largest in whole blocks."""
    room = room_for_cache(wish, parts)
    return Budget(wish, parts, wish.kv if wish.kv is not None else max(0, room // bytes_per_block * bytes_per_block))


def judge(budget: Budget, needed: int, longest: int, max_model_len: int) -> None:
    """Refuse what does not fit, naming the variable to change.

    needed: bytes of the cache for one request of max_model_len. longest: tokens of the longest context that fits.
    """
    wish = budget.wish

    def gib(count: float) -> str:
        return f"{count / GIB:.2f} GiB"

    if wish.utilisation > budget.utilisation_largest:
        raise Refusal(
            f"vLLM would not start: at {VARIABLE}gpu_memory_utilization {wish.utilisation} it asks for "
            f"{gib(wish.utilisation * wish.memory)} of available memory; set it to at most {budget.utilisation_largest}"
        )
    if wish.kv is not None and budget.inside > wish.utilisation * wish.memory:
        raise Refusal(
            f"the plan takes {gib(budget.inside)}, above the share that {VARIABLE}gpu_memory_utilization "
            f"{wish.utilisation} allows: lower {VARIABLE}kv_cache_memory_bytes, or raise the share to "
            f"{budget.utilisation_needed}"
        )
    if budget.left < wish.reserve:
        room = max(0, room_for_cache(wish, budget.parts))
        raise Refusal(
            f"the plan leaves {gib(budget.left)} of a node and {VARIABLE}reserve_bytes asks for {gib(wish.reserve)}: "
            + (
                f"set {VARIABLE}kv_cache_memory_bytes to at most {room}"
                if wish.kv is not None and room
                else f"set {VARIABLE}memory_profile: full, or a smaller {VARIABLE}max_num_batched_tokens"
            )
        )
    if budget.kv < needed:
        remedy = f"set {VARIABLE}max_model_len to at most {longest}" if longest else "nothing fits beside the weights"
        raise Refusal(
            f"one request of {max_model_len} tokens needs {gib(needed)} of KV cache and {gib(budget.kv)} are left "
            f"for it: {remedy}"
        )


def document(budget: Budget, **more: Any) -> dict[str, Any]:
    """The budget for `--json`; sizes in bytes."""
    parts = [{"name": p.name, "bytes": p.bytes, "basis": p.basis} for p in budget.parts]
    return {
        "memory": budget.wish.memory,
        "parts": parts,
        "kv_cache_memory_bytes": budget.kv,
        "reserve": budget.wish.reserve,
        "left": budget.left,
        "utilisation": {
            "asked": budget.wish.utilisation,
            "needed": budget.utilisation_needed,
            "largest": budget.utilisation_largest,
        },
        **more,
    }
