# SPDX-License-Identifier: Apache-2.0
"""Bring the missing and wrong files of a model from the head."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_pull
short_description: Copies named files of a model from the daemon that model_share started
description:
  - Names files one by one, so nothing else is compared or read. What arrived of a broken transfer is used again.
options:
  path: {description: Folder of the model; must exist., type: path, required: true}
  files: {description: Relative paths to bring., type: list, elements: str, required: true}
  address: {description: Address of the head on the fabric., type: str, required: true}
  secret: {description: What model_share returned., type: str, required: true}
  port: {description: Port., type: int, default: 8730}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Bring the files
  model_pull:
    path: /var/lib/glm-vllm/models/tiny/0123
    files: "{{ found.wrong }}"
    address: 192.168.177.11
    secret: "{{ share.secret }}"
"""

RETURN = r"""
seconds: {description: Time of the transfer., type: float, returned: success}
"""

import shutil
import tempfile
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

PART = ".partial"


def command(path: str, address: str, port: int, names: str, password: str) -> list[str]:
    """The rsync command line; names and password are files."""
    return [
        "rsync", "--times", "--perms", "--ignore-times", "--chmod=D755,F644", f"--partial-dir={PART}", "--timeout=60",
        f"--files-from={names}", f"--password-file={password}", f"--port={port}",
        f"rsync://glm-vllm@{address}/model/", f"{path}/",
    ]  # fmt: skip


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "files": {"type": "list", "elements": "str", "required": True},
            "address": {"type": "str", "required": True},
            "secret": {"type": "str", "required": True, "no_log": True},
            "port": {"type": "int", "default": 8730},
        },
        supports_check_mode=True,
    )
    path, files, address = module.params["path"], module.params["files"], module.params["address"]
    if module.check_mode or not files:
        module.exit_json(changed=bool(files), seconds=0.0)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        names, password = Path(folder, "names"), Path(folder, "password")
        names.write_text("".join(f"{name}\n" for name in files))
        password.touch(mode=0o600)
        password.write_text(module.params["secret"])
        code, out, err = module.run_command(command(path, address, module.params["port"], str(names), str(password)))
    if code != 0:
        last = (err or out).strip().splitlines()[-1:]
        module.fail_json(
            msg=f"Copying {len(files)} files of {address} failed ({' '.join(last)}); run again, what arrived stays."
        )
    shutil.rmtree(Path(path, PART), ignore_errors=True)
    module.exit_json(changed=True, seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    main()
