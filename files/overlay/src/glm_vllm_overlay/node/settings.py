"""The three settings that the engine's unit carries in `Environment=`, and the facts of node.env."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from glm_vllm_overlay.node.errors import Unusable
from glm_vllm_overlay.node.files import read_env
from glm_vllm_overlay.node.paths import Paths

SPECULATORS = ("dflash2", "mtp", "none")
# Each variable of the unit, and the Ansible variable that sets it for both nodes.
VARIABLES = {
    "GLM_GPU_MEMORY_UTILIZATION": "glm_vllm_overlay_gpu_memory_utilization",
    "GLM_SPECULATOR": "glm_vllm_overlay_speculator",
    "ABLIT": "glm_vllm_overlay_ablation_enabled",
}


@dataclass(frozen=True)
class Settings:
    """What the unit asks of the engine."""

    utilisation: float
    speculator: str
    ablation: bool = False

    @classmethod
    def parse(cls, environment: Mapping[str, str]) -> Settings:
        """Read and check the unit's variables; raises Unusable naming the variable at fault."""
        text = environment.get("GLM_GPU_MEMORY_UTILIZATION", "")
        try:
            utilisation = float(text)
        except ValueError:
            utilisation = 0.0
        if not 0.0 < utilisation <= 1.0:
            raise Unusable(
                f"GLM_GPU_MEMORY_UTILIZATION={text} is not a number above 0 and up to 1: "
                f"set {VARIABLES['GLM_GPU_MEMORY_UTILIZATION']} and run site.yml, or mend `systemctl edit`"
            )
        speculator = environment.get("GLM_SPECULATOR", "")
        if speculator not in SPECULATORS:
            raise Unusable(
                f"GLM_SPECULATOR={speculator} is not one of {', '.join(SPECULATORS)}: "
                f"set {VARIABLES['GLM_SPECULATOR']} and run site.yml, or mend `systemctl edit`"
            )
        ablation = environment.get("ABLIT") or "0"
        if ablation not in ("0", "1"):
            raise Unusable(
                f"ABLIT={ablation} is neither 0 nor 1: "
                f"set {VARIABLES['ABLIT']} and run site.yml, or mend `systemctl edit`"
            )
        return cls(utilisation, speculator, ablation == "1")


@dataclass(frozen=True)
class Node:
    """What differs between the nodes (node.env)."""

    name: str
    role: str
    rank: int
    executor: str
    gate_timeout: float
    start_cost: int
    meminfo: str
    drop_caches: str
    ray_port: int
    api_url: str

    @property
    def unit(self) -> str:
        """The unit that stands for this node's engine."""
        return f"glm-vllm-{self.role}"

    @property
    def gate_unit(self) -> str:
        """The unit that runs the gate: Ray has to start behind it, so under Ray it is Ray's."""
        return f"ray-{self.role}" if self.executor == "ray" else self.unit

    @classmethod
    def load(cls, paths: Paths) -> Node:
        """Read node.env; raises Unusable naming the line that is missing or wrong."""
        values = read_env(paths.node_env)
        if not values:
            raise Unusable(f"{paths.node_env} does not exist or is empty: run site.yml for this node")
        for key, allowed in (("GLM_ROLE", ("head", "worker")), ("GLM_EXECUTOR", ("mp", "ray"))):
            if values.get(key) not in allowed:
                raise Unusable(f"{paths.node_env} has {key}={values.get(key, '')}, not {' or '.join(allowed)}")
        try:
            return cls(
                name=values["GLM_NODE"],
                role=values["GLM_ROLE"],
                rank=int(values["GLM_NODE_RANK"]),
                executor=values["GLM_EXECUTOR"],
                gate_timeout=float(values["GLM_GATE_TIMEOUT"]),
                start_cost=int(values["GLM_START_COST_BYTES"]),
                meminfo=values.get("GLM_MEMINFO") or str(paths.proc / "meminfo"),
                drop_caches=values.get("GLM_DROP_CACHES") or str(paths.proc / "sys/vm/drop_caches"),
                ray_port=int(values.get("GLM_RAY_PORT", "6379")),
                api_url=values.get("GLM_API_URL", ""),
            )
        except (KeyError, ValueError) as error:
            raise Unusable(f"{paths.node_env} lacks a usable line ({error}): run site.yml for this node") from None
