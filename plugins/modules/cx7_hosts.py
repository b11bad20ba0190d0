# SPDX-License-Identifier: Apache-2.0
"""Keep the fabric names in /etc/hosts, and the own name off the loopback address; undo both exactly."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cx7_hosts
short_description: Keeps our lines in /etc/hosts
description:
  - Our lines stand in one block at the top. A line that gives the own host name a loopback address 127.0.1.x, which
    Gloo and Ray would announce to the peer, is commented out with a mark, and its names move to O(address).
  - O(state=absent) takes the block away and the marks off. Every other byte stays as it is, whoever wrote it.
options:
  path: {description: The file., type: path, default: /etc/hosts}
  state: {description: Whether our lines are there., type: str, choices: [present, absent], default: present}
  lines: {description: Lines of the block., type: list, elements: str, default: []}
  hostname: {description: Own host name without its domain., type: str, default: ""}
  address: {description: Own address for the names that are taken off the loopback address., type: str, default: ""}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Name the nodes on the fabric
  cx7_hosts:
    lines: [192.168.177.11 spark-a.fabric, 192.168.177.12 spark-b.fabric]
    hostname: spark-a
    address: 192.168.177.11
"""

RETURN = r"""
moved: {description: Names that were taken off the loopback address., type: list, elements: str, returned: always}
"""

import os
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

BEGIN, END, MARK = b"# BEGIN glm-vllm fabric", b"# END glm-vllm fabric", b"# glm-vllm: "


def without_ours(text: bytes) -> bytes:
    """The file as it was before our lines."""
    kept = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line.rstrip(b"\r\n") in (BEGIN, END):
            inside = line.startswith(BEGIN)
        elif not inside:
            kept.append(line.removeprefix(MARK))
    return b"".join(kept)


def with_ours(text: bytes, lines: list[str], hostname: str, address: str) -> tuple[bytes, list[str]]:
    """The file with our lines, from one without them, and the names that moved."""
    kept = []
    moved: list[str] = []
    for line in text.splitlines(keepends=True):
        words = line.partition(b"#")[0].decode(errors="replace").split()
        names = words[1:]
        if names and words[0].startswith("127.0.1.") and hostname in [name.split(".")[0] for name in names]:
            moved += names
            line = MARK + line
        kept.append(line)
    block = [*lines, *([" ".join([address, *dict.fromkeys(moved)])] if moved else [])]
    ours = b"".join(line + b"\n" for line in [BEGIN, *(line.encode() for line in block), END])
    return ours + b"".join(kept), list(dict.fromkeys(moved))


def replace(path: Path, text: bytes) -> None:
    """Replace a file whole; owner and mode stay."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".glm-vllm-")
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    status = path.stat() if path.exists() else None
    os.chmod(name, status.st_mode & 0o7777 if status else 0o644)
    if status:
        os.chown(name, status.st_uid, status.st_gid)
    os.replace(name, path)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "default": "/etc/hosts"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "lines": {"type": "list", "elements": "str", "default": []},
            "hostname": {"type": "str", "default": ""},
            "address": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    params = module.params
    path = Path(params["path"])
    before = path.read_bytes() if path.exists() else b""
    after, moved = without_ours(before), []
    if params["state"] == "present":
        after, moved = with_ours(after, params["lines"], params["hostname"], params["address"])
    if after != before and not module.check_mode:
        replace(path, after)
    diff = {
        "before": before.decode(errors="replace"),
        "after": after.decode(errors="replace"),
        "before_header": str(path),
        "after_header": str(path),
    }
    module.exit_json(changed=after != before, moved=moved, **({"diff": diff} if after != before else {}))


if __name__ == "__main__":
    main()
