# SPDX-License-Identifier: Apache-2.0
"""Bring the rails, and no other interface, to what our files say; what is not confirmed is undone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cx7_change
short_description: Changes the addresses of the rails as a transaction
description:
  - Run it as an action, which begins and confirms; this half works on the node.
  - With O(state=begun) the merged result of all netplan files is generated in a temporary root. A file that netplan
    rejects is never written, and neither is one whose application would touch another interface, unless
    O(allow_management) says so. Then a transient unit applies the change, waits O(timeout) seconds for a confirmation
    and undoes everything without one, also when it is killed or the node shuts down.
  - With O(state=confirmed) waits until the rails carry what they should, and confirms. It is to come in over a new
    management connection.
  - C(netplan apply) is never run, since it restarts every interface. Under NetworkManager the profiles of the rails are
    reloaded and brought up; under systemd-networkd only the rails are reconfigured.
options:
  state: {description: Step of the transaction., type: str, choices: [begun, confirmed], default: begun}
  files:
    description: Our files, whole.
    type: list
    elements: dict
    required: true
    options:
      path: {description: Path., type: path, required: true}
      content: {description: Text., type: str, required: true}
  own:
    description: Shell patterns of our files; those that O(files) does not name are removed.
    type: list
    elements: str
    required: true
  renderer: {description: Who configures interfaces., type: str, choices: [networkd, NetworkManager], required: true}
  netplan: {description: Whether the files are netplan's; else systemd-networkd's own., type: bool, required: true}
  rails:
    description: The rails of this node, as the filter cx7_plan gives them.
    type: list
    elements: dict
    required: true
  ports: {description: All ConnectX-7 interfaces of the node., type: list, elements: str, required: true}
  allow_management: {description: Whether other interfaces may be touched., type: bool, default: false}
  timeout: {description: Seconds until a change without confirmation is undone., type: int, default: 60}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Address the rails
  cx7_change:
    files: [{path: /etc/netplan/60-glm-vllm-cx7.yaml, content: "{{ text }}"}]
    own: [/etc/netplan/60-glm-vllm-cx7.yaml]
    renderer: networkd
    netplan: true
    rails: "{{ plan[inventory_hostname].rails }}"
    ports: [enp1s0f0np0, enP2p1s0f0np0, enp1s0f1np1, enP2p1s0f1np1]
"""

RETURN = r"""
drift:
  description: What the interfaces did not carry before, one sentence each.
  type: list
  elements: str
  returned: with state begun
begun: {description: Whether a change waits for its confirmation., type: bool, returned: with state begun}
undone: {description: Why the change was undone; empty when it stands., type: str, returned: with state confirmed}
"""

import glob
import json
import os
import shlex
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

SOURCES = ("etc/netplan", "run/netplan", "lib/netplan")
GENERATED = ("run/systemd/network", "run/NetworkManager/system-connections")
WORK = Path("/run/glm-vllm-network")
UNIT = "glm-vllm-network-change.service"
SETTLE = 20  # seconds for the rails to carry their addresses
Links = dict[str, dict[str, Any]]


def carried(link: dict[str, Any]) -> set[str]:
    """The global IPv4 addresses of an interface as a.b.c.d/len."""
    return {
        f"{info.get('local')}/{info.get('prefixlen')}"
        for info in link.get("addr_info", [])
        if info.get("family") == "inet" and info.get("scope", "global") == "global"
    }


def wanted(rails: list[dict[str, Any]]) -> dict[str, str]:
    """Interface to its address as a.b.c.d/len."""
    return {rail["netdev"]: f"{rail['address']}/{rail['prefix']}" for rail in rails}


def drift(rails: list[dict[str, Any]], ports: list[str], links: Links) -> list[str]:
    """Sentences for what the interfaces lack, or carry besides; links: name to an entry of C(ip -j address)."""
    lacking = []
    for rail in rails:
        link = links.get(rail["netdev"])
        if link is None:
            lacking.append(f"{rail['netdev']} does not exist.")
            continue
        address = f"{rail['address']}/{rail['prefix']}"
        lacking += [f"{rail['netdev']} does not carry {address}."] if address not in carried(link) else []
        lacking += [f"{rail['netdev']} carries {other} besides." for other in sorted(carried(link) - {address})]
        if link.get("mtu") != rail["mtu"]:
            lacking.append(f"{rail['netdev']} has MTU {link.get('mtu')}, not {rail['mtu']}.")
    return lacking + [f"{name} still carries {address}." for name, address in strays(rails, ports, links)]


def strays(rails: list[dict[str, Any]], ports: list[str], links: Links) -> list[tuple[str, str]]:
    """(port, address) of every address that belongs to a rail and is on another port, as after a cable was moved."""
    ours = set(wanted(rails).values())
    others = [name for name in ports if name not in wanted(rails)]
    return [(name, address) for name in others for address in sorted(carried(links.get(name, {})) & ours)]


def applying(renderer: str, netplan: bool, netdevs: list[str]) -> list[list[str]]:
    """Commands that apply the files to these interfaces alone."""
    generate = [["netplan", "generate"]] if netplan else []
    if renderer == "NetworkManager":
        up = [["nmcli", "--wait", "20", "connection", "up", f"netplan-{name}"] for name in netdevs]
        return [*generate, ["nmcli", "connection", "reload"], *up]
    start = ["systemctl", "start", "systemd-networkd.service"]
    return [*generate, start, ["networkctl", "reload"], ["networkctl", "reconfigure", *netdevs]]


def restoring(rails: list[dict[str, Any]], links: Links) -> list[list[str]]:
    """Commands that give the rails the addresses and MTU that they had, whoever gave them."""
    commands = []
    for rail in rails:
        name, before = rail["netdev"], links.get(rail["netdev"], {})
        for address in sorted(set(wanted([rail]).values()) - carried(before)):
            commands.append(["ip", "address", "del", address, "dev", name])
        commands += [["ip", "address", "replace", address, "dev", name] for address in sorted(carried(before))]
        if "mtu" in before:
            commands.append(["ip", "link", "set", "dev", name, "mtu", str(before["mtu"])])
    return commands


def script(commands: list[list[str]], *, strict: bool) -> str:
    """Lines of a shell script; unless strict a command that fails stops nothing."""
    return "".join(f"{shlex.join(command)}{'' if strict else ' || :'}\n" for command in commands)


def differences(before: Path, after: Path, netdevs: list[str]) -> list[str]:
    """Names of generated files that differ between two roots and are not about netdevs."""

    def read(root: Path) -> dict[str, bytes]:
        return {
            f"{folder}/{file.name}": file.read_bytes()
            for folder in GENERATED
            for file in sorted((root / folder).glob("*netplan-*"))
            if not any(file.stem.endswith(f"netplan-{name}") for name in netdevs)
        }

    old, new = read(before), read(after)
    return sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))


class Change:
    """The change of one node: what is there, what is wanted, and the way from one to the other and back."""

    def __init__(self, module: AnsibleModule):
        self.module = module
        self.params = module.params
        self.netdevs = [rail["netdev"] for rail in self.params["rails"]]
        self.files = {file["path"]: file["content"] for file in self.params["files"]}

    def links(self) -> Links:
        _, out, _ = self.module.run_command(["ip", "-j", "address", "show"], check_rc=True)
        return {entry["ifname"]: entry for entry in json.loads(out) if "ifname" in entry}

    def drift(self) -> list[str]:
        return drift(self.params["rails"], self.params["ports"], self.links())

    def existing(self) -> dict[str, str]:
        """Our files that are there: path to text."""
        paths = {path for pattern in self.params["own"] for path in glob.glob(pattern)}
        return {path: Path(path).read_text(encoding="utf-8") for path in sorted(paths)}

    def stale(self) -> bool:
        loose = any(Path(path).stat().st_mode & 0o077 for path in self.existing() if self.params["netplan"])
        return self.existing() != self.files or loose

    def refusal(self) -> str:
        """Why netplan's merged result must not be applied, as one sentence; empty when it may."""
        if not self.params["netplan"]:
            return ""
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for source in SOURCES:
                if Path("/", source).is_dir():
                    shutil.copytree(Path("/", source), root / source)
            for path in self.existing():
                (root / path.lstrip("/")).unlink(missing_ok=True)
            for path, content in self.files.items():
                write(root / path.lstrip("/"), content)
            code, out, err = self.module.run_command(["netplan", "generate", "--root-dir", folder])
            if code:
                return f"netplan rejects our file merged with the others in /etc/netplan: {(err or out).strip()}"
            others = differences(Path("/"), root, self.params["ports"])
        if others and not self.params["allow_management"]:
            return (
                f"Applying our file would also apply {', '.join(others)}, because a netplan file was edited and never "
                "applied; apply or undo that edit, or set cx7_network_allow_management: true if you can reach the "
                "console."
            )
        return ""

    def begin(self) -> None:
        """Start the transient unit that writes, applies, waits and undoes."""
        links = self.links()
        shutil.rmtree(WORK, ignore_errors=True)
        (WORK / "before").mkdir(parents=True, mode=0o700)
        (WORK / "after").mkdir()
        there, back = [], []
        existing = self.existing()
        for number, path in enumerate(sorted({*existing, *self.files})):
            there.append(self.place("after", number, path, self.files.get(path)))
            back.append(self.place("before", number, path, existing.get(path)))
        params = self.params
        touched = [*self.netdevs, *(name for name, _ in strays(params["rails"], params["ports"], links))]
        leave = [["ip", "address", "del", a, "dev", n] for n, a in strays(params["rails"], params["ports"], links)]
        apply = applying(params["renderer"], params["netplan"], self.netdevs)
        undo = [*back, *self.former(touched), *restoring(params["rails"], links)]
        (WORK / "apply").write_text(
            f"exec >{WORK}/log 2>&1\nset -e\n{script([*there, *leave, *apply], strict=True)}"
            f"touch {WORK}/applied\nexec sleep {params['timeout']}\n"
        )
        (WORK / "undo").write_text(
            f"[ ! -e {WORK}/confirmed ] || exit 0\nexec >>{WORK}/log 2>&1\n{script(undo, strict=False)}"
            f"touch {WORK}/undone\n"
        )
        self.module.run_command(
            ["systemd-run", "--quiet", "--collect", f"--unit={UNIT}", "--property=TimeoutStopSec=90",
             f"--property=ExecStopPost=/bin/sh {WORK}/undo", "/bin/sh", f"{WORK}/apply"],
            check_rc=True,
        )  # fmt: skip

    def place(self, folder: str, number: int, path: str, content: str | None) -> list[str]:
        """The command that makes path hold content, or be away."""
        if content is None:
            return ["rm", "-f", path]
        copy = WORK / folder / str(number)
        write(copy, content)
        return ["install", "-D", "-m", "0600" if self.params["netplan"] else "0644", str(copy), path]

    def former(self, netdevs: list[str]) -> list[list[str]]:
        """Commands that apply the files as they were."""
        if self.params["renderer"] != "NetworkManager":
            return applying("networkd", self.params["netplan"], netdevs)
        reload = applying("NetworkManager", self.params["netplan"], [])
        active = []
        for netdev in netdevs:
            _, out, _ = self.module.run_command(["nmcli", "-g", "GENERAL.CON-UUID", "device", "show", netdev])
            active += [["nmcli", "--wait", "20", "connection", "up", out.strip()]] if out.strip() else []
        return [*reload, *active]

    def running(self) -> bool:
        code, _, _ = self.module.run_command(["systemctl", "--quiet", "is-active", UNIT])
        return code == 0

    def confirm(self) -> str:
        """Confirm once the rails are right; else have everything undone and say why."""
        end = time.monotonic() + SETTLE
        while self.running() and time.monotonic() < end:
            if (WORK / "applied").exists() and not self.drift():
                (WORK / "confirmed").touch()
                self.stop()
                if not (WORK / "undone").exists():
                    shutil.rmtree(WORK)
                    return ""
                break
            time.sleep(0.2)
        lacking = self.drift() if self.running() else []
        self.stop()
        said = (WORK / "log").read_text().strip() if (WORK / "log").exists() else ""
        if lacking:
            return f"after {SETTLE} s {' '.join(lacking)} {said}".strip()
        if (WORK / "applied").exists():
            return "no confirmation came in time over a new management connection, so the change may have cut it"
        return said or "the change never ran"

    def stop(self) -> None:
        self.module.run_command(["systemctl", "stop", UNIT])


def write(path: Path, content: str) -> None:
    """Write a file that only root may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(content)


def main() -> None:
    text = {"type": "str", "required": True}
    file = {"path": {"type": "path", "required": True}, "content": text}
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["begun", "confirmed"], "default": "begun"},
            "files": {"type": "list", "elements": "dict", "options": file, "required": True},
            "own": {"type": "list", "elements": "str", "required": True},
            "renderer": {"type": "str", "choices": ["networkd", "NetworkManager"], "required": True},
            "netplan": {"type": "bool", "required": True},
            "rails": {"type": "list", "elements": "dict", "required": True},
            "ports": {"type": "list", "elements": "str", "required": True},
            "allow_management": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    change = Change(module)
    if module.params["state"] == "confirmed":
        module.exit_json(changed=True, undone=change.confirm())
    if not module.check_mode and change.running():
        change.stop()  # of a run that was broken off: undone before anything is compared
    lacking = change.drift()
    stale = change.stale()
    result: dict[str, Any] = {"changed": stale or bool(lacking), "begun": False, "drift": lacking}
    if stale:
        headers = {f"{side}_header": " ".join(change.files) for side in ("before", "after")}
        result["diff"] = {
            "before": "".join(change.existing().values()),
            "after": "".join(change.files.values()),
            **headers,
        }
    if not result["changed"]:
        module.exit_json(**result)
    if refusal := change.refusal():
        module.fail_json(msg=refusal, **result)
    if not module.check_mode:
        change.begin()
        result["begun"] = True
    module.exit_json(**result)


if __name__ == "__main__":
    main()
