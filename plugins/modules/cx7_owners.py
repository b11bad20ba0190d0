# SPDX-License-Identifier: Apache-2.0
"""Say which files configure the rails of a node, apart from ours."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cx7_owners
short_description: Finds the files that configure interfaces
description:
  - Looks at netplan files, profiles of NetworkManager, files of systemd-networkd and of ifupdown.
  - A netplan file configures an interface that it names as an ethernet or matches by name or hardware address. One that
    is no YAML counts when the name stands in it. Changes nothing.
options:
  interfaces:
    description: "The interfaces as C(cx7_facts) returns them; C(netdev) and C(mac) are looked at."
    type: list
    elements: dict
    required: true
  own: {description: Shell patterns of the files that are ours., type: list, elements: str, default: []}
  root: {description: Folder of the system., type: path, default: /}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Look whose addresses these are
  cx7_owners: {interfaces: [{netdev: enp1s0f1np1}], own: [/etc/netplan/60-glm-vllm-cx7.yaml]}
"""

RETURN = r"""
netplan: {description: Whether the program netplan is there., type: bool, returned: always}
ours: {description: Whether a file of ours is there., type: bool, returned: always}
files: {description: "Interface to the paths of files that configure it, ours left out.", type: dict, returned: always}
texts: {description: "Path to content, without secrets, for each of these files.", type: dict, returned: always}
"""

import configparser
import fnmatch
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

try:
    import yaml
except ImportError:  # python3-yaml comes with netplan: where it is missing, no netplan file has an effect
    yaml = None

PATTERNS = (
    ("netplan", "etc/netplan/*.yaml"),
    ("netplan", "run/netplan/*.yaml"),
    ("netplan", "lib/netplan/*.yaml"),
    ("keyfile", "etc/NetworkManager/system-connections/*"),
    ("networkd", "etc/systemd/network/*.network"),
    ("ifupdown", "etc/network/interfaces"),
    ("ifupdown", "etc/network/interfaces.d/*"),
)
SECRET = re.compile(r"^(\s*(?:.*(?:password|psk|secret|private-key|wep-key)[^:=]*)\s*[:=]\s*).+$", re.I | re.M)


def by_netplan(text: str, netdev: str, mac: str) -> bool:
    """Whether a netplan file configures an interface."""
    try:
        ethernets = (yaml.safe_load(text) or {})["network"]["ethernets"].items() if yaml else []
        for name, settings in ethernets:
            match = (settings or {}).get("match")
            if match is None:
                found = name == netdev
            else:
                names = match.get("name", [])
                patterns = names if isinstance(names, list) else [names]
                found = any(fnmatch.fnmatchcase(netdev, pattern) for pattern in patterns) or (
                    bool(mac) and str(match.get("macaddress", "")).lower() == mac.lower()
                )
            if found:
                return True
        return False
    except (KeyError, TypeError, AttributeError):
        return False  # YAML without ethernets
    except yaml.YAMLError:
        return bool(re.search(rf"\b{re.escape(netdev)}\b", text))


def by_ini(text: str, section: str, key: str) -> list[str]:
    """The words of a key in an ini file; [] when it cannot be read."""
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    try:
        parser.read_string(text)
    except configparser.Error:
        return []
    return parser.get(section, key, fallback="").split()


def configures(kind: str, text: str, netdev: str, mac: str) -> bool:
    """Whether a file of this kind configures an interface."""
    if kind == "netplan":
        return by_netplan(text, netdev, mac)
    if kind == "keyfile":
        return netdev in by_ini(text, "connection", "interface-name")
    if kind == "networkd":
        return any(fnmatch.fnmatchcase(netdev, pattern) for pattern in by_ini(text, "Match", "Name"))
    return bool(re.search(rf"^\s*iface\s+{re.escape(netdev)}\s", text, re.M))


def candidates(root: Path, own: list[str]) -> Iterator[tuple[str, str, str]]:
    """(kind, path as the system knows it, content) of every file that may configure an interface and is not ours."""
    for kind, pattern in PATTERNS:
        for file in sorted(root.glob(pattern)):
            path = f"/{file.relative_to(root)}"
            if file.is_file() and not any(fnmatch.fnmatchcase(path, mine) for mine in own):
                yield kind, path, file.read_text(encoding="utf-8", errors="replace")


def owners(root: Path, interfaces: list[dict[str, Any]], own: list[str]) -> dict[str, Any]:
    """files and texts, as the module returns them."""
    files: dict[str, list[str]] = {interface["netdev"]: [] for interface in interfaces}
    texts: dict[str, str] = {}
    for kind, path, text in candidates(root, own):
        for interface in interfaces:
            if configures(kind, text, interface["netdev"], interface.get("mac") or ""):
                files[interface["netdev"]].append(path)
                texts[path] = SECRET.sub(r"\1(hidden)", text)
    return {"files": files, "texts": texts}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "interfaces": {"type": "list", "elements": "dict", "required": True},
            "own": {"type": "list", "elements": "str", "default": []},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    params = module.params
    netplan = shutil.which("netplan", path="/usr/sbin:/usr/bin:/sbin:/bin") is not None
    root = Path(params["root"])
    found = owners(root, params["interfaces"], params["own"])
    ours = any(any(root.glob(pattern.lstrip("/"))) for pattern in params["own"])
    module.exit_json(changed=False, netplan=netplan, ours=ours, **found)


if __name__ == "__main__":
    main()
