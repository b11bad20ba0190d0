"""`glm-vllm gate`: the engine starts only where both nodes can start the same thing together.

Runs as root before the engine (`ExecStartPre=+`). First this node alone: cable, address and GID, fabric.env, weights,
kernels, memory. Then the pair: the gate says `ready` in session.json, which the watch publishes, and waits until the
peer's gate is ready too and both would run the same. The pair of starts that met is the session: when either ends, the
other side's supervision ends as well, and both meet here again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from math import floor
from pathlib import Path

from glm_vllm_overlay.node import fabric as node_fabric
from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node import release, state, units
from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.files import read_json, write_atomically
from glm_vllm_overlay.node.model import changed_since_verified
from glm_vllm_overlay.node.paths import Paths
from glm_vllm_overlay.node.peer import Silent, ask_peer
from glm_vllm_overlay.node.settings import VARIABLES, Node, Settings

POLL = 1.0
# Memory of an engine that has just ended comes back within seconds; after that it is somebody else's.
MEMORY_PATIENCE = 30.0
# While both nodes are being promoted they differ for a moment.
DIFFERENCE_PATIENCE = 10.0
GIB = 1024**3


@dataclass
class Gate:
    """One passage: what this start is, and until when it may wait (`deadline`, monotonic seconds)."""

    paths: Paths
    node: Node
    invocation: str
    environment: dict[str, str]
    deadline: float
    facts: list[str] = field(default_factory=list)

    def say(self, sentence: str, *, ready: bool = False, peer: str | None = None) -> None:
        """Publish what this gate waits for, or that it is ready, or that it passed with the peer's start `peer`."""
        session = {"schema": 1, "id": self.invocation, "ready": ready, "peer": peer, "says": sentence}
        write_atomically(self.paths.session, json.dumps(session | {"environment": self.environment}) + "\n")

    def wait(self, reason: str, began: float, patience: float) -> None:
        """Sleep one poll; raises Refusal with `reason` once `patience` since `began` or the deadline is over."""
        clock = time.monotonic()
        if clock - began >= patience or clock >= self.deadline:
            raise Refusal(reason)
        time.sleep(POLL)

    def fabric(self) -> node_fabric.Fabric:
        """Wait for every rail, write fabric.env."""
        began = time.monotonic()
        while True:
            fabric = node_fabric.resolve(self.paths)
            problem = fabric.problem()
            if not problem:
                node_fabric.write(fabric, self.paths)
                return fabric
            self.say(problem)
            self.wait(problem, began, self.node.gate_timeout)

    def memory(self, utilisation: float) -> None:
        """Drop the page cache and wait for what vLLM asks for at its start (utilisation x MemTotal) plus the cost of
        starting it."""
        began = time.monotonic()
        while True:
            drop_caches(self.paths.drop_caches, self.node.drop_caches)
            problem = memory_problem(state.memory(self.node.meminfo), utilisation, self.node.start_cost)
            if not problem:
                return
            self.say(problem)
            self.wait(problem, began, MEMORY_PATIENCE)

    def weights(self, speculator: str) -> None:
        """Refuse weights that are not those that were verified, or a drafter that is missing."""
        deployment = read_json(self.paths.deployment)
        wanted = [deployment.get("model")] + ([deployment.get("drafter")] if speculator == "dflash2" else [])
        if None in wanted:
            raise Refusal(
                "this deployment has no drafter but GLM_SPECULATOR=dflash2: set glm_vllm_overlay_speculator: mtp, "
                "or accept the drafter's licence in model_fetch_accept_licences"
            )
        for entry in wanted:
            if reason := changed_since_verified(Path(entry["path"])):
                raise Refusal(
                    f"{state.weights(entry)} is not verified on {self.node.name} ({reason}): run playbooks/weights.yml"
                )

    def meet(self, fabric: node_fabric.Fabric) -> dict:
        """Wait for the peer's gate; returns the peer's document once both belong together."""
        mine = state.own(self.paths, self.node) | {"environment": self.environment}
        began = time.monotonic()
        differs_since: float | None = None
        missing = f"waiting for {fabric.peer}"
        while True:
            self.say(missing, ready=True)
            try:
                peer = ask_peer(fabric)
            except Silent as error:
                missing = (
                    f"the watch of {fabric.peer} gives no answer ({error}): switch {fabric.peer} on, "
                    "or look at `systemctl status glm-vllm-watch` there"
                )
                self.wait(missing, began, self.node.gate_timeout)
                continue
            if missing := different(mine, peer):
                differs_since = time.monotonic() if differs_since is None else differs_since
                self.wait(missing, differs_since, DIFFERENCE_PATIENCE)
                continue
            differs_since = None
            if missing := not_ready(peer, self.invocation):
                self.wait(missing, began, self.node.gate_timeout)
                continue
            self.say(f"started together with {fabric.peer}", ready=True, peer=peer["session"]["id"])
            return peer


def memory_problem(memory: dict[str, int], utilisation: float, start_cost: int) -> str:
    """Why the engine cannot start with this memory (bytes), or ""."""
    needed = utilisation * memory["total"] + start_cost
    if memory["available"] >= needed:
        return ""
    largest = max(0, floor((memory["available"] - start_cost) / memory["total"] * 100)) / 100
    return (
        f"needs {needed / GIB:.1f} GiB, has {memory['available'] / GIB:.1f} available "
        f"({memory['free'] / GIB:.1f} free); largest utilisation that starts here: {largest:.2f} "
        "(end what else uses memory, or set glm_vllm_overlay_gpu_memory_utilization)"
    )


def drop_caches(helper: Path, target: str) -> None:
    """Give clean page cache back: on unified memory it stands in the way of GPU allocations."""
    try:
        subprocess.run([helper], env=os.environ | {"GLM_DROP_CACHES": target}, check=True, capture_output=True)
    except OSError as error:
        raise Unusable(f"{helper} cannot be run ({error.strerror}): run playbooks/nodes.yml for this node") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise Unusable(f"the page cache cannot be dropped ({said}): run the gate as root") from None


def make_device_files(helper: Path) -> None:
    """Have the driver's helper make /dev/nvidia0 and /dev/nvidia-uvm where nothing has since the boot.

    CUDA calls it by itself, but it is setuid and the engine's unit gains no privileges. Its failure is no reason to
    stop: what is missing then, CUDA names in the engine's journal.
    """
    if helper.exists():
        for arguments in (("-c=0",), ("-c=0", "-u")):
            subprocess.run([helper, *arguments], check=False, capture_output=True)


def different(mine: dict, peer: dict) -> str:
    """The first thing in which the nodes would run something else, as one sentence; "" when they agree."""
    a, b = mine["node"], peer["node"]
    for variable, setting in VARIABLES.items():
        here, there = mine["environment"].get(variable, ""), peer["environment"].get(variable, "")
        if here != there:
            return (
                f"{a} runs {variable}={here} and {b} {there or 'nothing'}: undo "
                f"`systemctl edit {mine['unit']['name']}` on {a} or `systemctl edit {peer['unit']['name']}` on {b}, "
                f"or set {setting} for both"
            )
    for key, title, remedy in (
        ("executor", "executor", "run site.yml for both"),
        ("release", "release", "run site.yml for both"),
        ("release_sha256", "a release manifest with hash", "run playbooks/release.yml for both"),
        ("config_sha256", "a serve.yaml with hash", "run playbooks/serve.yml for both"),
        ("chat_template_sha256", "a chat template with hash", "run playbooks/serve.yml for both"),
        ("model", "model", "run site.yml for both"),
        ("drafter", "drafter", "run site.yml for both"),
    ):
        here, there = mine[key] or "none", peer.get(key) or "none"
        if here != there:
            if key.endswith("_sha256"):
                here, there = here[:12], there[:12]
            return f"{a} has {title} {here} and {b} {there}: {remedy}"
    ours, theirs = mine["unit"]["environment"], peer["unit"].get("environment", {})
    for variable in sorted(ours | theirs):
        if ours.get(variable) != theirs.get(variable):
            return (
                f"{a} and {b} do not give the engine the same {variable}: undo `systemctl edit {mine['unit']['name']}` "
                f"on {a} or `systemctl edit {peer['unit']['name']}` on {b}, or run site.yml for both"
            )
    if not peer["model_verified"]:
        return f"{peer['model']} is not verified on {b}: run playbooks/weights.yml"
    return ""


def not_ready(peer: dict, invocation: str) -> str:
    """Why the peer's start does not belong with ours (`invocation`) yet, or ""."""
    session, name, unit = peer["session"], peer["node"], peer["unit"]["name"]
    if peer["phase"] in ("stopped", "failed"):
        ended = f" ({peer['unit']['outcome']})" if peer["unit"]["outcome"] else ""
        how = "has failed" if peer["phase"] == "failed" else "is stopped"
        return f"{unit} on {name} {how}{ended}: start it there with `systemctl start {unit}`"
    if not session["ready"]:
        return f"{name} is not at the gate yet: {session['says'] or 'its ' + unit + ' is ' + peer['phase']}"
    if session["peer"] not in (None, invocation):
        return f"{unit} on {name} still belongs to an earlier start of this node: restart it there"
    return ""


def prepare_run_folder(paths: Paths) -> None:
    """Have tmpfiles.d make /run/glm-vllm again where someone wiped it."""
    if paths.run.is_dir():
        return
    # Its exit code also counts lines of other packages; what matters is whether the folder is there.
    subprocess.run(["systemd-tmpfiles", "--create", f"--prefix={paths.run}"], check=False)
    if not paths.run.is_dir():
        raise Unusable(f"{paths.run} does not exist and no file in tmpfiles.d makes it: run site.yml for this node")


def this_start(node: Node) -> str:
    """The invocation id of the start that this gate belongs to; raises Unusable where no gate belongs."""
    invocation = os.environ.get("INVOCATION_ID", "")
    if not invocation:
        raise Unusable("INVOCATION_ID is not set: the gate runs as ExecStartPre of a unit, start that unit instead")
    if invocation != units.show(node.gate_unit)[node.gate_unit].get("InvocationID"):
        raise Unusable(f"executor {node.executor} has its gate in {node.gate_unit}, not in this unit: run site.yml")
    return invocation


def effective_environment(node: Node) -> dict[str, str]:
    """What systemd gives the engine: this process's own variables, or (Ray's unit runs the gate) the engine unit's."""
    shown = units.environment(units.show(node.unit)[node.unit])
    return {key: os.environ.get(key, shown.get(key, "")) for key in VARIABLES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`glm-vllm gate` has no arguments of its own."""


def run(args: argparse.Namespace) -> int:
    """`glm-vllm gate`: exit 0 once both nodes may start, 1 with one sentence otherwise."""
    paths = node_paths.current()
    node = Node.load(paths)
    invocation = this_start(node)
    prepare_run_folder(paths)
    environment = effective_environment(node)
    gate = Gate(paths, node, invocation, environment, time.monotonic() + node.gate_timeout)
    try:
        settings = Settings.parse(environment)
        gate.say("looking at the fabric")
        fabric = gate.fabric()
        gate.weights(settings.speculator)
        deployment = read_json(paths.deployment)
        release.check_kernels(paths, deployment["release"])
        release.check_modules(paths, deployment["release"])
        release.check_rehearsal(paths, deployment)
        make_device_files(paths.device_helper)
        gate.memory(settings.utilisation)
        peer = gate.meet(fabric)
    except (Refusal, Unusable) as error:
        gate.say(str(error))
        raise
    message = f"{node.name} and {peer['node']} start together"
    print(json.dumps({"schema": 1, "ok": True, "message": message}) if args.json else message)
    return 0
