"""What stands and runs on the two nodes of a pair that serves (executor mp).

Run by `make test` after its converge, and by molecule's scenario `pair` after its own.
"""

from __future__ import annotations

import json
import shlex

import bed
import pair
import pytest
from testinfra.host import Host

PEER = {bed.HEAD: bed.WORKER, bed.WORKER: bed.HEAD}
STATE = "http://{}:8890/v1/state"
SEEK = """
import pathlib, subprocess, sys
key = "".join(sys.argv[1:]).encode()
if key in subprocess.run(["journalctl", "--output=export"], capture_output=True, check=True).stdout:
    print("journal")
tops = ("/etc", "/var/lib/glm-vllm", "/var/log", "/run/systemd", "/run/glm-vllm", "/tmp", "/root", "/home")
files = [path for top in tops for path in pathlib.Path(top).rglob("*")]
files += [path for name in ("cmdline", "environ") for path in pathlib.Path("/proc").glob(f"[0-9]*/{name}")]
for path in files:
    try:
        if path.is_file() and "/models/" not in str(path) and key in path.read_bytes():
            print(path)
    except OSError:
        continue
"""


def name(node: Host) -> str:
    return node.check_output("hostname")


def unit(node: Host) -> str:
    return pair.UNITS[name(node)]


def document(node: Host, path: str) -> dict:
    return json.loads(node.file(path).content_string)


def status_of(node: str, url: str) -> str:
    """HTTP status of a GET made on a node, or "" on the controller; 000 when nobody answers."""
    ask = ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "--max-time", "3", url]
    place = ("sh", node) if node else ("ctl",)
    return bed.twin(*place, "sh", "-c", f"{shlex.join(ask)} || true")


# ---- units -----------------------------------------------------------------------------------------
def test_units_run_now_and_after_a_reboot(node: Host) -> None:
    """Fails when a unit is not enabled, not running, or ran into a restart."""
    units = [unit(node), "glm-vllm-watch", "glm-vllm-guard", "glm-vllm-firewall"] + (
        ["nginx"] if name(node) == bed.HEAD else []
    )
    for each in units:
        service = node.service(each)
        assert service.is_enabled and service.is_running, each
    assert node.check_output("systemctl list-units --failed --plain --no-legend") == ""


def test_what_listens_is_not_root(node: Host) -> None:
    """Fails when the engine or the state service runs as root, or the state service can no longer note an incident."""
    for each in (unit(node), "glm-vllm-watch", "glm-vllm-guard"):
        pid = pair.show(name(node), each, "MainPID")["MainPID"]
        assert node.check_output(f"ps -o user= -p {pid}") == "glm-vllm", each
    assert node.run("setpriv --reuid=glm-vllm --regid=glm-vllm --clear-groups test -w /var/lib/glm-vllm/watch").rc == 0


def test_each_node_has_its_own_engine_unit_only(node: Host) -> None:
    """Fails when both units come to one node."""
    assert not node.file(f"/etc/systemd/system/{pair.UNITS[PEER[name(node)]]}.service").exists


def test_environment_of_the_unit_is_the_truth(node: Host) -> None:
    """Fails when `systemctl show` tells another setting than the one that vLLM runs with."""
    shown = pair.show(name(node), unit(node), "Environment")["Environment"].split()
    for wanted in ("GLM_GPU_MEMORY_UTILIZATION=0.87", "GLM_SPECULATOR=mtp", "ABLIT=0", "HF_HUB_OFFLINE=1"):
        assert wanted in shown
    command = node.check_output("pgrep --full --list-full '[v]llm serve --config'")
    assert "--gpu-memory-utilization 0.87" in command
    assert '"method": "mtp"' in command


def test_limits_of_the_unit(node: Host) -> None:
    """Fails when memory that RDMA pins is limited, or the engine runs as root or may write outside its folders."""
    shown = pair.show(
        name(node), unit(node), "LimitMEMLOCK", "User", "ProtectSystem", "Restart", "StartLimitIntervalUSec"
    )
    assert shown == {
        "LimitMEMLOCK": "infinity",
        "User": "glm-vllm",
        "ProtectSystem": "strict",
        "Restart": "always",
        "StartLimitIntervalUSec": "0",
    }


def test_start_command_names_a_release_and_no_link(node: Host) -> None:
    """Fails when a promotion could change what a running unit would start next."""
    release = document(node, "/var/lib/glm-vllm/deployments/current/deployment.json")["release"]
    text = node.file(f"/etc/systemd/system/{unit(node)}.service").content_string
    assert f"ExecStart=/opt/glm-vllm/releases/{release}/venv/bin/glm-vllm serve" in text
    assert f"ExecStartPre=+/opt/glm-vllm/releases/{release}/venv/bin/glm-vllm gate" in text


# ---- files -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "mode", "user", "group"),
    [
        ("/etc/glm-vllm", 0o755, "root", "root"),
        ("/etc/glm-vllm/node.env", 0o644, "root", "root"),
        ("/etc/glm-vllm/fabric.json", 0o644, "root", "root"),
        ("/etc/glm-vllm/serve.yaml", 0o644, "root", "root"),
        ("/var/lib/glm-vllm/footprint.json", 0o644, "root", "root"),
        ("/var/lib/glm-vllm/models", 0o755, "root", "root"),
        ("/var/lib/glm-vllm/watch", 0o755, "glm-vllm", "glm-vllm"),
        ("/var/cache/glm-vllm", 0o750, "glm-vllm", "glm-vllm"),
        ("/opt/glm-vllm/releases", 0o755, "root", "root"),
        ("/run/glm-vllm", 0o2750, "glm-vllm", "www-data"),
    ],
)
def test_modes_on_both_nodes(node: Host, path: str, mode: int, user: str, group: str) -> None:
    """Fails when an owner or a mode is another one."""
    file = node.file(node.file(path).linked_to if node.file(path).is_symlink else path)
    assert (oct(file.mode), file.user, file.group) == (oct(mode), user, group)


@pytest.mark.parametrize(
    ("path", "mode", "user", "group"),
    [
        ("/etc/glm-vllm/api-keys", 0o600, "root", "root"),
        ("/etc/nginx/glm-vllm/keys.map", 0o640, "root", "root"),
        ("/etc/glm-vllm/tls/ca.key", 0o600, "root", "root"),
        ("/etc/glm-vllm/tls/server.key", 0o600, "root", "root"),
        ("/run/glm-vllm/api.sock", 0o660, "glm-vllm", "www-data"),
    ],
)
def test_modes_on_the_head(head: Host, worker: Host, path: str, mode: int, user: str, group: str) -> None:
    """Fails when someone else can read the keys or reach the engine, or when the worker has them too."""
    file = head.file(path)
    assert (oct(file.mode), file.user, file.group) == (oct(mode), user, group)
    assert not worker.file(path).exists


def test_current_deployment_is_one_folder_behind_one_link(node: Host) -> None:
    """Fails when files of two deployments are mixed."""
    current = node.check_output("readlink /var/lib/glm-vllm/deployments/current")
    assert current.isdigit()
    folder = f"/var/lib/glm-vllm/deployments/{current}"
    assert document(node, f"{folder}/deployment.json")["n"] == int(current)
    assert node.check_output("readlink -f /etc/glm-vllm/serve.yaml") == f"{folder}/serve.yaml"
    assert node.check_output("readlink -f /etc/glm-vllm/node.env") == f"{folder}/node.env"
    for each in (unit(node), "glm-vllm-watch"):
        installed, staged = (node.file(f"{top}/{each}.service") for top in ("/etc/systemd/system", f"{folder}/units"))
        assert installed.content == staged.content
    previous = node.file("/var/lib/glm-vllm/deployments/previous")
    assert not previous.exists or node.check_output(f"readlink {previous.path}") != current


def test_command_on_path_is_the_current_release_s(node: Host) -> None:
    """Fails when `glm-vllm` is another release's than the one deployed."""
    release = document(node, "/var/lib/glm-vllm/deployments/current/deployment.json")["release"]
    link = node.check_output("readlink -f $(readlink /usr/local/bin/glm-vllm)")
    assert link == f"/opt/glm-vllm/releases/{release}/venv/bin/glm-vllm"
    manifest = document(node, f"/opt/glm-vllm/releases/{release}/manifest.json")
    assert (manifest["id"], manifest["profile"]) == (release, "twin")


def test_both_nodes_have_the_same_deployment(head: Host, worker: Host) -> None:
    """Fails when serve.yaml differs by a byte, or number, release, model or executor by anything."""
    here, there = (h.file("/etc/glm-vllm/serve.yaml").content for h in (head, worker))
    assert here == there
    here, there = (document(h, "/var/lib/glm-vllm/deployments/current/deployment.json") for h in (head, worker))
    assert {k: here[k] for k in here if k != "when"} == {k: there[k] for k in there if k != "when"}


def test_weights_are_verified_on_both(node: Host) -> None:
    """Fails when a byte differs from the manifest, when the flag is for another one, or others may write."""
    model = document(node, "/var/lib/glm-vllm/deployments/current/deployment.json")["model"]
    manifest = document(node, f"{model['path']}/manifest.json")
    sums = "".join(f"{entry['sha256']}  {model['path']}/{file}\n" for file, entry in manifest["files"].items())
    assert len(manifest["files"]) > 3
    node.run_expect([0], "printf %s %s | sha256sum --check --quiet --strict", "%s", sums)
    flag = document(node, f"{model['path']}/.verified.json")
    assert flag["manifest_sha256"] == node.file(f"{model['path']}/manifest.json").sha256sum
    assert node.check_output("find %s ! -user root -o -perm /022", model["path"]) == ""


def test_footprint_lists_what_is_there(node: Host) -> None:
    """Fails when uninstall would look for something that was never made, or when a role records nothing."""
    records = document(node, "/var/lib/glm-vllm/footprint.json")["records"]
    roles = {"footprint", "cuda-sm121", "cx7-network", "model-fetch", "glm-vllm-overlay"}  # its own folder comes first
    assert {record["role"] for record in records} == roles
    paths = [record["name"] for record in records if record["kind"] in ("file", "dir", "symlink")]
    assert len(paths) > 10
    assert [path for path in paths if not node.file(path).exists] == []
    packages = [record["name"] for record in records if record["kind"] == "package"]
    assert packages and all(node.package(each).is_installed for each in packages)
    units = [record["name"] for record in records if record["kind"] == "unit"]
    assert {f"{unit(node)}.service", "glm-vllm-watch.service"} <= set(units)
    assert all(pair.show(name(node), each, "LoadState") == {"LoadState": "loaded"} for each in units)


# ---- who may ask what -----------------------------------------------------------------------------------------
def test_only_the_peer_may_ask_for_the_state(node: Host) -> None:
    """Fails when the state is shown to the node's own users, to the management network, or not to the peer."""
    here, rails = name(node), document(node, "/etc/glm-vllm/fabric.json")["rails"]
    assert len(rails) == 2
    for rail in rails:
        assert status_of(PEER[here], STATE.format(rail["address"])) == "200"
        assert status_of(here, STATE.format(rail["address"])) == "403"
    management = f"{bed.NET}.{11 if here == bed.HEAD else 12}"
    assert status_of(PEER[here], STATE.format(management)) == "000"
    assert status_of(here, STATE.format("127.0.0.1")) == "000"


def test_fabric_address_is_closed_to_the_management_network(node: Host) -> None:
    """Fails when someone who routes the fabric over the management network gets past the firewall."""
    address = document(node, "/etc/glm-vllm/fabric.json")["rails"][0]["address"]
    gate = f"{bed.NET}.{11 if name(node) == bed.HEAD else 12}"
    bed.twin("ctl", "ip", "route", "add", f"{address}/32", "via", gate)
    try:
        assert status_of("", STATE.format(address)) in ("000", "403")
    finally:
        bed.twin("ctl", "ip", "route", "del", f"{address}/32", "via", gate)


def test_engine_listens_on_its_socket_only(head: Host, worker: Host) -> None:
    """Fails when the engine can be reached past the gateway, without a key."""
    api = f"http://{bed.NET}.11"
    for port in (8000, 8080):
        assert status_of(bed.WORKER, f"{api}:{port}/v1/models") == "000"
    for port in (8888, 8443):
        assert head.socket(f"tcp://0.0.0.0:{port}").is_listening
        assert not worker.socket(f"tcp://0.0.0.0:{port}").is_listening
    assert "nginx" in head.check_output("ss -Hltnp 'sport = :8888'")


def test_state_holds_what_the_peer_needs_and_no_secret(node: Host) -> None:
    """Fails when a field is missing or wrong, or when a key slips in."""
    said = bed.state(name(node))
    current = document(node, "/var/lib/glm-vllm/deployments/current/deployment.json")
    assert (said["node"], said["phase"], said["executor"]) == (name(node), "serving", "mp")
    assert (said["release"], said["config_sha256"]) == (current["release"], current["serve_sha256"])
    assert said["environment"] == {"GLM_GPU_MEMORY_UTILIZATION": "0.87", "GLM_SPECULATOR": "mtp", "ABLIT": "0"}
    assert said["model_verified"] is True
    assert said["session"]["peer"] == bed.state(PEER[name(node)])["session"]["id"]
    assert [rail["mtu"] for rail in said["fabric"]["rails"]] == [9000, 9000]
    assert bed.api_key() not in json.dumps(said)


def test_key_stands_in_its_two_files_only(node: Host) -> None:
    """Fails when the key is found in a journal, log, unit, deployment, or a process's arguments or environment."""
    key = bed.api_key()
    # In two halves, so that neither sudo's journal nor this command itself holds what is looked for
    said = node.check_output("python3 -c %s %s %s", SEEK, key[:32], key[32:])
    keys = {"/etc/glm-vllm/api-keys", "/etc/nginx/glm-vllm/keys.map"} if name(node) == bed.HEAD else set()
    assert set(said.splitlines()) == keys


# ---- no Ray under mp -----------------------------------------------------------------------------------------
def test_nothing_of_ray_is_left(node: Host) -> None:
    """Fails when a unit, process, port, file or firewall rule of Ray is there although the executor is mp."""
    assert node.run("systemctl list-unit-files --no-legend 'ray-*'").stdout == ""
    assert node.run("pgrep --full '[r]aylet|[g]cs_server|[r]ay start'").rc == 1
    assert node.check_output("ss -Hltn 'sport >= :6379 and sport <= :6390'") == ""
    assert not node.file("/var/lib/glm-vllm/ray").exists
    assert not node.file("/var/lib/glm-vllm/.config").exists
    assert "6379" not in node.check_output("nft list ruleset")
