"""`glm-vllm serve`: one rank of the engine: composes vLLM's command line, runs it, ends it when the peer is lost."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from glm_vllm_overlay.node import fabric as node_fabric
from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node import release, state, units
from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.files import read_json, read_json_if_there, read_line
from glm_vllm_overlay.node.notify import notify
from glm_vllm_overlay.node.paths import Paths
from glm_vllm_overlay.node.peer import POLL, Bond
from glm_vllm_overlay.node.settings import Node, Settings

DRAFT_TOKENS = {"dflash2": 7, "mtp": 2}
# Each would open a door beside the Unix socket, where nobody asks for a key.
OTHER_DOORS = ("grpc", "grpc-port", "host", "port", "uds")
RAY_PATIENCE = 90.0
# The peer is gone: nothing is left to drain, and NCCL would wait for it for minutes.
LOST_PEER_PATIENCE = 10.0
# The memory guard wants this engine gone; every second costs what is left.
GUARD_PATIENCE = 2.0
# Left of the unit's stop timeout for the kill itself, so that systemd sees a clean end.
STOP_MARGIN = 5.0
# What vLLM needs to end when its last request has ended, or has had all its time.
END_SECONDS = 10.0
# nginx's group may connect; nobody else may.
SOCKET_MODE = 0o660


def config_value(text: str, key: str) -> str | None:
    """The value of a flat key of serve.yaml (our own filter writes it: one `key: value` a line), or None."""
    match = re.search(rf"^{re.escape(key)}:\s*(.+?)\s*$", text, re.MULTILINE)
    return match.group(1) if match else None


def speculation(settings: Settings, deployment: dict, tensor_parallel: int) -> list[str]:
    """`--speculative-config` for the unit's speculator."""
    if settings.speculator == "none":
        return []
    tokens = DRAFT_TOKENS[settings.speculator]
    if settings.speculator == "mtp":
        return ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": tokens})]
    drafter = deployment.get("drafter")
    if not drafter:
        raise Refusal("GLM_SPECULATOR=dflash2 but this deployment has no drafter: set glm_vllm_overlay_speculator: mtp")
    config = {
        "method": "dflash",
        "model": drafter["path"],
        "num_speculative_tokens": tokens,
        # Without it the drafter inherits the target's packed fp8 layout, for which it has no attention backend.
        "kv_cache_dtype": "auto",
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "standard",
        "draft_tensor_parallel_size": tensor_parallel,
    }
    return ["--speculative-config", json.dumps(config)]


def capture_sizes(speculator: str, config: str) -> list[str]:
    """`--cudagraph-capture-sizes`: every batch of n requests x (drafts + 1) tokens, so that decoding never leaves the
    graphs. Nothing where serve.yaml says it itself, runs eagerly, or nothing is drafted (vLLM's own sizes fit)."""
    if speculator == "none" or config_value(config, "enforce-eager") or config_value(config, "cudagraph-capture-sizes"):
        return []
    requests = int(config_value(config, "max-num-seqs") or 4)
    width = DRAFT_TOKENS[speculator] + 1
    sizes = {1, 2, 4, 8} | {count * width for count in range(1, requests + 1)}
    return ["--cudagraph-capture-sizes", *map(str, sorted(sizes))]


def command_line(paths: Paths, node: Node, settings: Settings, patience: float | None) -> list[str]:
    """vLLM's whole command line; what stands on it wins over serve.yaml. `patience`: seconds that a stop may take."""
    deployment = read_json(paths.deployment)
    try:
        config = paths.serve_yaml.read_text(encoding="utf-8")
    except OSError as error:
        raise Unusable(f"{paths.serve_yaml} cannot be read ({error.strerror}): run playbooks/serve.yml") from None
    if doors := [key for key in OTHER_DOORS if config_value(config, key) is not None]:
        raise Refusal(
            f"{paths.serve_yaml} says {doors[0]}, and the engine listens on {paths.socket} alone: take it out of "
            "glm_vllm_overlay_extra_args and run site.yml"
        )
    tensor_parallel = int(config_value(config, "tensor-parallel-size") or 1)
    command = [str(paths.venv(deployment["release"]) / "bin/vllm"), "serve", "--config", str(paths.serve_yaml)]
    command += ["--gpu-memory-utilization", str(settings.utilisation)]
    command += speculation(settings, deployment, tensor_parallel)
    command += capture_sizes(settings.speculator, config)
    if node.executor == "mp":
        command += ["--node-rank", str(node.rank)]
    if node.role == "worker":
        return [*command, "--headless"]
    # By itself vLLM aborts what runs when it is told to end.
    drain = 86400 if patience is None else max(0, int(patience - END_SECONDS))
    return [*command, "--uds", str(paths.socket), "--shutdown-timeout", str(drain)]


def ray_gpus(ray: Path, address: str) -> float:
    """The GPU resources that the Ray cluster at `address` has now; 0 while it does not answer."""
    try:
        result = subprocess.run([ray, "status", "--address", address], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return 0.0
    match = re.search(r"[\d.]+/([\d.]+) GPU\b", result.stdout)
    return float(match.group(1)) if match else 0.0


def wait_for_ray(ray: Path, address: str, peer: str, stop: threading.Event) -> None:
    """Wait until both nodes' GPUs are in the Ray cluster or a stop is asked for; raises Refusal after 90 s."""
    deadline = time.monotonic() + RAY_PATIENCE
    while (gpus := ray_gpus(ray, address)) < 2 and not stop.wait(POLL):
        if time.monotonic() >= deadline:
            raise Refusal(
                f"Ray at {address} has {gpus:.0f} GPU resources after {RAY_PATIENCE:.0f} s, not 2: "
                f"look at `systemctl status ray-worker` on {peer}"
            )


def healthy(path: Path) -> bool:
    """Whether the engine answers /health with 200 on its Unix socket."""
    connection = http.client.HTTPConnection("localhost", timeout=5)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(5)
        connection.sock.connect(str(path))
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Child:
    """vLLM, in a process group of its own."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        try:
            self.process = subprocess.Popen(command, env=environment, start_new_session=True)
        except OSError as error:
            raise Refusal(f"{command[0]} cannot be started ({error.strerror}): run site.yml for this node") from None

    def ended(self) -> str:
        """How it ended by itself, as one sentence; "" while it runs."""
        code = self.process.poll()
        if code is None:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"vLLM {how}: its last lines above say why (`journalctl -u glm-vllm-head -u glm-vllm-worker`)"

    def stop(self, patience: float | None) -> None:
        """Ask it to finish; after `patience` seconds (None: never) kill its whole group."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def bond(paths: Paths, node: Node) -> Bond:
    """The tie that this start's gate made; raises Refusal when no gate passed."""
    session = read_json_if_there(paths.session)
    start = units.show(node.gate_unit)[node.gate_unit].get("InvocationID")
    if not session.get("peer") or session.get("id") != start:
        raise Refusal(f"no gate has passed for this start: start it with `systemctl start {node.unit}`")
    return Bond(node_fabric.load(paths), session["peer"])


def stop_signal() -> threading.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def supervise(child: Child, tie: Bond, node: Node, paths: Paths, stop: threading.Event) -> str:
    """Stay until a stop is asked for (""), the engine ends or the peer is lost (one sentence)."""
    ready, before = False, release.machine_code(os.environ)
    rehearsed = read_json(paths.deployment).get("caches") is not None  # or the gate had let nobody pass
    while not stop.wait(POLL):
        if ended := child.ended():
            return ended
        if lost := tie.check(time.monotonic()):
            return lost
        # The worker has no API: it serves when the head does.
        if not ready and (healthy(paths.socket) if node.role == "head" else tie.phase == "serving"):
            if node.role == "head":
                paths.socket.chmod(SOCKET_MODE)
            ready = True
            notify("READY=1", "STATUS=serving")
            print("serving", release.compiled_since(before, os.environ, rehearsed), sep="\n", flush=True)
    return ""


def memory_reason(paths: Paths) -> str:
    """Why the memory guard ended this start, or ""."""
    kept = read_json_if_there(paths.memory_record)
    return kept["what"] if kept.get("invocation_id") == os.environ.get("INVOCATION_ID") and kept else ""


def requests_under_way(paths: Paths) -> int:
    """Connections to the engine's socket, under whatever name it goes by now: nginx opens one a request."""
    rows = (line.split() for line in read_line(paths.proc / "net/unix").splitlines())
    # 02 waits to be accepted, 03 was
    return sum(row[5] in ("02", "03") and row[7] == str(paths.socket) for row in rows if len(row) == 8)


def drain(child: Child, paths: Paths, patience: float | None) -> str:
    """End vLLM, which lets its requests end first; says in one sentence what was waited for."""
    with contextlib.suppress(FileNotFoundError):
        # Who comes now gets nginx's 503 with Retry-After; connections that are open stay so.
        paths.socket.rename(paths.socket.with_suffix(".draining"))
    number, began = requests_under_way(paths), time.monotonic()
    requests = f"{number} request" + ("" if number == 1 else "s")
    if number:
        print(f"stopping: {requests} may end, new ones are sent away", flush=True)
        notify(f"STATUS=stopping: {requests} may end")
    child.stop(patience)
    seconds = time.monotonic() - began
    if not number:
        return "stopped; no request ran"
    cut = patience is not None and seconds >= patience - END_SECONDS
    return f"stopped after {seconds:.1f} s; {requests} {'had no more time' if cut else 'ended first'}"


def stop_patience(node: Node) -> float | None:
    """How long vLLM may take to finish its requests: the unit's stop timeout less a margin; None without a timeout."""
    span = units.seconds(units.show(node.unit)[node.unit].get("TimeoutStopUSec", "infinity"))
    return None if span is None else max(1.0, span - STOP_MARGIN)


def child_environment(node: Node, address: str) -> dict[str, str]:
    """This unit's environment for vLLM, without what systemd addresses to this process."""
    ours = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    if node.executor == "ray":
        environment["RAY_ADDRESS"] = f"{address}:{node.ray_port}"
    return environment


def describe(paths: Paths, node: Node, settings: Settings) -> None:
    """One line a fact, for the journal."""
    deployment = read_json(paths.deployment)
    print(f"release {deployment['release']}")
    print(f"model {state.weights(deployment['model'])}")
    print(f"executor {node.executor}")
    print(f"speculator {settings.speculator}")
    print(f"ablation {'on' if settings.ablation else 'off'}")
    print(f"utilisation {settings.utilisation}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`glm-vllm serve` has no arguments of its own: its unit's environment says it all."""


def run(args: argparse.Namespace) -> int:
    """`glm-vllm serve`: exit 0 after a stop that was asked for, 1 with one sentence otherwise."""
    paths = node_paths.current()
    node = Node.load(paths)
    settings = Settings.parse(os.environ)
    if node.executor == "ray" and node.role == "worker":
        raise Unusable("under executor ray the worker runs `glm-vllm hold`, not serve: run playbooks/serve.yml")
    patience = stop_patience(node)
    command = command_line(paths, node, settings, patience)
    tie, stop = bond(paths, node), stop_signal()
    describe(paths, node, settings)
    address = tie.fabric.rails[0].address
    try:
        if node.executor == "ray":
            notify("STATUS=waiting for Ray")
            wait_for_ray(Path(command[0]).with_name("ray"), f"{address}:{node.ray_port}", tie.fabric.peer, stop)
        if stop.is_set():
            return 0
        # A socket that an earlier engine left would be answered by nobody.
        paths.socket.unlink(missing_ok=True)
        notify("STATUS=loading")
        child = Child(command, child_environment(node, address))
        lost = supervise(child, tie, node, paths, stop)
    except Refusal as error:
        notify(f"STATUS={error}")
        raise
    memory = memory_reason(paths)
    if reason := memory or lost:
        notify(f"STATUS={reason}")
        child.stop(GUARD_PATIENCE if memory else LOST_PEER_PATIENCE)
        raise Refusal(reason)
    notify("STOPPING=1", "STATUS=stopping")
    if node.role == "head":
        message = drain(child, paths, patience)
    else:
        # Requests are the head's. Rank 1 by itself has none, and would wait for collectives that never come.
        child.stop(LOST_PEER_PATIENCE)
        message = "stopped"
    print(json.dumps({"schema": 1, "ok": True, "message": message}) if args.json else message)
    return 0
