"""`glm-vllm doctor`: what is wrong with a node, from what it prints now or printed into a bundle."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from glm_vllm_overlay.node import discovery, findings, live
from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node.errors import Unusable
from glm_vllm_overlay.node.evidence import FILES, FOLDERS, Evidence, is_bundle
from glm_vllm_overlay.node.findings import Kind
from glm_vllm_overlay.node.hits import Hit
from glm_vllm_overlay.node.redact import redact

LONGEST = 300
SAVE_SECONDS = 30.0


def finding(kind: Kind, hit: Hit, node: str = "") -> dict[str, str]:
    """One finding as it is printed; `node` is put before the sentence."""
    return {
        "id": kind.id,
        "severity": hit.severity or kind.severity,
        "message": shown(f"{node}: {hit.message}" if node else hit.message),
        "fix": kind.fix,
        "evidence": shown(hit.evidence),
    }


def shown(text: str) -> str:
    """A text out of a bundle as it may be printed: no secrets, no control characters, not too long."""
    return redact("".join(c if c.isprintable() else " " for c in text))[:LONGEST]


def worst(found: list[dict[str, str]]) -> list[dict[str, str]]:
    """The most severe of the findings of one id, or none."""
    return sorted(found, key=lambda one: findings.SEVERITIES.index(one["severity"]))[:1]


def diagnose(nodes: list[Evidence]) -> list[dict[str, str]]:
    """All findings, the most severe first; of one id at most one for each node and one for all together."""
    found: list[dict[str, str]] = []
    several = len(nodes) > 1
    for kind in findings.TABLE:
        for node in nodes:
            detectors = kind.node if several else kind.node + kind.alone
            hits = [hit for hit in (detector(node) for detector in detectors) if hit]
            found += worst([finding(kind, hit, node.name if several else "") for hit in hits])
        if several:
            hits = [hit for hit in (detector(nodes) for detector in kind.pair) if hit]
            found += worst([finding(kind, hit) for hit in hits])
    return sorted(found, key=lambda one: findings.SEVERITIES.index(one["severity"]))


def from_bundle(folder: Path) -> list[Evidence]:
    """The nodes in a bundle, or in a folder of bundles; raises Unusable when there is none, or none says anything."""
    if not os.path.isdir(folder):
        raise Unusable(f"{folder} is no folder: give the folder that an archive of playbooks/support.yml unpacks to")
    if not discovery.is_folder(folder):
        raise Unusable(f"{folder} cannot be read: run as its owner")
    parts = [folder / name for name in discovery.names_in(folder) if os.path.isdir(folder / name)]
    if is_bundle(folder):
        nodes = [Evidence(folder, folder.resolve().name)]
    else:
        nodes = [Evidence(part, part.name) for part in parts if is_bundle(part)]
    closed = [part.name for part in parts if not discovery.is_folder(part)]
    if not nodes and closed:
        raise Unusable(f"{' and '.join(closed)} in {folder} cannot be read: run as its owner")
    if not nodes:
        raise Unusable(f"{folder} holds none of the files of a bundle ({FILES[0]}, {FILES[1]}, … {FOLDERS[0]})")
    told = [node for node in nodes if says_anything(node)]
    mute = [node.name for node in nodes if node not in told]
    if not told:
        raise Unusable(f"no file of {' and '.join(mute)} can be read as what its name says: collect the bundle again")
    # One node's bundle is better than none.
    told[0].unusable += [f"no file of {name} can be read as what its name says" for name in mute]
    told[0].unusable += [f"the folder {name} cannot be read" for name in closed]
    for node in told:
        inside = ("sys", "sys/class", *FOLDERS)
        shut = [name for name in inside if os.path.isdir(node.folder / name)]
        shut = [name for name in shut if not discovery.is_folder(node.folder / name)]
        node.unusable += [f"the folder {name} cannot be read" for name in shut]
    return told


def says_anything(node: Evidence) -> bool:
    """Whether any file of a bundle can be used. An empty listing of RDMA devices is an answer, damaged text is none."""
    if node.addresses is not None or any(node.listing(name) is not None for name in ("ip-route.json", "ip-neigh.json")):
        return True
    if any(discovery.is_folder(node.folder / name) for name in FOLDERS):
        return True
    for name in FILES:
        data = None if name.endswith(".json") else node.data(name)
        if data is None:
            continue
        # Binary noise is no text: nothing that prints into a bundle prints NUL bytes.
        if data.strip() and b"\0" not in data and len(data.decode(errors="ignore").encode()) > 0.9 * len(data):
            return True
        if not data.strip() and name in ("ibdev2netdev.txt", "rdma-link.txt"):
            return True
    return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `glm-vllm doctor`."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--bundle",
        metavar="DIR",
        type=Path,
        help="the folder of what one node printed, or a folder of such folders named by node",
    )
    what.add_argument(
        "--save",
        metavar="DIR",
        type=Path,
        help="write what this node prints into a new folder, without keys and serial numbers, and judge nothing",
    )
    parser.add_argument("--json", action="store_true", help='print one JSON document: {"schema": 1, "findings": [...]}')


def run(args: argparse.Namespace) -> int:
    """`glm-vllm doctor`: exit 0 without a finding that stops, 1 with one."""
    if args.save:
        live.save(live.Live(node_paths.current(), seconds=SAVE_SECONDS, slow=True), args.save)
        if args.json:
            print(json.dumps({"schema": 1, "ok": True}))
        return 0
    nodes = from_bundle(args.bundle) if args.bundle else [live.Live(node_paths.current())]
    found = diagnose(nodes)
    for node in nodes:
        for sentence in dict.fromkeys(node.unusable):
            print(f"glm-vllm doctor: {node.name}: {sentence}; it was left out", file=sys.stderr)
    if args.json:
        print(json.dumps({"schema": 1, "findings": found}))
    else:
        for one in found:
            print(f"{one['severity']} {one['id']}  {one['message']}\n     fix: {one['fix']}\n     {one['evidence']}")
        if not found:
            print("Nothing was found.")
    return int(any(one["severity"] == "stop" for one in found))
