"""`glm-vllm status`: both nodes on one screen."""

from __future__ import annotations

import argparse
import json

from glm_vllm_overlay.node import fabric as node_fabric
from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node import state
from glm_vllm_overlay.node.errors import Unusable
from glm_vllm_overlay.node.peer import Silent, ask_peer
from glm_vllm_overlay.node.settings import Node

# A healthy watch answers in milliseconds; a user does not wait long for a dead one.
PEER_TIMEOUT = 1.0
GIB = 1024**3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`glm-vllm status` has no arguments of its own."""


def peer_document(fabric: node_fabric.Fabric) -> dict:
    """The peer's document, or `{"node", "unreachable": why}`."""
    try:
        return ask_peer(fabric, PEER_TIMEOUT)
    except Silent as error:
        return {"node": fabric.peer, "unreachable": str(error)}


def rail_text(rail: dict) -> str:
    """One rail in a table cell."""
    if not rail["netdev"]:
        return f"{rail['address']} on no interface"
    return f"{rail['address']} {rail['netdev']} {'up' if rail['carrier'] else 'NO CARRIER'} mtu {rail['mtu']}"


def incident_text(incident: dict | None) -> str:
    """The last incident in one line."""
    if not incident:
        return "none"
    lasted = "not over" if incident["seconds"] is None else f"{incident['seconds']} s"
    return f"{incident['when']} ({lasted}): {incident['what']}"


def column(document: dict) -> dict[str, str]:
    """One node's table cells by row title."""
    if "unreachable" in document:
        return {"node": document["node"], "phase": "no answer"}
    memory, environment = document["memory"], document["environment"]
    cells = {
        "node": f"{document['node']} ({document['role']})",
        "phase": document["phase"],
        "release": document["release"] or "none",
        "model": (document["model"] or "none") + ("" if document["model_verified"] else " NOT VERIFIED"),
        "drafter": document["drafter"] or "none",
        "executor": document["executor"],
        "speculator": environment["GLM_SPECULATOR"],
        "ablation": {"": "off", "0": "off", "1": "on"}.get(environment["ABLIT"], environment["ABLIT"]),
        "utilisation": environment["GLM_GPU_MEMORY_UTILIZATION"],
        "memory": f"{memory['available'] / GIB:.1f} of {memory['total'] / GIB:.1f} GiB available, "
        f"{memory['free'] / GIB:.1f} free",
    }
    return cells | {f"rail {number}": rail_text(rail) for number, rail in enumerate(document["fabric"]["rails"])}


def notes(document: dict) -> list[str]:
    """What is too long for a cell, one line each."""
    name = document["node"]
    if "unreachable" in document:
        return [f"{name}: no answer ({document['unreachable']})"]
    says = document["session"]["says"] if document["phase"] == "gate" else document["unit"]["outcome"]
    lines = [f"{name}: {says}"] if says else []
    if document.get("transfer"):
        lines.append(f"{name}: {document['transfer']['says']}")
    return [*lines, f"{name} last incident: {incident_text(document['incident'])}"]


def table(documents: list[dict]) -> str:
    """The nodes side by side; rows that nobody fills are left out."""
    columns = [column(document) for document in documents]
    titles = dict.fromkeys(title for cells in columns for title in cells)
    rows = [[title, *(cells.get(title, "") for cells in columns)] for title in titles]
    rows = [row for row in rows if any(row[1:])]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )


def run(args: argparse.Namespace) -> int:
    """`glm-vllm status`: exit 0 when both nodes serve, 1 otherwise."""
    paths = node_paths.current()
    node = Node.load(paths)
    documents = [state.own(paths, node)]
    try:
        documents.append(peer_document(node_fabric.load(paths)))
    except Unusable as error:
        documents.append({"node": "peer", "unreachable": str(error)})
    serving = all(document.get("phase") == "serving" for document in documents)
    endpoint = node.api_url if node.role == "head" else ""
    if args.json:
        document = {"schema": 1, "ok": serving, "nodes": documents}
        print(json.dumps(document | ({"endpoint": endpoint} if endpoint else {})))
    else:
        print(table(documents), "", *(line for document in documents for line in notes(document)), sep="\n")
        if endpoint:
            print(f"endpoint: {endpoint}")
    return 0 if serving else 1
