# SPDX-License-Identifier: Apache-2.0
"""Write our netplan file and bring its interfaces, and no other, to what it says."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cx7_netplan
short_description: Writes one netplan file and applies it to its own interfaces
description:
  - The merged result of all netplan files is generated in a temporary root first; a file that netplan rejects is
    never written.
  - Never runs C(netplan apply), which restarts every interface of the machine. Under NetworkManager the profiles of
    the named interfaces are reloaded and brought up; under systemd-networkd only these interfaces are reconfigured.
  - Applies when the file changed or when an interface does not carry its address and MTU. A failed application puts
    the former file back.
options:
  path: {description: The file., type: path, required: true}
  content: {description: Its text., type: str, required: true}
  renderer: {description: Who configures interfaces., type: str, choices: [networkd, NetworkManager], required: true}
  rails:
    description: The rails of this node, as the filter cx7_plan gives them.
    type: list
    elements: dict
    required: true
    options:
      netdev: {description: Interface., type: str, required: true}
      address: {description: Own IPv4 address., type: str, required: true}
      prefix: {description: Prefix length., type: int, required: true}
      subnet: {description: Network., type: str, required: true}
      peer: {description: Peer's address., type: str, required: true}
      mtu: {description: MTU in bytes., type: int, required: true}
  timeout: {description: Seconds until the interfaces must carry their addresses., type: int, default: 20}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Address the rails
  cx7_netplan:
    path: /etc/netplan/60-glm-vllm-cx7.yaml
    content: "{{ lookup('ansible.builtin.template', '60-glm-vllm-cx7.yaml.j2') }}"
    renderer: networkd
    rails: "{{ plan[inventory_hostname].rails }}"
"""

RETURN = r"""
drift:
  description: What the interfaces did not carry before, one sentence each.
  type: list
  elements: str
  returned: always
"""

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

RAIL = {
    "netdev": {"type": "str", "required": True},
    "address": {"type": "str", "required": True},
    "prefix": {"type": "int", "required": True},
    "subnet": {"type": "str", "required": True},
    "peer": {"type": "str", "required": True},
    "mtu": {"type": "int", "required": True},
}
SOURCES = ("etc/netplan", "run/netplan", "lib/netplan")


def drift(rails: list[dict[str, Any]], entries: list[dict[str, Any]]) -> list[str]:
    """Sentences for what the interfaces lack; entries are parsed C(ip -j address)."""
    live = {e["ifname"]: e for e in entries if "ifname" in e}
    lacking = []
    for rail in rails:
        entry = live.get(rail["netdev"])
        if entry is None:
            lacking.append(f"{rail['netdev']} does not exist.")
            continue
        carried = {(i.get("local"), i.get("prefixlen")) for i in entry.get("addr_info", [])}
        if (rail["address"], rail["prefix"]) not in carried:
            lacking.append(f"{rail['netdev']} does not carry {rail['address']}/{rail['prefix']}.")
        if entry.get("mtu") != rail["mtu"]:
            lacking.append(f"{rail['netdev']} has MTU {entry.get('mtu')}, not {rail['mtu']}.")
    return lacking


def commands(renderer: str, netdevs: list[str]) -> list[list[str]]:
    """Commands that apply the generated configuration to these interfaces alone."""
    if renderer == "NetworkManager":
        up = [["nmcli", "--wait", "20", "connection", "up", f"netplan-{n}"] for n in netdevs]
        return [["netplan", "generate"], ["nmcli", "connection", "reload"], *up]
    return [
        ["netplan", "generate"],
        ["systemctl", "start", "systemd-networkd.service"],
        ["networkctl", "reload"],
        ["networkctl", "reconfigure", *netdevs],
    ]


def rejected(module: AnsibleModule, path: Path, content: str) -> str:
    """What netplan says against the merged files with content as path; empty when it accepts them."""
    with tempfile.TemporaryDirectory() as root:
        for source in SOURCES:
            if Path("/", source).is_dir():
                shutil.copytree(Path("/", source), Path(root, source))
        target = Path(root, path.relative_to("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
        target.chmod(0o600)
        code, out, err = module.run_command(["netplan", "generate", "--root-dir", root])
        return "" if code == 0 else (err or out).strip()


def write(path: Path, content: str) -> None:
    """Replace path atomically, mode 0600."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".glm-vllm-")
    with os.fdopen(handle, "w") as file:
        file.write(content)
    os.chmod(name, 0o600)
    os.replace(name, path)


class Rails:
    """The interfaces of one node, live."""

    def __init__(self, module: AnsibleModule):
        self.module = module
        self.rails = module.params["rails"]

    def drift(self) -> list[str]:
        _, out, _ = self.module.run_command(["ip", "-j", "address", "show"], check_rc=True)
        return drift(self.rails, json.loads(out))

    def apply(self) -> str:
        """Empty when the interfaces carry everything, else one sentence."""
        for command in commands(self.module.params["renderer"], [r["netdev"] for r in self.rails]):
            code, out, err = self.module.run_command(command)
            if code != 0:
                return f"'{' '.join(command)}' failed: {(err or out).strip()}"
        end = time.monotonic() + self.module.params["timeout"]
        while lacking := self.drift():
            if time.monotonic() > end:
                return f"After {self.module.params['timeout']} s {' '.join(lacking)}"
            time.sleep(0.1)
        return ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "content": {"type": "str", "required": True},
            "renderer": {"type": "str", "choices": ["networkd", "NetworkManager"], "required": True},
            "rails": {"type": "list", "elements": "dict", "options": RAIL, "required": True},
            "timeout": {"type": "int", "default": 20},
        },
        supports_check_mode=True,
    )
    path, content = Path(module.params["path"]), module.params["content"]
    before = path.read_text() if path.exists() else None
    mode_right = before is not None and path.stat().st_mode & 0o777 == 0o600
    rails = Rails(module)
    lacking = rails.drift()
    stale = before != content or not mode_right
    result: dict[str, Any] = {"changed": stale or bool(lacking), "drift": lacking, "path": str(path)}
    if before != content:
        result["diff"] = {
            "before": before or "",
            "after": content,
            "before_header": str(path),
            "after_header": str(path),
        }
    if module.check_mode or not result["changed"]:
        module.exit_json(**result)
    objection = rejected(module, path, content)
    if objection:
        module.fail_json(
            msg=f"netplan rejects {path} merged with the other files in /etc/netplan: {objection}", **result
        )
    if stale:
        write(path, content)
    failure = rails.apply()
    if failure:
        if before is None:
            path.unlink()
        elif stale:
            write(path, before)
        module.run_command(["netplan", "generate"])
        module.fail_json(msg=f"The rails could not be configured; {path} is as it was before. {failure}", **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
