"""`glm-vllm serve` and `hold`: the command line, and real children that end, hang, or outlive their peer."""

import errno
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from glm_vllm_overlay.node import fabric, hold, notify, serve
from glm_vllm_overlay.node import peer as node_peer
from glm_vllm_overlay.node.errors import Refusal
from glm_vllm_overlay.node.paths import Paths
from glm_vllm_overlay.node.settings import Node, Settings

# Says how it was started, then lives as the test wants it to.
VLLM = (
    f"#!{sys.executable} -S\n"
    + """import json, os, pathlib, signal, socket, subprocess, sys, time
root = pathlib.Path(os.environ["GLM_ROOT"])
mode = (root / "mode").read_text() if (root / "mode").exists() else "head"
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen(["sleep", "300"])
    (root / "helper").write_text(str(helper.pid))
story = {"argv": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid()}
(root / "draft").write_text(json.dumps(story))
(root / "draft").rename(root / "started")
if mode == "ends":
    sys.exit(7)
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if "--uds" in sys.argv:
    door = socket.socket(socket.AF_UNIX)
    door.bind(sys.argv[sys.argv.index("--uds") + 1])
    door.listen()
    if mode == "drains":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        caller = door.accept()[0]
        if b"/health" not in caller.recv(4096):
            caller.recv(4096)
            sys.exit(0)
        status = "503 not yet" if (root / "unhealthy").exists() else "200 OK"
        caller.sendall(f"HTTP/1.1 {status}\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n".encode())
        caller.close()
time.sleep(300)
"""
)


@pytest.fixture(autouse=True)
def unit(node, monkeypatch):
    """A start of glm-vllm-head whose gate has passed; all patience is short."""
    for key, value in (("GLM_GPU_MEMORY_UTILIZATION", "0.87"), ("GLM_SPECULATOR", "dflash2"), ("ABLIT", "0")):
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(serve, "POLL", 0.03)
    monkeypatch.setattr(hold, "POLL", 0.03)
    monkeypatch.setattr(serve, "LOST_PEER_PATIENCE", 0.5)
    monkeypatch.setattr(node_peer, "DOWN_GRACE", 0.2)
    monkeypatch.setattr(node_peer, "SILENCE_GRACE", 0.4)
    node.program(node.root / "opt/glm-vllm/releases/r1/venv/bin/vllm", VLLM)
    node.session()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """The service manager's end of the notification socket; gives the list of messages so far."""
    path = str(tmp_path / "notify")
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    channel.bind(path)
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    messages: list[str] = []

    def read() -> list[str]:
        channel.setblocking(False)
        while True:
            try:
                messages.extend(channel.recv(4096).decode().splitlines())
            except BlockingIOError:
                return messages

    yield read
    channel.close()


def started(node) -> dict:
    return json.loads((node.root / "started").read_text())


def when(condition, action) -> threading.Thread:
    """Do `action` in the background as soon as `condition` holds (at most 10 s later)."""

    def watcher() -> None:
        deadline = time.monotonic() + 10
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=watcher, daemon=True)
    thread.start()
    return thread


def running(node):
    return lambda: (node.root / "started").exists()


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


# ---- the command line ----


def line(node, speculator="dflash2", patience=130.0, **env) -> list[str]:
    node.env(**env)
    paths = Paths(node.root)
    return serve.command_line(paths, Node.load(paths), Settings(0.87, speculator), patience)[1:]


@pytest.mark.parametrize("door", ["grpc: true", "grpc-port: 50051", "host: 0.0.0.0", "port: 8000", "uds: /tmp/x"])
def test_there_is_no_other_door(node, door):
    """What somebody wrote into serve.yaml by hand; the role renders none of these."""
    node.deploy(f"max-num-seqs: 4\n{door}\n")
    with pytest.raises(Refusal, match=rf"says {door.split(':')[0]}, and the engine listens on .*/api.sock alone"):
        line(node)


def test_head_with_dflash2(node):
    words = line(node)
    config = str(node.root / "etc/glm-vllm/serve.yaml")
    assert words[:6] == ["serve", "--config", config, "--gpu-memory-utilization", "0.87", "--speculative-config"]
    assert json.loads(words[6]) == {
        "method": "dflash",
        "model": str(node.root / "var/lib/glm-vllm/models/drafter/rev1"),
        "num_speculative_tokens": 7,
        "kv_cache_dtype": "auto",
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "standard",
        "draft_tensor_parallel_size": 2,
    }
    assert words[7:] == [
        "--cudagraph-capture-sizes",
        "1",
        "2",
        "4",
        "8",
        "16",
        "24",
        "32",
        "--node-rank",
        "0",
        "--uds",
        str(node.root / "run/glm-vllm/api.sock"),
        "--shutdown-timeout",
        "120",
    ]


def test_worker_with_mtp(node):
    words = line(node, "mtp", GLM_ROLE="worker", GLM_NODE_RANK=1)
    assert words[5:7] == ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}']
    assert words[7:] == [
        "--cudagraph-capture-sizes",
        "1",
        "2",
        "3",
        "4",
        "6",
        "8",
        "9",
        "12",
        "--node-rank",
        "1",
        "--headless",
    ]


def test_without_speculation(node):
    assert line(node, "none")[5:-2] == ["--node-rank", "0", "--uds", str(node.root / "run/glm-vllm/api.sock")]


@pytest.mark.parametrize(("patience", "drain"), [(10.0, "0"), (1.0, "0"), (11.5, "1"), (None, "86400")])
def test_running_requests_have_what_the_unit_s_stop_leaves_them(node, patience, drain):
    assert line(node, patience=patience)[-2:] == ["--shutdown-timeout", drain]


def test_ray_names_no_rank(node):
    assert "--node-rank" not in line(node, GLM_EXECUTOR="ray")


@pytest.mark.parametrize("key", ["enforce-eager: true", "cudagraph-capture-sizes: [1]"])
def test_serve_yaml_may_decide_about_graphs(node, key):
    node.deploy(f"max-num-seqs: 4\n{key}\n")
    assert "--cudagraph-capture-sizes" not in line(node)


@pytest.mark.parametrize("requests", [1, 5, 16])
def test_graphs_for_every_number_of_requests(node, requests):
    node.deploy(f"max-num-seqs: {requests}\n")
    words = line(node)
    sizes = set(map(int, words[words.index("--cudagraph-capture-sizes") + 1 : words.index("--node-rank")]))
    assert {count * 8 for count in range(1, requests + 1)} <= sizes


# ---- refusals before anything starts ----


def test_a_word_for_ablation_is_refused(node, glm_vllm, monkeypatch):
    monkeypatch.setenv("ABLIT", "yes")
    code, _, err = glm_vllm("serve")
    assert code == 2
    assert "ABLIT=yes is neither 0 nor 1: set glm_vllm_overlay_ablation_enabled" in err


@pytest.mark.parametrize("session", [None, "another start", "no peer yet"])
def test_no_start_without_a_gate(node, peer, glm_vllm, session):
    if session is None:
        (node.root / "run/glm-vllm/session.json").unlink()
    elif session == "another start":
        node.session(id="yesterday")
    else:
        node.session(peer=None)
    code, _, err = glm_vllm("serve")
    assert code == 1
    assert "no gate has passed for this start" in err
    assert not (node.root / "started").exists()


def test_missing_engine(node, peer, glm_vllm):
    (node.root / "opt/glm-vllm/releases/r1/venv/bin/vllm").unlink()
    code, _, err = glm_vllm("serve")
    assert code == 1
    assert "bin/vllm cannot be started" in err


def test_dflash2_without_a_drafter(node, peer, glm_vllm):
    node.deploy("a: 1\n", drafter=None)
    code, _, err = glm_vllm("serve")
    assert code == 1
    assert "set glm_vllm_overlay_speculator: mtp" in err


# ---- the engine's life ----


def test_serves_and_stops_when_asked(node, peer, glm_vllm, manager):
    stale = node.root / "run/glm-vllm/api.sock"
    stale.write_text("left by an earlier engine")
    stopping = when(lambda: "READY=1" in manager(), ask_to_stop)
    code, out, _ = glm_vllm("serve")
    stopping.join()
    assert code == 0
    assert out.splitlines() == [
        "release r1",
        "model target@rev1",
        "executor mp",
        "speculator dflash2",
        "ablation off",
        "utilisation 0.87",
        "serving",
        "compiled nothing at this start",
        "stopped; no request ran",
    ]
    assert manager() == ["STATUS=loading", "READY=1", "STATUS=serving", "STOPPING=1", "STATUS=stopping"]
    left = stale.with_suffix(".draining")
    assert not stale.exists() and left.is_socket()
    assert left.stat().st_mode & 0o777 == 0o660
    assert not alive(started(node)["pid"])


def test_says_what_was_compiled_although_it_should_have_been_there(node, peer, glm_vllm, manager, monkeypatch):
    """A library made anew counts, one that was there does not, and neither do other files."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(node.root / "triton"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(node.root / "modules"))
    for file in ("triton/there.cubin", "modules/topk/topk.so"):
        (node.root / file).parent.mkdir(parents=True)
        (node.root / file).write_bytes(b"code")
    (node.root / "triton/draft.cubin").symlink_to("gone")  # as a file that goes away between being seen and looked at
    (node.root / "unhealthy").touch()

    def compile_and_become_healthy() -> None:
        (node.root / "triton/new.cubin").write_bytes(b"code")
        (node.root / "triton/new.json").write_text("{}")
        (node.root / "modules/topk/topk.so").write_bytes(b"other")
        (node.root / "unhealthy").unlink()

    when(lambda: "STATUS=loading" in manager() and (node.root / "started").exists(), compile_and_become_healthy)
    when(lambda: "READY=1" in manager(), ask_to_stop)
    assert glm_vllm("serve")[1].splitlines()[-2] == (
        "compiled 2 modules at this start, which the next one will find: "
        f"{node.root}/modules/topk/topk.so, {node.root}/triton/new.cubin"
    )


def test_after_a_rehearsal_a_start_that_compiles_is_a_warning(node, peer, glm_vllm, manager, monkeypatch):
    node.deploy((node.root / "etc/glm-vllm/serve.yaml").read_text(), caches="/var/cache/glm-vllm/r1-0123abcd")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(node.root))
    (node.root / "unhealthy").touch()

    def compile_and_become_healthy() -> None:
        (node.root / "new.cubin").write_bytes(b"code")
        (node.root / "unhealthy").unlink()

    when(running(node), compile_and_become_healthy)
    when(lambda: "READY=1" in manager(), ask_to_stop)
    said = glm_vllm("serve")[1].splitlines()[-2]
    assert said.startswith("WARNING: compiled 1 modules at this start, which the next one will find: ")
    assert said.endswith("new.cubin (the rehearsal had not met them: please report it)")


def test_the_engine_sees_its_units_environment_but_not_its_manager(node, peer, glm_vllm, manager, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv("VLLM_HOST_IP", "192.0.2.11")
    when(running(node), ask_to_stop)
    glm_vllm("serve")
    environment = started(node)["environment"]
    assert environment["VLLM_HOST_IP"] == "192.0.2.11"
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "RAY_ADDRESS"} & set(environment)


def test_not_ready_before_health(node, peer, glm_vllm, manager):
    (node.root / "unhealthy").touch()
    when(running(node), lambda: (time.sleep(0.4), ask_to_stop()))
    assert glm_vllm("serve")[0] == 0
    assert "READY=1" not in manager()


@pytest.mark.parametrize(("mode", "said"), [("ends", "vLLM ended with exit code 7"), ("killed", "killed by SIGKILL")])
def test_an_engine_that_ends_ends_the_unit(node, peer, glm_vllm, manager, mode, said):
    (node.root / "mode").write_text(mode)
    code, _, err = glm_vllm("serve")
    assert code == 1
    assert said in err
    assert any(message.startswith("STATUS=vLLM") for message in manager())


def test_a_worker_has_nothing_to_drain(node, peer, glm_vllm, monkeypatch):
    node.env(GLM_ROLE="worker", GLM_NODE_RANK=1)
    node.unit("glm-vllm-worker")
    monkeypatch.setattr(serve, "LOST_PEER_PATIENCE", 0.5)
    (node.root / "mode").write_text("stubborn")
    when(running(node), ask_to_stop)
    began = time.monotonic()
    assert glm_vllm("serve")[0] == 0
    assert time.monotonic() - began < 20, "the unit's stop timeout is 130 s"
    assert not alive(started(node)["pid"])


def test_a_stubborn_engine_is_killed_with_its_helpers(node, peer, glm_vllm):
    (node.root / "mode").write_text("stubborn")
    node.unit("glm-vllm-head", TimeoutStopUSec="5s 500ms")
    when(running(node), ask_to_stop)
    began = time.monotonic()
    assert glm_vllm("serve")[0] == 0
    assert 1.0 <= time.monotonic() - began < 5.5, "the stop timeout less the margin, at least 1 s"
    assert not alive(started(node)["pid"])
    helper, deadline = int((node.root / "helper").read_text()), time.monotonic() + 10
    while alive(helper):  # its death is the kernel's to carry out
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("span", "ending", "said"),
    [("20s", True, r"ended first"), ("8s", False, r"had no more time"), ("infinity", True, r"ended first")],
)
def test_a_stop_lets_requests_end_and_takes_no_new_ones(node, peer, glm_vllm, manager, monkeypatch, span, ending, said):
    """Who asks meanwhile finds no socket, which nginx words as 503; the last word says what was waited for."""
    monkeypatch.setattr(serve, "END_SECONDS", 2.0)
    (node.root / "proc/net").mkdir()
    (node.root / "proc/net/unix").symlink_to("/proc/net/unix")
    (node.root / "mode").write_text("drains")
    node.unit("glm-vllm-head", TimeoutStopUSec=span)
    path, client, late = node.root / "run/glm-vllm/api.sock", socket.socket(socket.AF_UNIX), []

    def request() -> None:
        client.connect(str(path))
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        ask_to_stop()
        when(lambda: any("may end" in each for each in manager()), come_late)

    def come_late() -> None:
        with socket.socket(socket.AF_UNIX) as other:
            late.append(other.connect_ex(str(path)))
        time.sleep(0.3)
        if ending:
            client.close()

    when(lambda: "READY=1" in manager(), request)
    try:
        code, out, _ = glm_vllm("serve")
    finally:
        client.close()
    assert code == 0
    assert out.splitlines()[-2] == "stopping: 1 request may end, new ones are sent away"
    assert re.fullmatch(rf"stopped after \d+\.\d s; 1 request {said}", out.splitlines()[-1])
    assert late == [errno.ENOENT]
    assert "STATUS=stopping: 1 request may end" in manager()


def test_the_memory_guard_s_word_is_the_start_s_last(node, peer, glm_vllm, manager, monkeypatch):
    """Fails when an engine that the guard ended looks like one that someone stopped."""
    monkeypatch.setenv("INVOCATION_ID", "own-start")
    record = {"invocation_id": "own-start", "what": "the memory guard ended the engine: 0.9 GiB"}
    (node.root / "var/lib/glm-vllm/watch").mkdir(exist_ok=True)
    (node.root / "var/lib/glm-vllm/watch/memory.json").write_text(json.dumps(record))
    when(lambda: "READY=1" in manager(), ask_to_stop)
    code, _, err = glm_vllm("serve")
    assert code == 1 and err == f"glm-vllm serve: {record['what']}\n"
    assert f"STATUS={record['what']}" in manager()
    assert not alive(started(node)["pid"])


def restarted(document: dict) -> None:
    document["session"]["id"] = "another-start"


PEER_LOSSES = [
    (restarted, "glm-vllm-worker on spark-b was started anew: back to the gate to start together with it"),
    (lambda document: document.update(phase="stopped"), "glm-vllm-worker on spark-b is stopped: back to the gate"),
    (lambda document: document.update(phase="failed"), "glm-vllm-worker on spark-b has failed: back to the gate"),
]


@pytest.mark.parametrize(("loss", "sentence"), PEER_LOSSES)
def test_the_peers_end_is_this_nodes_end(node, peer, glm_vllm, manager, loss, sentence):
    peer.document["phase"] = "serving"
    when(lambda: "READY=1" in manager(), lambda: loss(peer.document))
    code, _, err = glm_vllm("serve")
    assert code == 1
    assert err.startswith(f"glm-vllm serve: {sentence}")
    assert f"STATUS={err.removeprefix('glm-vllm serve: ').strip()}" in manager()
    assert not alive(started(node)["pid"])


def test_a_silent_peer_is_this_nodes_end(node, peer, glm_vllm, manager):
    when(lambda: "READY=1" in manager(), lambda: setattr(peer.door, "peers", set()))
    code, _, err = glm_vllm("serve")
    assert code == 1
    assert "spark-b has not answered on the fabric for" in err


@pytest.mark.parametrize("change", [{"phase": "stopping"}, {"phase": "gate"}, {"phase": "loading"}])
def test_a_peer_that_drains_or_loads_is_not_lost(node, peer, glm_vllm, manager, change):
    when(running(node), lambda: (peer.document.update(change), time.sleep(0.6), ask_to_stop()))
    assert glm_vllm("serve")[0] == 0


def test_a_short_absence_is_not_a_loss(node, peer, glm_vllm, monkeypatch):
    monkeypatch.setattr("glm_vllm_overlay.node.peer.DOWN_GRACE", 5.0)

    def blink() -> None:
        for phase in ("failed", "serving") * 4:
            peer.document["phase"] = phase
            time.sleep(0.1)
        ask_to_stop()

    when(running(node), blink)
    assert glm_vllm("serve")[0] == 0


def test_grace_is_counted_from_the_last_good_answer(peer, node):
    tie = peer_tie(node)
    peer.document["phase"] = "failed"
    assert tie.check(0.0) == ""
    peer.document["phase"] = "serving"
    assert tie.check(0.19) == ""
    peer.document["phase"] = "failed"
    assert tie.check(0.2) == ""
    assert tie.check(0.39) == ""
    assert "has failed" in tie.check(0.4)


def peer_tie(node) -> node_peer.Bond:
    return node_peer.Bond(fabric.load(Paths(node.root)), "peer-start")


def test_the_real_patience_is_what_the_contract_says(monkeypatch):
    monkeypatch.undo()
    assert (node_peer.POLL, node_peer.DOWN_GRACE, node_peer.SILENCE_GRACE) == (2.0, 10.0, 30.0)


# ---- the worker ----


def test_the_worker_serves_when_the_head_does(node, peer, glm_vllm, manager):
    node.env(GLM_ROLE="worker", GLM_NODE_RANK=1)
    node.unit("glm-vllm-worker")
    peer.document["phase"] = "loading"
    when(running(node), lambda: (time.sleep(0.3), peer.document.update(phase="serving")))
    seen_early = []
    when(lambda: (node.root / "started").exists(), lambda: seen_early.extend(manager()))
    when(lambda: "READY=1" in manager(), ask_to_stop)
    assert glm_vllm("serve")[0] == 0
    assert "READY=1" not in seen_early
    assert "READY=1" in manager()
    assert "--headless" in started(node)["argv"]


# ---- Ray ----

RAY = """#!/bin/sh
[ "$1 $2" = "status --address" ] || exit 2
echo "$3" > "$GLM_ROOT/ray-asked"
cat "$GLM_ROOT/ray-status"
"""


@pytest.fixture
def ray(node, monkeypatch):
    """A Ray head with as many GPU resources as the test says."""
    node.env(GLM_EXECUTOR="ray", GLM_RAY_PORT=6380)
    node.unit("ray-head")
    node.program(node.root / "opt/glm-vllm/releases/r1/venv/bin/ray", RAY)
    monkeypatch.setattr(serve, "RAY_PATIENCE", 0.3)

    def gpus(count: float) -> None:
        node.put("ray-status", RAY_STATUS.replace("@", f"{count:.1f}"))

    return gpus


RAY_STATUS = """======== Autoscaler status: 2026-11-30 17:36:33 ========
Resources
---------------------------------------------------------------
Total Usage:
 0.0/4.0 CPU
 0.0/@ GPU
 0B/5.00GiB memory
"""


def test_ray_head_waits_for_two_gpus(node, peer, ray, glm_vllm, monkeypatch):
    monkeypatch.setattr(serve, "RAY_PATIENCE", 10)
    ray(1)
    when(lambda: (node.root / "ray-asked").exists(), lambda: ray(2))
    when(running(node), ask_to_stop)
    assert glm_vllm("serve")[0] == 0
    address = f"{node.address}:6380"
    assert (node.root / "ray-asked").read_text().strip() == address
    assert started(node)["environment"]["RAY_ADDRESS"] == address
    assert not {"--node-rank", "--headless"} & set(started(node)["argv"])


def test_ray_without_the_worker(node, peer, ray, glm_vllm):
    ray(1)
    code, _, err = glm_vllm("serve")
    assert code == 1
    assert re.search(r"Ray at \S+:6380 has 1 GPU resources after .* s, not 2", err)
    assert "`systemctl status ray-worker` on spark-b" in err


def test_a_stop_while_waiting_for_ray(node, peer, ray, glm_vllm, monkeypatch):
    monkeypatch.setattr(serve, "RAY_PATIENCE", 30)
    ray(0)
    when(lambda: (node.root / "ray-asked").exists(), ask_to_stop)
    assert glm_vllm("serve")[0] == 0
    assert not (node.root / "started").exists()


def test_the_worker_holds_under_ray(node, peer, glm_vllm, manager):
    node.env(GLM_EXECUTOR="ray", GLM_ROLE="worker")
    node.unit("ray-worker")
    assert "run playbooks/serve.yml" in glm_vllm("serve")[2]
    peer.document["phase"] = "serving"
    when(lambda: "READY=1" in manager(), ask_to_stop)
    code, out, _ = glm_vllm("hold")
    assert (code, out.splitlines()) == (0, ["serving", "stopped"])
    assert manager()[:2] == ["STATUS=loading", "READY=1"]


def test_hold_ends_with_the_local_ray(node, peer, glm_vllm):
    node.env(GLM_EXECUTOR="ray", GLM_ROLE="worker")
    node.unit("ray-worker")
    calls = iter(range(100))
    when(lambda: next(calls) > 5, lambda: node.unit("ray-worker", ActiveState="failed"))
    code, _, err = glm_vllm("hold")
    assert code == 1
    assert "ray-worker is failed: back to the gate" in err


@pytest.mark.parametrize(("loss", "sentence"), PEER_LOSSES)
def test_hold_ends_with_the_peer(node, peer, glm_vllm, manager, loss, sentence):
    node.env(GLM_EXECUTOR="ray", GLM_ROLE="worker")
    node.unit("ray-worker")
    peer.document["phase"] = "serving"
    when(lambda: "READY=1" in manager(), lambda: loss(peer.document))
    code, _, err = glm_vllm("hold")
    assert code == 1
    assert sentence in err


def test_no_manager_no_message(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify.notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "/no/such/socket")
    notify.notify("READY=1")
