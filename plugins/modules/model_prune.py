# SPDX-License-Identifier: Apache-2.0
"""Remove revisions of models that nothing on the node refers to any more."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_prune
short_description: Removes old revisions of models
description:
  - What O(used) names and what the current or the previous deployment serves always stays; of the others the newest
    O(keep).
options:
  dir: {description: "Folder of all models, as C(<name>/<revision>/).", type: path, required: true}
  used: {description: Folders in use., type: list, elements: path, required: true}
  keep: {description: How many others stay., type: int, required: true}
  deployments: {description: Folder of the deployments., type: path, default: /var/lib/glm-vllm/deployments}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Remove all revisions that are not in use
  model_prune: {dir: /var/lib/glm-vllm/models, used: [/var/lib/glm-vllm/models/tiny/0123], keep: 0}
"""

RETURN = r"""
removed: {description: Folders that were (or would be) removed., type: list, elements: str, returned: always}
freed: {description: Bytes of the files in them that no other name holds., type: int, returned: always}
"""

import json
import os
import re
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

REVISION = re.compile(r"[0-9a-f]{40}")


def served(deployments: Path) -> set[Path]:
    """Folders of models and drafters of the current and the previous deployment."""
    found = set()
    for name in ("current", "previous"):
        try:
            document = json.loads((deployments / name / "deployment.json").read_text())
        except (OSError, ValueError):
            continue
        found |= {Path(document[key]["path"]) for key in ("model", "drafter") if document.get(key)}
    return found


def old(top: Path, used: set[Path], keep: int) -> list[Path]:
    """Folders to remove: revisions below top that are not used, without the newest `keep`."""
    folders = [path for path in top.glob("*/*") if path.is_dir() and REVISION.fullmatch(path.name) and path not in used]
    return sorted(sorted(folders, key=lambda path: path.stat().st_mtime_ns, reverse=True)[keep:])


def freed(folder: Path) -> int:
    """Bytes of files that have no other name elsewhere."""
    stats = [os.lstat(Path(where, name)) for where, _, names in os.walk(folder) for name in names]
    return sum(stat.st_size for stat in stats if stat.st_nlink == 1)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "dir": {"type": "path", "required": True},
            "used": {"type": "list", "elements": "path", "required": True},
            "keep": {"type": "int", "required": True},
            "deployments": {"type": "path", "default": "/var/lib/glm-vllm/deployments"},
        },
        supports_check_mode=True,
    )
    used = {Path(path) for path in module.params["used"]} | served(Path(module.params["deployments"]))
    folders = old(Path(module.params["dir"]), used, module.params["keep"])
    size = sum(freed(folder) for folder in folders)
    if not module.check_mode:
        for folder in folders:
            shutil.rmtree(folder)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()
    shown = {"before": "".join(f"{folder}\n" for folder in folders), "after": ""}
    module.exit_json(changed=bool(folders), removed=[str(folder) for folder in folders], freed=size, diff=shown)


if __name__ == "__main__":
    main()
