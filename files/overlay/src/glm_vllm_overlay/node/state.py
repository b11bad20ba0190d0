"""What this node says about itself, and what the peer's watch is asked for.

The document (`GET /v1/state`), schema 1: node, role, time, release, release_sha256, config_sha256,
chat_template_sha256 (null where the checkpoint's own is used), environment, model, model_verified, drafter, transfer,
executor, memory, phase, unit, session, rank, fabric, incident. It holds no secret.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from pathlib import Path

from glm_vllm_overlay.node import fabric as node_fabric
from glm_vllm_overlay.node import units
from glm_vllm_overlay.node.errors import Unusable
from glm_vllm_overlay.node.files import read_json_if_there, read_line, sha256
from glm_vllm_overlay.node.paths import Paths
from glm_vllm_overlay.node.settings import VARIABLES, Node

PORT = 8890


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def memory(path: str) -> dict[str, int]:
    """`total`, `available` and `free` bytes from a meminfo file; raises Unusable when they are not in it."""
    values = dict(line.split(":", 1) for line in read_line(Path(path)).splitlines() if ":" in line)
    keys = {"total": "MemTotal", "available": "MemAvailable", "free": "MemFree"}
    try:
        return {name: int(values[key].split()[0]) * 1024 for name, key in keys.items()}
    except (KeyError, ValueError, IndexError):
        raise Unusable(f"{path} does not tell MemTotal, MemAvailable and MemFree") from None


def phase(engine: dict[str, str], gate: dict[str, str]) -> str:
    """stopped, gate, loading, serving, stopping or failed, from the properties of the engine's and the gate's unit."""
    active, sub = engine.get("ActiveState"), engine.get("SubState", "")
    if gate.get("SubState") == "start-pre":
        return "gate"
    if active == "active":
        return "serving"
    if active == "deactivating":
        return "stopping"
    if active == "failed" or sub.startswith("auto-restart"):
        return "failed"
    if active == "activating":
        return "loading"
    return "stopped"


def weights(entry: dict | None) -> str | None:
    """`name@revision` of a model or drafter of deployment.json."""
    return f"{entry['name']}@{entry['revision']}" if entry else None


def transfer(paths: Paths) -> dict | None:
    """How far `glm-vllm fetch` is here (`says` is one sentence), or None; what a killed one left does not count."""
    found = read_json_if_there(paths.transfer)
    return found if found and (paths.proc / str(found.get("pid"))).exists() else None


def verified(entry: dict | None) -> bool:
    """Whether every byte of these weights matched the manifest that lies beside them now."""
    if not entry:
        return False
    folder = Path(entry["path"])
    flag = read_json_if_there(folder / ".verified.json")
    return bool(flag) and flag.get("manifest_sha256") == sha256(folder / "manifest.json")


def descendants(roots: set[int], proc: Path) -> set[int]:
    """The processes `roots` and all their living descendants."""
    children: dict[int, list[int]] = {}
    for entry in proc.glob("[0-9]*/stat"):
        # The command name is in parentheses and may itself hold spaces and parentheses.
        fields = read_line(entry).rpartition(")")[2].split()
        if len(fields) > 1:
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    waiting, seen = list(roots), set()
    while waiting:
        pid = waiting.pop()
        if pid not in seen:
            seen.add(pid)
            waiting += children.get(pid, [])
    return seen


def cpu_seconds(roots: set[int], proc: Path) -> float:
    """CPU time that the processes `roots` and all their living descendants have used so far, to 0.1 ms."""
    return round(sum(map(cpu_nanoseconds, descendants(roots, proc))) / 1e9, 4)


def cpu_nanoseconds(pid: int) -> int:
    """CPU time of all threads that the process `pid` has or had; 0 when there is no such process.

    One short answer costs a rank less than the 10 ms that /proc/<pid>/stat counts in: the kernel's CPU clock of the
    process is exact. Its number is made as clock_getcpuclockid(3) makes it.
    """
    try:
        return time.clock_gettime_ns(~pid << 3 | 2)
    except OSError:
        return 0


def rails(paths: Paths) -> list[dict]:
    """Each rail as it is now; an unresolved one has an empty netdev."""
    try:
        found = node_fabric.resolve(paths).rails
    except Unusable:
        return []
    counters = ("rx_bytes", "tx_bytes")
    return [
        {"netdev": rail.netdev, "address": rail.address, "carrier": rail.carrier, "mtu": rail.mtu}
        | {name: int(read_line(paths.net / rail.netdev / "statistics" / name, "0")) for name in counters}
        for rail in found
    ]


def own(paths: Paths, node: Node | None = None) -> dict:
    """This node's document; raises Unusable when node.env is missing or systemd cannot be asked."""
    node = node or Node.load(paths)
    shown = units.show(*{node.unit, node.gate_unit})
    engine, gate = shown[node.unit], shown[node.gate_unit]
    deployment = read_json_if_there(paths.deployment)
    session = read_json_if_there(paths.session)
    # systemd remembers the invocation of a unit that has ended; its session has ended too.
    alive = gate.get("ActiveState") in ("activating", "active") and gate.get("SubState") != "auto-restart"
    met = alive and session.get("id") == gate.get("InvocationID")
    given = session.get("environment", {}) if met else units.environment(engine)
    model = deployment.get("model")
    return {
        "schema": 1,
        "node": node.name,
        "role": node.role,
        "time": now(),
        "release": deployment.get("release"),
        "release_sha256": sha256(paths.release_manifest(deployment.get("release") or "none")),
        "config_sha256": sha256(paths.serve_yaml),
        "chat_template_sha256": sha256(paths.chat_template),
        "environment": {key: given.get(key, "") for key in VARIABLES},
        "model": weights(model),
        "model_verified": verified(model),
        "drafter": weights(deployment.get("drafter")),
        "transfer": transfer(paths),
        "executor": node.executor,
        "memory": memory(node.meminfo),
        "phase": phase(engine, gate),
        "unit": {
            "name": node.unit,
            "active": engine.get("ActiveState", ""),
            "sub": engine.get("SubState", ""),
            "invocation_id": engine.get("InvocationID", ""),
            "restarts": int(engine.get("NRestarts") or 0),
            "outcome": outcome(engine),
            # What else it says to the engine: enough to see that the nodes differ, and in what
            "environment": digests(units.environment(engine)),
        },
        # What the gates agree on: `id` names this start, `peer` the start of the peer that it belongs with.
        "session": {
            "id": gate.get("InvocationID", ""),
            "ready": met and bool(session.get("ready")),
            "peer": session.get("peer") if met else None,
            "says": session.get("says", "") if met else "",
        },
        "rank": {"cpu_seconds": cpu_seconds(main_pids(engine, gate), paths.proc)},
        "fabric": {"rails": rails(paths)},
        "incident": read_json_if_there(paths.incident) or None,
    }


def digests(environment: dict[str, str]) -> dict[str, str]:
    """A short digest of each value but those of VARIABLES, which are told as they are."""
    return {
        name: hashlib.sha256(value.encode()).hexdigest()[:12]
        for name, value in sorted(environment.items())
        if name not in VARIABLES
    }


def main_pids(*shown: dict[str, str]) -> set[int]:
    """The main processes of units that have one."""
    return {int(unit.get("MainPID") or 0) for unit in shown} - {0}


def outcome(engine: dict[str, str]) -> str:
    """How the engine's unit ended, as one sentence; "" while nothing is wrong with it."""
    result = engine.get("Result", "success")
    if result in ("success", ""):
        return ""
    if result == "exit-code" and engine.get("StatusText"):
        return engine["StatusText"]
    return f"systemd ended it: result {result}, status {engine.get('ExecMainStatus', '?')}"
