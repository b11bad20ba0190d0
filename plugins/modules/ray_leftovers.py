# SPDX-License-Identifier: Apache-2.0
"""List what is left of this project's Ray on a node, and remove it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: ray_leftovers
short_description: Lists and removes what is left of this project's Ray
description:
  - Looks for units, unit files, processes with the ports they listen on, files, and firewall rules.
  - Only this project's Ray counts. Another Ray on the node is neither listed nor touched.
  - A firewall rule is listed only. The role cx7-network owns it.
options:
  state:
    description: V(listed) only looks, V(absent) also removes.
    type: str
    choices: [listed, absent]
    default: absent
  port:
    description: First of Ray's ports; its firewall rule starts with it.
    type: int
    default: 6379
author: The project's authors
"""

EXAMPLES = r"""
- name: No Ray is left
  ray_leftovers:
  register: left
"""

RETURN = r"""
before: {description: "What was found, one phrase each.", type: list, elements: str, returned: always}
after: {description: "What is still there; in check mode what would be.", type: list, elements: str, returned: always}
"""

import os
import re
import shutil
import signal
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

UNITS = ("ray-head.service", "ray-worker.service")
UNIT_FOLDER = "etc/systemd/system"
TEMP = "var/lib/glm-vllm/ray"
KEPT_ON_NODE = "var/lib/glm-vllm/.config/vllm/ray_non_carry_over_env_vars.json"
# Everything that `ray start` of our releases runs has one of these on its command line.
OURS = re.compile(rb"/opt/glm-vllm/releases/[^/]+/venv/.*(ray|raylet|gcs_server)|/var/lib/glm-vllm/ray\b")
RAY = re.compile(rb"(^|[/\0 :])(ray|raylet|gcs_server)([\0 :/]|$)")
LISTEN = "0A"


def unit_files(root: Path) -> list[Path]:
    """Our Ray units' files, drop-in folders and enabling links below root/etc/systemd/system."""
    folder = root / UNIT_FOLDER
    found = [folder / name for unit in UNITS for name in (unit, f"{unit}.d")]
    found += [link for unit in UNITS for link in sorted(folder.glob(f"*.wants/{unit}"))]
    return [path for path in found if os.path.lexists(path)]


def files(root: Path) -> list[Path]:
    """Files of our Ray: its folder and what that holds, and the list of variables that it keeps on a node."""
    temp, kept = root / TEMP, root / KEPT_ON_NODE
    found = [*sorted(temp.iterdir()), temp] if temp.is_dir() else []
    return [*found, *([kept] if kept.exists() else [])]


def processes(proc: Path) -> dict[int, str]:
    """Process id to short name of every process of our Ray."""
    found = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            line = (folder / "cmdline").read_bytes()
            if OURS.search(line) and RAY.search(line):
                found[int(folder.name)] = (folder / "comm").read_text().strip()
        except OSError:
            continue  # it ended meanwhile
    return found


def ports(proc: Path, pid: int) -> list[int]:
    """TCP ports on which a process listens."""
    inodes = set()
    try:
        for handle in (proc / str(pid) / "fd").iterdir():
            match = re.match(r"socket:\[(\d+)\]", os.readlink(handle))
            if match:
                inodes.add(match.group(1))
        rows = [
            row.split()
            for table in ("tcp", "tcp6")
            for row in (proc / str(pid) / "net" / table).read_text().splitlines()[1:]
        ]
    except OSError:
        return []
    return sorted({int(r[1].rpartition(":")[2], 16) for r in rows if r[3] == LISTEN and r[9] in inodes})


def rules(table: str, port: int) -> list[str]:
    """Lines of a listed nftables table that name Ray's ports."""
    return [line.strip() for line in table.splitlines() if re.search(rf"\b{port}(-\d+)?\b", line)]


class Node:
    """The machine that the module runs on."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.proc = Path("/proc")

    def run(self, *command: str) -> str:
        """Standard output; empty when the command fails."""
        code, out, _ = self.module.run_command(list(command))
        return out if code == 0 else ""

    def states(self) -> dict[str, str]:
        """Active state, as systemd calls it, of each of our Ray units that is not at rest."""
        shown = {u: self.run("systemctl", "show", "--value", "--property=ActiveState", u).strip() for u in UNITS}
        return {unit: state for unit, state in shown.items() if state not in ("", "inactive")}

    def found(self, port: int) -> list[str]:
        """Everything that is left, one phrase each."""
        phrases = [f"unit {unit} is {state}" for unit, state in self.states().items()]
        phrases += [f"file {path}" for path in [*unit_files(Path("/")), *files(Path("/"))]]
        for pid, name in processes(self.proc).items():
            phrases.append(f"process {name} ({pid})")
            phrases += [f"port {number} of {name} ({pid})" for number in ports(self.proc, pid)]
        table = self.run("nft", "list", "table", "inet", "glm_vllm_fabric")
        return phrases + [f"firewall rule '{rule}' (run playbooks/network.yml)" for rule in rules(table, port)]

    def remove(self) -> None:
        """Remove the unit files, stop the units, end the processes, remove the other files."""
        known, removed = self.states(), unit_files(Path("/"))
        # The unit files first: an engine that systemd restarts meanwhile must find no Ray to take along.
        self.delete(removed)
        if removed:
            self.module.run_command(["systemctl", "daemon-reload"], check_rc=True)
        if known:
            self.module.run_command(["systemctl", "stop", *known])
            # systemd remembers a unit that failed, also without its file
            self.module.run_command(["systemctl", "reset-failed", *known])
        self.end()
        self.delete(files(Path("/")))

    @staticmethod
    def delete(paths: list[Path]) -> None:
        """Remove files, links and whole folders."""
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def end(self) -> None:
        """End what runs outside the units: ask, and after five seconds insist."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in processes(self.proc):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            deadline = time.monotonic() + 5
            while processes(self.proc) and time.monotonic() < deadline:
                time.sleep(0.1)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["listed", "absent"], "default": "absent"},
            "port": {"type": "int", "default": 6379},
        },
        supports_check_mode=True,
    )
    node, port = Node(module), module.params["port"]
    before = node.found(port)
    ours = [phrase for phrase in before if not phrase.startswith("firewall")]
    removes = module.params["state"] == "absent" and bool(ours)
    if not removes:
        module.exit_json(changed=False, before=before, after=before)
    if module.check_mode:
        after = [phrase for phrase in before if phrase not in ours]
    else:
        node.remove()
        after = node.found(port)
    lines = {"before": "".join(f"{p}\n" for p in before), "after": "".join(f"{p}\n" for p in after)}
    module.exit_json(changed=True, before=before, after=after, diff=lines)


if __name__ == "__main__":
    main()
