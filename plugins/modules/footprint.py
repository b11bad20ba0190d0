# SPDX-License-Identifier: Apache-2.0
"""Record what a role is about to add or replace on a node, so that uninstall can put it back."""

from __future__ import annotations

import datetime
import grp
import hashlib
import json
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: footprint
short_description: Record what is about to be added or replaced, and undo it
description:
  - Run it before the change. It notes how the thing was before, in one JSON file for all roles.
  - The first record of a kind and name wins, so a second run, or a second role, changes nothing.
  - With O(state=absent) a file, symlink or dir is put back as the record says. The record of any kind is then dropped.
  - The kinds file, dir and symlink are captured and undone here. How package, hold, unit, user and sysctl were is
    captured here too and undone by C(playbooks/uninstall.yml) with the builtin modules. Kind hosts names a file
    that holds our lines, kind firewall carries what the caller gives in O(data), kind swap names an area that was in
    use.
options:
  role:
    description: Role that makes the change. Needed with O(state=present).
    type: str
  kind:
    description: What it is. Needed but with O(state=listed).
    type: str
    choices: [file, dir, package, hold, unit, user, swap, sysctl, hosts, firewall, symlink]
  name:
    description: Names of the things. An absolute path for file, dir, symlink and hosts, else as its tool spells it.
    type: list
    elements: str
    default: []
  backup:
    description: Keep a copy of a file that exists. Without it uninstall leaves such a file as it finds it.
    type: bool
    default: false
  data:
    description: >-
      What uninstall needs besides: C(firewall) C({table}), for instance C(inet glm_vllm).
    type: dict
    default: {}
  state:
    description: Whether the records exist. V(listed) changes nothing and returns all.
    type: str
    choices: [present, absent, listed]
    default: present
  keep:
    description: Paths that O(state=absent) leaves alone, with all that is below. A dir that holds one keeps its record.
    type: list
    elements: path
    default: []
  root:
    description: Folder of C(footprint.json) and C(backup/).
    type: path
    default: /var/lib/glm-vllm
author: The project's authors
"""

EXAMPLES = r"""
- name: Record the unit file
  footprint:
    role: ray-cluster
    kind: file
    name: /etc/systemd/system/ray-head.service

- name: Record packages that may be installed by the next task
  footprint:
    role: cuda-sm121
    kind: package
    name: [g++, ninja-build]

- name: Record a file that belongs to the system
  footprint:
    role: cuda-sm121
    kind: file
    name: /etc/fstab
    backup: true
"""

RETURN = r"""
records:
  description: The records of the names asked for, as they stand now (in check mode, as they would stand).
  returned: with O(state=present)
  type: list
  elements: dict
  sample: [{role: cuda-sm121, kind: file, name: /etc/fstab, when: "2026-09-30T10:00:00+00:00", data: {},
            before: {exists: true, mode: "0644", owner: root, group: root, sha256: "...",
                     backup: /var/lib/glm-vllm/backup/etc/fstab}}]
kinds:
  description: Every record of the node by kind, newest first; a kind without one is an empty list.
  returned: with O(state=listed)
  type: dict
"""

PATH_KINDS = ("file", "dir", "symlink")
KINDS = (*PATH_KINDS, "package", "hold", "unit", "user", "swap", "sysctl", "hosts", "firewall")
Record = dict[str, Any]


def _run(*command: str) -> str:
    """Standard output, stripped; empty when the program fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


class Footprint:
    """`footprint.json` under ``root``: ``{"schema": 1, "records": [record, ...]}``, oldest first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "footprint.json"
        self.backup = root / "backup"
        self.records: list[Record] = []
        if self.path.exists():
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content.get("schema") != 1:
                raise ValueError(
                    f"{self.path} has schema {content.get('schema')!r}, this version reads 1: "
                    "uninstall with the version that wrote it"
                )
            self.records = content["records"]

    def find(self, kind: str, name: str) -> Record | None:
        return next((r for r in self.records if r["kind"] == kind and r["name"] == name), None)

    def add(self, role: str, kind: str, name: str, backup: bool, data: dict[str, Any], write: bool) -> Record:
        """Append the record of one thing as it is now. With ``write`` false only say what the record would be."""
        record: Record = {
            "role": role,
            "kind": kind,
            "name": name,
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "data": data,
            "before": before(kind, name),
        }
        if backup and record["before"].get("sha256"):
            copy = self.backup / name.lstrip("/")
            record["before"]["backup"] = str(copy)
            if write:
                _copy(Path(name), copy, self.backup)
        self.records.append(record)
        return record

    def save(self) -> None:
        """Write the file in one step; a folder that uninstall has just taken away is not made again."""
        if not self.root.exists():
            return
        text = json.dumps({"schema": 1, "records": self.records}, indent=1, sort_keys=True) + "\n"
        handle, name = tempfile.mkstemp(dir=self.root, prefix=".footprint.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, self.path)


def before(kind: str, name: str) -> dict[str, Any]:
    """How the thing is now, in the terms in which uninstall puts it back."""
    if kind in PATH_KINDS:
        return _before_path(Path(name))
    if kind == "package":
        state = _run("dpkg-query", "-W", "-f", "${db:Status-Status}", name)
        return {"installed": state == "installed"}
    if kind == "hold":
        return {"selection": _run("dpkg-query", "-W", "-f", "${db:Status-Want}", name) or "unknown"}
    if kind == "unit":
        return {
            "enabled": _run("systemctl", "is-enabled", name) or "not-found",
            "active": _run("systemctl", "is-active", name),
        }
    if kind == "user":
        return {"exists": any(user.pw_name == name for user in pwd.getpwall())}
    if kind == "sysctl":
        path = Path("/proc/sys") / name.replace(".", "/")
        return {"value": path.read_text(encoding="utf-8").strip() if path.exists() else ""}
    return {}


def _before_path(path: Path) -> dict[str, Any]:
    if path.is_symlink():
        return {"exists": True, "target": os.readlink(path)}
    if not path.exists():
        return {"exists": False}
    status = path.stat()
    state: dict[str, Any] = {
        "exists": True,
        "mode": f"{status.st_mode & 0o7777:04o}",
        "owner": _owner(status.st_uid),
        "group": _group(status.st_gid),
    }
    if path.is_file():
        state["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return state


def _copy(source: Path, target: Path, top: Path) -> None:
    """Copy content, mode, owner and times; the folder of copies is root's own, as it may hold private files."""
    top.mkdir(parents=True, exist_ok=True)
    top.chmod(0o700)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    status = source.stat()
    os.chown(target, status.st_uid, status.st_gid)


def undo(record: Record, keep: list[str], write: bool) -> tuple[bool, bool]:
    """Put a path back as its record says.

    :returns: whether something changed (or would), and whether the record is done with
    """
    path, state = Path(record["name"]), record["before"]
    if any(path == Path(k) or Path(k) in path.parents for k in keep):
        return False, False
    if "target" in state:
        return _restore_link(path, state["target"], write), True
    if not state["exists"]:
        return _remove(path, [Path(k) for k in keep], write)
    if "backup" not in state:
        return False, True
    return _restore_file(path, state, write), True


def _restore_link(path: Path, target: str, write: bool) -> bool:
    if path.is_symlink() and os.readlink(path) == target:
        return False
    if write:
        new = path.with_name(f".{path.name}.footprint")
        new.symlink_to(target)
        os.replace(new, path)
    return True


def _restore_file(path: Path, state: dict[str, Any], write: bool) -> bool:
    now = _before_path(path)
    if all(now.get(key) == state[key] for key in ("mode", "owner", "group", "sha256")):
        return False
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.footprint")
        shutil.copy2(state["backup"], new)
        status = os.stat(state["backup"])
        os.chown(new, status.st_uid, status.st_gid)
        os.replace(new, path)
    return True


def _remove(path: Path, keep: list[Path], write: bool) -> tuple[bool, bool]:
    if not os.path.lexists(path):
        return False, True
    if path.is_symlink() or not path.is_dir():
        if write:
            path.unlink()
        return True, True
    kept = [k for k in keep if path in k.parents and k.exists()]
    if not kept:
        if write:
            shutil.rmtree(path)
        return True, True
    changed = False
    for child in sorted(path.iterdir()):
        # the record of what is kept has to stay with it, or nothing could take it away later
        if child not in keep and child.name not in ("footprint.json", "backup"):
            changed = _remove(child, keep, write)[0] or changed
    return changed, False


def apply(params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Do what the parameters ask. :returns: result for `exit_json`, with a diff of one line a record."""
    root = Path(params["root"])
    footprint = Footprint(root)
    if params["state"] == "listed":
        return {
            "changed": False,
            "kinds": {kind: [r for r in footprint.records[::-1] if r["kind"] == kind] for kind in KINDS},
        }
    lines_before, lines_after, records, changed = [], [], [], False
    if params["state"] == "present" and params["name"] and not root.exists():
        # the folder itself is the first thing that we add
        footprint.add("footprint", "dir", str(root), False, {}, False)
        if not check:
            root.mkdir(mode=0o755, parents=True)
    for name in params["name"]:
        record = footprint.find(params["kind"], name)
        line = f"{params['kind']} {name}\n"
        if params["state"] == "present":
            if record is None:
                record = footprint.add(
                    params["role"], params["kind"], name, params["backup"], params["data"], not check
                )
                lines_after.append(line)
                changed = True
            records.append(record)
        elif record is not None:
            done = True
            undone = False
            if record["kind"] in PATH_KINDS:
                undone, done = undo(record, params["keep"], not check)
            if done:
                footprint.records.remove(record)
            if done or undone:
                changed = True
                lines_before.append(line)
    if changed and not check:
        footprint.save()
    return {
        "changed": changed,
        "records": records,
        "diff": {
            "before": "".join(lines_before),
            "after": "".join(lines_after),
            "before_header": "recorded",
            "after_header": "recorded",
        },
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "role": {"type": "str"},
            "kind": {"type": "str", "choices": list(KINDS)},
            "name": {"type": "list", "elements": "str", "default": []},
            "backup": {"type": "bool", "default": False},
            "data": {"type": "dict", "default": {}},
            "state": {"type": "str", "choices": ["present", "absent", "listed"], "default": "present"},
            "keep": {"type": "list", "elements": "path", "default": []},
            "root": {"type": "path", "default": "/var/lib/glm-vllm"},
        },
        required_if=[("state", "present", ["role", "kind"]), ("state", "absent", ["kind"])],
        supports_check_mode=True,
    )
    for name in module.params["name"]:
        if module.params["kind"] in (*PATH_KINDS, "hosts") and not name.startswith("/"):
            module.fail_json(
                msg=f"footprint: {module.params['kind']} {name!r} is not an absolute path: give the whole path."
            )
    try:
        module.exit_json(**apply(module.params, module.check_mode))
    except (OSError, ValueError, KeyError) as error:
        module.fail_json(msg=f"footprint: {module.params['root']}/footprint.json cannot be used: {error}.")


if __name__ == "__main__":
    main()
