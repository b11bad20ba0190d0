"""`glm-vllm watch`: whom it answers, what it says, and which ends of the engine are incidents."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time

import pytest
from glm_vllm_overlay.node import state, watch
from glm_vllm_overlay.node.paths import Paths


def ask(address: str, source: str, path: str = "/v1/state", method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, state.PORT, timeout=5, source_address=(source, 0))
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def ask_until_known(address: str, source: str) -> tuple[int, bytes]:
    deadline = time.monotonic() + 10
    while True:
        try:
            status, body = ask(address, source)
            if status != 503:
                return status, body
        except OSError:
            pass
        assert time.monotonic() < deadline, "the watch never answered"
        time.sleep(0.05)


@pytest.fixture
def watching(node, tmp_path):
    """A real watch under a stand-in for the service manager; gives the manager's socket."""
    path = str(tmp_path / "notify")
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(path)
    manager.settimeout(10)
    process = node.start("watch", NOTIFY_SOCKET=path, WATCHDOG_USEC="30000000")
    yield manager
    process.terminate()
    assert process.wait(10) == 0
    process.communicate()
    manager.close()


def test_the_peer_gets_the_whole_document(node, watching):
    status, body = ask_until_known(node.address, node.peer)
    document = json.loads(body)
    assert status == 200
    assert set(document) == {
        "schema", "node", "role", "time", "release", "release_sha256", "config_sha256", "chat_template_sha256",
        "environment", "model",
        "model_verified", "drafter", "transfer",
        "executor", "memory", "phase", "unit", "session", "rank", "fabric", "incident",
    }  # fmt: skip
    assert document["schema"] == 1
    assert (document["node"], document["role"], document["executor"]) == ("spark-a", "head", "mp")
    assert (document["release"], document["model"], document["drafter"]) == ("r1", "target@rev1", "drafter@rev1")
    assert document["model_verified"] is True
    assert document["phase"] == "serving"
    assert document["environment"]["GLM_GPU_MEMORY_UTILIZATION"] == "0.87"
    memory = {"total": 127535084, "available": 119500000, "free": 118000000}
    assert document["memory"] == {name: size * 1024 for name, size in memory.items()}
    assert [rail["address"] for rail in document["fabric"]["rails"]] == [node.address]
    assert len(document["config_sha256"]) == len(document["release_sha256"]) == 64


def test_nobody_else_is_answered(node, watching):
    ask_until_known(node.address, node.peer)
    for stranger in ("127.0.0.1", node.address):
        status, body = ask(node.address, stranger)
        assert status == 403
        assert b"schema" not in body


def test_there_is_nothing_else_to_ask(node, watching):
    ask_until_known(node.address, node.peer)
    assert ask(node.address, node.peer, "/")[0] == 404
    assert ask(node.address, node.peer, "/v1/state/../../etc/passwd")[0] == 404
    assert ask(node.address, node.peer, method="POST")[0] == 501


def test_ready_and_watchdog(node, watching):
    assert b"READY=1" in watching.recv(4096)
    assert watching.recv(4096) == b"WATCHDOG=1"
    assert watching.recv(4096) == b"WATCHDOG=1"


def test_an_unknown_state_is_503_not_an_old_answer(node, watching):
    ask_until_known(node.address, node.peer)
    (node.root / "etc/glm-vllm/node.env").unlink()
    deadline = time.monotonic() + 10
    while ask(node.address, node.peer)[0] != 503:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_secret_is_in_the_document(node):
    secret = "sk-very-secret"
    node.unit("glm-vllm-head", Environment=f"GLM_SPECULATOR=mtp HF_TOKEN={secret} ABLIT=0")
    (node.root / "etc/glm-vllm/api-keys").write_text(secret)
    assert secret not in json.dumps(state.own(Paths(node.root)))


def test_binds_before_the_address_is_there():
    watch.Door("192.0.2.77", set(), None).server_close()


def test_a_taken_port_is_a_sentence(node, glm_vllm, peer):
    node.fabric("none", [(node.peer, node.address)])
    code, _, err = glm_vllm("watch")
    assert code == 2
    assert f"{node.peer} port {state.PORT} cannot be listened on" in err


# ---- phases ----


@pytest.mark.parametrize(
    ("active", "sub", "phase"),
    [
        ("inactive", "dead", "stopped"),
        ("activating", "start-pre", "gate"),
        ("activating", "start", "loading"),
        ("active", "running", "serving"),
        ("deactivating", "stop-sigterm", "stopping"),
        ("failed", "failed", "failed"),
        ("activating", "auto-restart", "failed"),
    ],
)
def test_phase_under_mp(node, active, sub, phase):
    node.unit("glm-vllm-head", ActiveState=active, SubState=sub)
    assert state.own(Paths(node.root))["phase"] == phase


def test_phase_under_ray_starts_at_rays_gate(node):
    node.env(GLM_EXECUTOR="ray")
    node.unit("glm-vllm-head", ActiveState="inactive", SubState="dead")
    node.unit("ray-head", ActiveState="activating", SubState="start-pre", InvocationID="ray-start")
    document = state.own(Paths(node.root))
    assert (document["phase"], document["session"]["id"]) == ("gate", "ray-start")


def test_a_drop_in_is_seen_and_a_running_start_keeps_what_it_was_given(node):
    node.unit("glm-vllm-head", Environment='GLM_GPU_MEMORY_UTILIZATION=0.80 GLM_SPECULATOR=mtp "OTHER=a b" ABLIT=0')
    seen = {"GLM_GPU_MEMORY_UTILIZATION": "0.80", "GLM_SPECULATOR": "mtp", "ABLIT": "0"}
    given = {"GLM_GPU_MEMORY_UTILIZATION": "0.87", "GLM_SPECULATOR": "dflash2", "ABLIT": "0"}
    assert state.own(Paths(node.root))["environment"] == seen
    node.session(environment=given)
    assert state.own(Paths(node.root))["environment"] == given


@pytest.mark.parametrize("active", ["inactive", "failed"])
def test_a_session_ends_with_its_unit(node, active):
    node.session(environment={"GLM_SPECULATOR": "none"})
    node.unit("glm-vllm-head", ActiveState=active, SubState="dead")
    document = state.own(Paths(node.root))
    assert (document["session"]["ready"], document["session"]["peer"]) == (False, None)
    assert document["environment"]["GLM_SPECULATOR"] == "dflash2"


@pytest.mark.parametrize(
    ("properties", "outcome"),
    [
        ({}, ""),
        ({"Result": "exit-code", "StatusText": "vLLM ended with exit code 7"}, "vLLM ended with exit code 7"),
        ({"Result": "signal", "ExecMainStatus": "9"}, "systemd ended it: result signal, status 9"),
        (
            {"Result": "exit-code", "StatusText": "", "ExecMainStatus": "3"},
            "systemd ended it: result exit-code, status 3",
        ),
    ],
)
def test_outcome(node, properties, outcome):
    node.unit("glm-vllm-head", **properties)
    assert state.own(Paths(node.root))["unit"]["outcome"] == outcome


def test_cpu_seconds_count_descendants_only(node):
    node.root.joinpath("proc/meminfo").rename(node.root / "meminfo")
    node.env(GLM_MEMINFO=node.root / "meminfo")
    for folder in ("proc/sys/vm/drop_caches", "proc/sys/vm", "proc/sys", "proc"):
        path = node.root / folder
        path.rmdir() if path.is_dir() else path.unlink()
    (node.root / "proc").symlink_to("/proc")
    busy = "end=__import__('time').process_time()+0.3\nwhile __import__('time').process_time()<end: pass\ninput()"
    shell = subprocess.Popen(["sh", "-c", '"$1" -c "$0"; true', busy, sys.executable], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 20
        while state.cpu_seconds({shell.pid}, Paths(node.root).proc) < 0.3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert state.cpu_seconds({2**22 + 1}, Paths(node.root).proc) == 0
        everything = state.cpu_seconds({os.getpid()}, Paths(node.root).proc)
        assert state.cpu_seconds({os.getpid(), shell.pid}, Paths(node.root).proc) < everything + 0.3, (
            "nothing counts twice"
        )
    finally:
        shell.communicate(b"\n")


@pytest.mark.parametrize("damage", ["flag missing", "manifest changed", "no manifest"])
def test_verified_means_this_manifest(node, damage):
    folder = node.root / "var/lib/glm-vllm/models/target/rev1"
    assert state.own(Paths(node.root))["model_verified"] is True
    if damage == "flag missing":
        (folder / ".verified.json").unlink()
    elif damage == "manifest changed":
        (folder / "manifest.json").write_text('{"files": {}}')
    else:
        (folder / "manifest.json").unlink()
    assert state.own(Paths(node.root))["model_verified"] is False


# ---- incidents ----

CLOCK = 1_800_000_000.0


def look(phase: str, start: str = "a", restarts: int = 0, outcome: str = "") -> dict:
    unit = {"name": "glm-vllm-head", "invocation_id": start, "restarts": restarts, "outcome": outcome}
    return {"phase": phase, "unit": unit}


def follow(node, *looks: dict) -> dict | None:
    """Show a watch each state, a second apart; returns the incident it stored."""
    incidents = watch.Incidents(Paths(node.root))
    for second, document in enumerate(looks):
        incidents.look(document, CLOCK + second)
    path = node.root / "var/lib/glm-vllm/watch/incident.json"
    return json.loads(path.read_text()) if path.exists() else None


LOST = "glm-vllm-worker on spark-b is stopped"


def test_a_crash_is_an_incident_until_it_serves_again(node, capsys):
    open_incident = follow(node, look("serving"), look("failed", outcome=LOST), look("gate", "b", 1))
    assert open_incident == {"schema": 1, "when": "2027-01-15T08:00:01+00:00", "what": LOST, "seconds": None}
    assert capsys.readouterr().out.splitlines() == [f"incident: glm-vllm-head left service: {LOST}"]
    # A watch that was restarted meanwhile closes it.
    assert follow(node, look("loading", "b", 1), look("loading", "b", 1), look("serving", "b", 1))["seconds"] == 1


def test_a_restart_by_systemd_between_two_looks_is_an_incident(node):
    assert (
        follow(node, look("serving"), look("gate", "b", 1))["what"] == "the engine ended and systemd started it again"
    )
    assert follow(node, look("serving"), look("serving", "b", 1))["seconds"] == 0


@pytest.mark.parametrize(
    "looks",
    [
        [look("gate"), look("loading"), look("serving")],
        [look("gate"), look("failed", outcome="needs 10 GiB, has 9")],
        [look("serving"), look("stopping"), look("stopped")],
        [look("serving"), look("stopped")],
        [look("serving", restarts=3), look("stopping"), look("gate", "b", 0), look("serving", "b", 0)],
        [look("serving"), look("gate", "b", 0)],
    ],
)
def test_what_someone_wanted_or_what_never_served_is_none(node, looks):
    assert follow(node, *looks) is None


def test_a_full_disk_does_not_end_the_watch(node, capsys):
    home = node.root / "var/lib/glm-vllm"
    home.rename(node.root / "gone")
    incidents = watch.Incidents(Paths(node.root))
    incidents.look(look("serving"), CLOCK)
    incidents.look(look("failed", outcome=LOST), CLOCK + 1)
    assert "incident.json cannot be written" in capsys.readouterr().out


def test_cpu_seconds_see_less_than_a_tick_in_a_thread_that_has_ended(node):
    """One short answer of a small model costs rank 1 a few milliseconds, and /proc/<pid>/stat counts in tens."""
    busy = """
import sys, threading, time
def work():
    end = time.thread_time() + 0.002
    while time.thread_time() < end: pass
for line in sys.stdin:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print(flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as child:
        seen = []
        for _ in range(5):
            child.stdin.write(b"\n")
            child.stdout.readline()
            seen.append(state.cpu_seconds({child.pid}, Paths(node.root).proc))
        child.stdin.close()
    steps = [after - before for before, after in zip(seen, seen[1:], strict=False)]
    assert all(0.0019 < step < 0.2 for step in steps), seen
