# SPDX-License-Identifier: Apache-2.0
"""Keep the measurements of the rails, and show the newest one."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cx7_record
short_description: Keeps dated measurements of the rails
description:
  - A measurement is one JSON file named by its time; the newest O(keep) are kept. It is no configuration, so writing
    one is no change.
options:
  document:
    description: The measurement, as the filter cx7_measurement gives it; without one the newest is read.
    type: dict
  folder: {description: Where they are., type: path, default: /var/lib/glm-vllm/fabric}
  keep: {description: Number of measurements that stay., type: int, default: 20}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Show the newest measurement
  cx7_record:
  register: newest
"""

RETURN = r"""
path: {description: "The file; empty when nothing was measured yet.", type: str, returned: always}
lines: {description: The measurement in words., type: list, elements: str, returned: always}
"""

import json
import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule


def gbps(value: float | None) -> str:
    """A bandwidth in words."""
    return "" if value is None else f"{value:.1f} Gb/s"


def words(document: dict[str, Any]) -> list[str]:
    """A measurement as lines for a terminal."""
    said = [f"measured {document['when']} with {document['tool']}, floor {document['floor_gbps']} Gb/s"]
    if document["adopted"]:
        files = sorted({file for paths in document["files"].values() for file in paths})
        said.append(f"adopted from {', '.join(files) or 'no file'}")
    for rail in document["rails"]:
        parts = [
            "no full frame passes" if rail["rtt_ms"] is None else f"{rail['bytes']} bytes in {rail['rtt_ms']:.2f} ms",
            gbps(rail["gbps"]),
            f"{gbps(rail['together_gbps'])} together" if rail["together_gbps"] is not None else "",
        ]
        said.append(f"{rail['node']} {rail['netdev']} to {rail['peer']}: {', '.join(p for p in parts if p)}")
    return said + document["against"] + document["warnings"]


def store(folder: Path, document: dict[str, Any], keep: int) -> Path:
    """Write a measurement and remove all but the newest; returns its path."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    path = folder / f"{document['when'].replace(':', '')}.json"
    new = folder / f".{path.name}"
    new.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)
    for old in sorted(folder.glob("*.json"))[:-keep]:
        old.unlink()
    return path


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "document": {"type": "dict"},
            "folder": {"type": "path", "default": "/var/lib/glm-vllm/fabric"},
            "keep": {"type": "int", "default": 20},
        },
        supports_check_mode=True,
    )
    folder, document = Path(module.params["folder"]), module.params["document"]
    if document:
        path = "" if module.check_mode else str(store(folder, document, module.params["keep"]))
        module.exit_json(changed=False, path=path, lines=words(document))
    newest = max(folder.glob("*.json"), default=None)
    lines = words(json.loads(newest.read_text(encoding="utf-8"))) if newest else []
    module.exit_json(changed=False, path=str(newest or ""), lines=lines)


if __name__ == "__main__":
    main()
