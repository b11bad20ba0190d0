"""What systemd says about this node's units."""

from __future__ import annotations

import re
import shlex
import subprocess

from glm_vllm_overlay.node.errors import Unusable

PROPERTIES = (
    "Id,ActiveState,SubState,InvocationID,MainPID,NRestarts,Result,ExecMainCode,ExecMainStatus,StatusText,"
    "Environment,TimeoutStopUSec"
)
SPAN = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def show(*names: str) -> dict[str, dict[str, str]]:
    """The properties of each unit (`glm-vllm-head`, without a suffix) as systemd prints them.

    Raises Unusable when systemd cannot be asked.
    """
    command = ["systemctl", "show", "--property", PROPERTIES, "--", *(f"{name}.service" for name in names)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unusable(f"systemd cannot be asked about {' and '.join(names)} ({error}): is this a node?") from None
    blocks = result.stdout.strip().split("\n\n")
    parsed = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in blocks]
    by_name = {unit.get("Id", "").removesuffix(".service"): unit for unit in parsed}
    return {name: by_name.get(name, {}) for name in names}


def environment(unit: dict[str, str]) -> dict[str, str]:
    """The variables of `Environment=`, with those of drop-ins (systemd merges them)."""
    pairs = (word.split("=", 1) for word in shlex.split(unit.get("Environment", "")) if "=" in word)
    return dict(pairs)


def seconds(span: str) -> float | None:
    """The seconds in a time span as systemd prints it (`2min 10s`); None for `infinity`."""
    if span == "infinity":
        return None
    return sum(float(number) * SPAN[unit] for number, unit in re.findall(r"([\d.]+)(us|ms|min|s|h|d)", span))
