"""`glm-vllm hold`: the worker's unit under executor ray. The rank itself is Ray's; this keeps the node's side of the
bargain visible to systemd and ends it when the local Ray or the peer is gone."""

from __future__ import annotations

import argparse
import json
import time

from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node import units
from glm_vllm_overlay.node.errors import Refusal
from glm_vllm_overlay.node.notify import notify
from glm_vllm_overlay.node.peer import POLL
from glm_vllm_overlay.node.serve import bond, memory_reason, stop_signal
from glm_vllm_overlay.node.settings import Node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`glm-vllm hold` has no arguments of its own."""


def run(args: argparse.Namespace) -> int:
    """`glm-vllm hold`: exit 0 after a stop that was asked for, 1 with one sentence otherwise."""
    paths = node_paths.current()
    node = Node.load(paths)
    tie, stop, ready = bond(paths, node), stop_signal(), False
    notify("STATUS=loading")
    while not stop.wait(POLL):
        local = units.show(node.gate_unit)[node.gate_unit].get("ActiveState")
        lost = tie.check(time.monotonic())
        reason = f"{node.gate_unit} is {local}: back to the gate" if local != "active" else lost
        if reason:
            notify(f"STATUS={reason}")
            raise Refusal(reason)
        if not ready and tie.phase == "serving":
            ready = True
            notify("READY=1", "STATUS=serving")
            print("serving", flush=True)
    if reason := memory_reason(paths):
        notify(f"STATUS={reason}")
        raise Refusal(reason)
    notify("STOPPING=1", "STATUS=stopping")
    print(json.dumps({"schema": 1, "ok": True, "message": "stopped"}) if args.json else "stopped")
    return 0
