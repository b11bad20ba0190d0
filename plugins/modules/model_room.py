# SPDX-License-Identifier: Apache-2.0
"""Check that what is still missing of a model fits on the disk."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_room
short_description: Checks the free space for the missing part of a model
description:
  - Counts what is already there, complete or in part, as present.
options:
  path: {description: Folder of the model; may not exist yet., type: path, required: true}
  files: {description: "Relative path to a dict with size in bytes.", type: dict, required: true}
  reserve: {description: Bytes that must stay free., type: int, default: 1073741824}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Is there room
  model_room:
    path: /var/lib/glm-vllm/models/tiny/0123
    files: {config.json: {size: 1000}}
"""

RETURN = r"""
needed: {description: Bytes of the whole model., type: int, returned: always}
present: {description: Bytes of it that are here., type: int, returned: always}
free: {description: Free bytes of the file system., type: int, returned: always}
"""

import os
import platform
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule


def gib(size: int) -> str:
    """Size in GiB, one decimal."""
    return f"{size / 2**30:.1f} GiB"


def present(path: Path, files: dict[str, dict[str, Any]]) -> int:
    """Bytes of these files that need not be written again: complete files, and parts of others in hidden folders."""
    complete, missing = 0, 0
    for name, entry in files.items():
        file = path / name
        if file.is_file() and file.stat().st_size == entry["size"]:
            complete += entry["size"]
        else:
            missing += entry["size"]
    parts = 0
    for folder, _, names in os.walk(path):
        hidden = any(part.startswith(".") for part in Path(folder).relative_to(path).parts)
        parts += sum(os.lstat(os.path.join(folder, n)).st_size for n in names) if hidden else 0
    return complete + min(parts, missing)


def free(path: Path) -> int:
    """Free bytes where path is or will be."""
    while not path.exists():
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "files": {"type": "dict", "required": True},
            "reserve": {"type": "int", "default": 2**30},
        },
        supports_check_mode=True,
    )
    path, files = Path(module.params["path"]), module.params["files"]
    needed = sum(entry["size"] for entry in files.values())
    here, room = present(path, files), free(path)
    lacking = needed - here + module.params["reserve"] - room
    figures = {"needed": needed, "present": here, "free": room}
    if needed > here and lacking > 0:
        module.fail_json(
            msg=(
                f"{platform.node()}: {path} needs {gib(needed)} and has {gib(here)} of it, {gib(room)} are free: "
                f"make {gib(lacking)} more room, or put model_fetch_dir on a larger file system."
            ),
            **figures,
        )
    module.exit_json(changed=False, **figures)


if __name__ == "__main__":
    main()
