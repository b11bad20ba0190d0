"""`glm-vllm verify`: compare every byte of the weights with their manifest.

A file that still has the size, time and inode of its last reading is not read again; `--full` reads all. When every
byte matches, the folder's flag says so, and the gate lets the engine start from it; when one does not, the flag is
taken away and the file is named: `playbooks/weights.yml` then brings that file alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node.errors import Unusable
from glm_vllm_overlay.node.files import read_json
from glm_vllm_overlay.node.model import MANIFEST, Findings, Model, checked_files, manifest_text
from glm_vllm_overlay.node.paths import Paths

GB = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `glm-vllm verify`."""
    parser.add_argument("folder", nargs="*", type=Path, help="model folders; by default those that this node serves")
    parser.add_argument("--full", action="store_true", help="read every byte, also of files that look unchanged")


def served(paths: Paths) -> list[Path]:
    """The folders of the model and the drafter, as playbooks/weights.yml wrote them down."""
    document = read_json(paths.weights)
    return [Path(document[key]["path"]) for key in ("target", "drafter") if document.get(key)]


def verify(folder: Path, full: bool) -> tuple[Findings, bool]:
    """Findings of one folder and whether its flag or manifest changed; raises Unusable without a manifest."""
    model = Model(folder, full=full)
    manifest = model.manifest()
    if not manifest:
        raise Unusable(f"{folder / MANIFEST} is missing or damaged: run playbooks/weights.yml")
    wanted = checked_files(manifest.get("files"), str(folder / MANIFEST))
    with model.locked():
        findings = model.check(wanted)
        # A reading that did not match is not remembered: the file is read again until it is right.
        model.remember({name: entry for name, entry in findings.digests.items() if name not in findings.wrong})
        if findings.wrong:
            return findings, model.distrust()
        return findings, model.vouch(manifest_text(manifest.get("name", ""), manifest.get("revision", ""), wanted))


def run(args: argparse.Namespace) -> int:
    """`glm-vllm verify`: exit 0 when every byte matched, 1 when something is missing or wrong."""
    results = []
    for folder in args.folder or served(node_paths.current()):
        began = time.monotonic()
        findings, changed = verify(folder, args.full)
        results.append(
            {
                "folder": str(folder),
                "verified": not findings.wrong,
                "changed": changed,
                "files": len(findings.digests),
                "files_read": findings.files_read,
                "bytes_read": findings.bytes_read,
                "seconds": round(time.monotonic() - began, 2),
                "wrong": findings.wrong,
            }
        )
    good = all(result["verified"] for result in results)
    if args.json:
        print(json.dumps({"schema": 1, "ok": good, "models": results}))
        return 0 if good else 1
    for result in results:
        if result["verified"]:
            speed = result["bytes_read"] / GB / max(result["seconds"], 0.01)
            print(
                f"{result['folder']}: {result['files']} files right, {result['bytes_read'] / GB:.2f} GB of them read "
                f"in {result['seconds']} s ({speed:.2f} GB/s)"
            )
        for reason in result["wrong"].values():
            print(f"{result['folder']}: {reason}; playbooks/weights.yml brings it anew")
    return 0 if good else 1
