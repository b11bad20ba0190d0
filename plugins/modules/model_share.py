# SPDX-License-Identifier: Apache-2.0
"""Serve one model folder to the peer for the time of a transfer."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_share
short_description: Starts and ends a read-only rsync daemon for one folder
description:
  - One daemon a rail, each a transient unit that listens on that rail's address alone. It admits the peer's address
    there with a secret made for this transfer, and runs as nobody. With O(state=absent) units, configuration and secret
    are gone.
options:
  state: {description: Whether the daemon runs., type: str, choices: [present, absent], required: true}
  path: {description: Folder to serve., type: path}
  rails:
    description: "The rails of fabric.json: C(address) to listen on and C(peer) to admit there; other keys are ignored."
    type: list
    elements: dict
  port: {description: Port., type: int, default: 8730}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Serve the model
  model_share:
    state: present
    path: /var/lib/glm-vllm/models/tiny/0123
    rails: [{address: 192.168.177.11, peer: 192.168.177.12}]
"""

RETURN = r"""
origins:
  description: "What M(model_bring) brings from, one a rail: {url, password}."
  type: list
  elements: dict
  returned: with state present
"""

import os
import secrets
import shutil
import socket
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

UNIT = "glm-vllm-model-share"
FOLDER = Path("/run/glm-vllm-model-share")
CONFIG = """\
use chroot = no
reverse lookup = no
uid = nobody
gid = nogroup
[model]
path = {path}
read only = yes
list = no
hosts allow = {peer}
auth users = glm-vllm
secrets file = {secrets}
"""


def private(path: Path, text: str) -> None:
    """Write a file that only root can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def stop(module: AnsibleModule) -> bool:
    """End the daemons and remove their files; True when there was something to end."""
    code, _, _ = module.run_command(["systemctl", "--quiet", "is-active", f"{UNIT}@*.service"])
    there = code == 0 or FOLDER.exists()
    if there and not module.check_mode:
        module.run_command(["systemctl", "stop", f"{UNIT}@*.service"])
        shutil.rmtree(FOLDER, ignore_errors=True)
    return there


def listens(address: str, port: int) -> bool:
    """Whether somebody answers there, within five seconds."""
    for _ in range(50):
        try:
            socket.create_connection((address, port), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.1)
    return False


def start(module: AnsibleModule) -> list[dict[str, str]]:
    """Start a daemon a rail and wait until all listen; returns the origins."""
    port, secret, origins = module.params["port"], secrets.token_urlsafe(24), []
    FOLDER.mkdir(mode=0o700)
    private(FOLDER / "secrets", f"glm-vllm:{secret}\n")
    for number, rail in enumerate(module.params["rails"]):
        address, config = rail["address"], FOLDER / f"rail{number}.conf"
        private(config, CONFIG.format(path=module.params["path"], peer=rail["peer"], secrets=FOLDER / "secrets"))
        unit = f"{UNIT}@{number}.service"
        module.run_command(
            ["systemd-run", "--quiet", "--collect", f"--unit={unit}", "--property=RuntimeMaxSec=12h", "rsync"]
            + ["--daemon", "--no-detach", f"--address={address}", f"--port={port}", f"--config={config}"],
            check_rc=True,
        )
        if not listens(address, port):
            _, out, _ = module.run_command(["journalctl", "--no-pager", "--lines=3", "--output=cat", f"--unit={unit}"])
            stop(module)
            module.fail_json(msg=f"The daemon of the transfer does not listen on {address} port {port}: {out.strip()}")
        origins.append({"url": f"rsync://glm-vllm@{address}:{port}/model/", "password": secret})
    return origins


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "required": True},
            "path": {"type": "path"},
            "rails": {"type": "list", "elements": "dict"},
            "port": {"type": "int", "default": 8730},
        },
        required_if=[("state", "present", ("path", "rails"))],
        supports_check_mode=True,
    )
    left = stop(module)  # also what a broken run left
    if module.params["state"] == "absent":
        module.exit_json(changed=left)
    module.exit_json(changed=True, origins=[] if module.check_mode else start(module))


if __name__ == "__main__":
    main()
